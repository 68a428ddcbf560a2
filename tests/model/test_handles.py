"""Handles: the published bytes, every kind of malformed bytes, and handles of other stores."""

from __future__ import annotations

import copy
import pickle
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric import handles
from flowfabric.errors import Corruption, HandleFromOtherBackend, InvalidInput
from flowfabric.handles import BackendTag, Handle, HandleFields, HandleKind, decode_handle, encode_handle, open_handle
from flowfabric.ids import AttemptId, ExecutionId, LaneId, LeaseId, WorkerInstanceId

FIELDS = HandleFields(
    execution_id=ExecutionId("{fp:7}:11111111-1111-4111-8111-111111111111"),
    attempt_index=0,
    attempt_id=AttemptId("22222222-2222-4222-8222-222222222222"),
    lease_id=LeaseId("33333333-3333-4333-8333-333333333333"),
    lease_epoch=1,
    lease_ttl_ms=30_000,
    lane_id=LaneId("default"),
    worker_instance_id=WorkerInstanceId("w-1"),
)
GOLDEN = bytes.fromhex(
    "0201022b0000007b66703a377d3a31313131313131312d313131312d34313131"
    "2d383131312d3131313131313131313131310000000024000000323232323232"
    "32322d323232322d343232322d383232322d3232323232323232323232322400"
    "000033333333333333332d333333332d343333332d383333332d333333333333"
    "333333333333010000000000000030750000000000000700000064656661756c"
    "7403000000772d31"
)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(raw)) + raw


def encoded_fields(
    execution_id: str | bytes = FIELDS.execution_id,
    attempt_id: str | bytes = FIELDS.attempt_id,
    lease_id: str | bytes = FIELDS.lease_id,
    lane_id: str | bytes = FIELDS.lane_id,
    instance: str | bytes = FIELDS.worker_instance_id,
) -> bytes:
    """Encode the fields of a handle without the codec."""
    return (
        text(execution_id)
        + struct.pack("<I", 0)
        + text(attempt_id)
        + text(lease_id)
        + struct.pack("<QQ", 1, 30_000)
        + text(lane_id)
        + text(instance)
    )


def with_byte(at: int, value: int) -> bytes:
    return GOLDEN[:at] + bytes([value]) + GOLDEN[at + 1 :]


@st.composite
def any_fields(draw: st.DrawFn) -> HandleFields:
    return HandleFields(
        execution_id=ExecutionId(f"{{fp:{draw(st.integers(0, 65535))}}}:{draw(st.uuids())}"),
        attempt_index=draw(st.integers(0, 2**32 - 1)),
        attempt_id=AttemptId(str(draw(st.uuids()))),
        lease_id=LeaseId(str(draw(st.uuids()))),
        lease_epoch=draw(st.integers(0, 2**64 - 1)),
        lease_ttl_ms=draw(st.integers(0, 2**64 - 1)),
        lane_id=LaneId(draw(st.text())),
        worker_instance_id=WorkerInstanceId(draw(st.text())),
    )


# The codec


@pytest.mark.spec("EX-004")
def test_handle_golden_encoding() -> None:
    assert len(GOLDEN) == 168
    assert encode_handle(FIELDS, BackendTag.POSTGRES) == GOLDEN
    assert decode_handle(GOLDEN) == (BackendTag.POSTGRES, FIELDS)


@pytest.mark.spec("EX-004")
@pytest.mark.parametrize("tag", BackendTag)
def test_another_store_changes_only_the_third_byte(tag: BackendTag) -> None:
    assert encode_handle(FIELDS, tag) == with_byte(2, tag.value)


@pytest.mark.spec("EX-005")
@pytest.mark.parametrize(
    ("data", "failure"),
    [
        (GOLDEN + b"\x00", handles.TrailingBytes),
        (GOLDEN[:-1], handles.Truncated),
        (b"", handles.Truncated),
        (b"\x02", handles.Truncated),
        (b"\x02\x01", handles.Truncated),
        (b"\x01", handles.Truncated),
        (with_byte(1, 0x02), handles.BadWireVersion),
        (with_byte(2, 0x09), handles.BadBackendTag),
        (with_byte(2, 0x00), handles.BadBackendTag),
        (with_byte(0, 0x07), handles.BadV1Version),
        (b"\x02\x01\x02" + encoded_fields(execution_id="abc"), handles.ParseField),
        (b"\x02\x01\x02" + encoded_fields(attempt_id="abc"), handles.ParseField),
        (b"\x02\x01\x02" + encoded_fields(lease_id=""), handles.ParseField),
        (b"\x02\x01\x02" + encoded_fields(lane_id=b"\xff"), handles.InvalidUtf8),
        (b"\x02\x01\x02" + encoded_fields(execution_id=b"\xc3"), handles.InvalidUtf8),
    ],
)
def test_handle_decoding_failures(data: bytes, failure: type[Corruption]) -> None:
    with pytest.raises(failure) as caught:
        decode_handle(data)

    assert caught.value.kind == "corruption"
    assert caught.value.detail.startswith("handle_codec: ")


@pytest.mark.spec("EX-005")
def test_the_legacy_form_decodes_as_valkey() -> None:
    assert decode_handle(b"\x01" + encoded_fields()) == (BackendTag.VALKEY, FIELDS)


def test_decoding_errors_carry_the_offending_value() -> None:
    with pytest.raises(handles.Truncated) as cut:
        decode_handle(GOLDEN[:-1])
    with pytest.raises(handles.TrailingBytes) as long:
        decode_handle(GOLDEN + b"ab")
    with pytest.raises(handles.ParseField) as bad:
        decode_handle(b"\x01" + encoded_fields(lease_id="x"))

    assert (cut.value.needed, cut.value.at, cut.value.have) == (3, 165, 2)
    assert (long.value.pos, long.value.len) == (168, 170)
    assert bad.value.field == "lease_id"


def test_each_truncated_number_is_named_by_its_own_field() -> None:
    epoch = GOLDEN.index(bytes([1, 0, 0, 0, 0, 0, 0, 0]), 100)
    for length, place in ((epoch, epoch), (epoch + 7, epoch), (epoch + 8, epoch + 8), (epoch + 15, epoch + 8)):
        with pytest.raises(handles.Truncated) as cut:
            decode_handle(GOLDEN[:length])
        assert (cut.value.needed, cut.value.at, cut.value.have) == (8, place, length - place)


def test_a_length_beyond_the_end_is_reported_as_truncated() -> None:
    with pytest.raises(handles.Truncated):
        decode_handle(b"\x02\x01\x02" + b"\xff\xff\xff\xff")


def test_identifiers_must_be_canonical_and_names_are_kept_as_they_are() -> None:
    _, fields = decode_handle(b"\x01" + encoded_fields(lease_id=FIELDS.lease_id.upper(), lane_id="", instance="é x"))

    assert fields == msgspec.structs.replace(FIELDS, lane_id=LaneId(""), worker_instance_id=WorkerInstanceId("é x"))


@given(any_fields(), st.sampled_from(BackendTag))
def test_every_handle_is_read_back(fields: HandleFields, tag: BackendTag) -> None:
    assert decode_handle(encode_handle(fields, tag)) == (tag, fields)


@given(st.integers(0, len(GOLDEN) - 1))
def test_no_prefix_of_a_handle_is_a_handle(length: int) -> None:
    with pytest.raises(handles.Truncated):
        decode_handle(GOLDEN[:length])


@given(
    st.binary()
    | st.builds(lambda head, rest: head + rest, st.sampled_from([b"\x01", b"\x02\x01\x02"]), st.binary(max_size=200))
    | st.builds(with_byte, st.integers(0, 167), st.integers(0, 255)),
    st.sampled_from(BackendTag),
)
def test_any_bytes_decode_or_are_refused_as_corrupt_or_foreign(data: bytes, expected: BackendTag) -> None:
    try:
        fields = open_handle(Handle(expected, HandleKind.FRESH, data), expected)
    except (Corruption, HandleFromOtherBackend):
        return
    assert decode_handle(encode_handle(fields, expected)) == (expected, fields)


@pytest.mark.parametrize("change", [{"attempt_index": 2**32}, {"lease_epoch": -1}, {"lease_ttl_ms": 2**64}])
def test_a_number_that_does_not_fit_is_refused_by_the_encoder(change: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="handle"):
        encode_handle(msgspec.structs.replace(FIELDS, **change), BackendTag.SQLITE)


# Handles


def test_a_handle_opens_on_the_store_that_issued_it() -> None:
    handle = Handle(BackendTag.POSTGRES, HandleKind.FRESH, GOLDEN)

    assert open_handle(handle, BackendTag.POSTGRES) == handle.fields == FIELDS


@pytest.mark.spec("EX-006")
def test_the_outer_tag_of_a_foreign_handle_is_compared_first() -> None:
    with pytest.raises(HandleFromOtherBackend) as caught:
        open_handle(Handle(BackendTag.POSTGRES, HandleKind.FRESH, b"not even read"), BackendTag.SQLITE)

    assert caught.value.detail == "expected=SQLite actual=Postgres"


@pytest.mark.spec("EX-006")
def test_a_forged_outer_tag_is_refused() -> None:
    forged = Handle(BackendTag.SQLITE, HandleKind.FRESH, GOLDEN)

    with pytest.raises(HandleFromOtherBackend) as caught:
        open_handle(forged, BackendTag.SQLITE)

    assert caught.value.detail == "expected=SQLite actual=Postgres"


def test_a_handle_without_bytes_or_a_tag_is_refused_when_it_is_opened() -> None:
    for backend, opaque in ((BackendTag.POSTGRES, "text"), (BackendTag.POSTGRES, None), (9, GOLDEN), ("x", GOLDEN)):
        with pytest.raises(InvalidInput):
            open_handle(Handle(backend, HandleKind.FRESH, opaque), BackendTag.POSTGRES)  # type: ignore[arg-type]


def test_a_handle_minted_in_this_process_is_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle.mint(BackendTag.MEMORY, HandleKind.RESUMED, FIELDS)
    monkeypatch.setattr(handles, "decode_handle", None)

    assert open_handle(handle, BackendTag.MEMORY) is FIELDS
    assert handle.opaque == with_byte(2, 0x04)


def test_a_received_handle_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(BackendTag.POSTGRES, HandleKind.FRESH, GOLDEN)
    first = open_handle(handle, BackendTag.POSTGRES)
    monkeypatch.setattr(handles, "decode_handle", None)

    assert open_handle(handle, BackendTag.POSTGRES) is first


def test_a_minted_handle_equals_the_one_read_from_its_bytes() -> None:
    minted = Handle.mint(BackendTag.POSTGRES, HandleKind.FRESH, FIELDS)
    read = Handle(BackendTag.POSTGRES, HandleKind.FRESH, GOLDEN)

    assert minted == read
    assert hash(minted) == hash(read)
    assert minted != Handle(BackendTag.POSTGRES, HandleKind.RECLAIMED, GOLDEN)
    assert minted != GOLDEN


def test_a_handle_survives_pickling_and_copying() -> None:
    handle = Handle.mint(BackendTag.SQLITE, HandleKind.SUSPENDED, FIELDS)

    for again in (pickle.loads(pickle.dumps(handle)), copy.deepcopy(handle)):
        assert again == handle
        assert open_handle(again, BackendTag.SQLITE) == FIELDS


def test_the_repr_of_a_handle_shows_its_fields_without_the_lease() -> None:
    minted = Handle.mint(BackendTag.SQLITE, HandleKind.FRESH, FIELDS)

    assert repr(minted) == f"<Handle Fresh SQLite {FIELDS.execution_id} attempt 0 epoch 1>"
    assert repr(Handle(BackendTag.SQLITE, HandleKind.FRESH, b"junk")) == "<Handle Fresh SQLite unopened>"
