"""Identifiers: which texts parse, why others do not, and which partition they belong to."""

from __future__ import annotations

import threading
import uuid as stdlib_uuid

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric import ids
from flowfabric.errors import InvalidInput
from flowfabric.ids import (
    BudgetId,
    ExecutionId,
    FlowId,
    LaneId,
    Partition,
    PartitionCounts,
    PartitionFamily,
    QuotaPolicyId,
    RandomMinter,
    SeededMinter,
    parse_execution_id,
    parse_lane_id,
    parse_partition_key,
    parse_uuid,
    parse_worker_id,
    parse_worker_instance_id,
    partition_of,
)

COUNTS = PartitionCounts()
UUID = "550e8400-e29b-41d4-a716-446655440000"
NIL = "00000000-0000-0000-0000-000000000000"
ONES = "11111111-1111-1111-1111-111111111111"


# Execution ids


@pytest.mark.spec("EX-001")
@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (UUID, ids.MissingTag),
        (f"{{fp:1}}{UUID}", ids.MissingTag),
        ("", ids.MissingTag),
        (f"{{fp:1:{UUID}", ids.MissingTag),
        (f"{{b:1}}:{UUID}", ids.MissingTag),
        (f" {{fp:1}}:{UUID}", ids.MissingTag),
        (f"{{fp:70000}}:{UUID}", ids.InvalidPartitionIndex),
        (f"{{fp:65536}}:{UUID}", ids.InvalidPartitionIndex),
        (f"{{fp:}}:{UUID}", ids.InvalidPartitionIndex),
        (f"{{fp:-1}}:{UUID}", ids.InvalidPartitionIndex),
        (f"{{fp:+1}}:{UUID}", ids.InvalidPartitionIndex),
        (f"{{fp:007}}:{UUID}", ids.InvalidPartitionIndex),
        (f"{{fp: 7}}:{UUID}", ids.InvalidPartitionIndex),
        (f"{{fp:1_0}}:{UUID}", ids.InvalidPartitionIndex),
        (f"{{fp:٣}}:{UUID}", ids.InvalidPartitionIndex),
        (f"{{fp:seven}}:{UUID}", ids.InvalidPartitionIndex),
        ("{fp:3}:not-a-uuid", ids.InvalidUuid),
        ("{fp:3}:", ids.InvalidUuid),
        (f"{{fp:3}}:{UUID}\n", ids.InvalidUuid),
        (f"{{fp:3}}:{{{UUID}}}", ids.InvalidUuid),
        (f"{{fp:3}}:urn:uuid:{UUID}", ids.InvalidUuid),
        (f"{{fp:3}}:{UUID}x", ids.InvalidUuid),
    ],
)
def test_execution_id_parsing_rejects(text: str, failure: type[InvalidInput]) -> None:
    with pytest.raises(failure) as caught:
        parse_execution_id(text)

    assert caught.value.kind == "invalid_input"
    assert caught.value.detail.startswith("execution_id")


@pytest.mark.parametrize(
    "text", [f"{{fp:0}}:{NIL}", f"{{fp:65535}}:{UUID}", f"{{fp:7}}:{UUID.upper()}", f"{{fp:10}}:{'a' * 32}"]
)
def test_an_execution_id_keeps_its_exact_text(text: str) -> None:
    assert parse_execution_id(text) == text


@given(st.integers(0, 65535), st.uuids())
def test_an_execution_id_exposes_its_partition_and_its_uuid(partition: int, uuid: stdlib_uuid.UUID) -> None:
    execution_id = parse_execution_id(f"{{fp:{partition}}}:{uuid}")

    assert partition_of(execution_id) == partition
    assert ids.uuid_of(execution_id) == str(uuid)


@given(st.text() | st.from_regex(r"\{fp:.{0,7}\}:?.{0,40}", fullmatch=True))
def test_any_text_parses_as_an_execution_id_or_is_invalid_input(text: str) -> None:
    try:
        execution_id = parse_execution_id(text)
    except InvalidInput:
        return
    assert 0 <= partition_of(execution_id) <= 65535


# UUIDs


@pytest.mark.parametrize("text", [UUID, UUID.upper(), UUID.replace("-", ""), NIL, f"urn:uuid:{UUID}", f"{{{UUID}}}"])
def test_a_uuid_of_any_version_and_case_is_normalised(text: str) -> None:
    assert parse_uuid(text) == str(stdlib_uuid.UUID(text))


@pytest.mark.parametrize("text", ["", "x", UUID[:-1], UUID + "0", f" {UUID}", f"{UUID}\n", UUID.replace("-", "_")])
def test_a_text_that_is_no_uuid_is_refused_with_the_field_named(text: str) -> None:
    with pytest.raises(ids.InvalidUuid, match="flow_id"):
        parse_uuid(text, "flow_id")


# Names


@pytest.mark.spec("EX-003")
@pytest.mark.parametrize("name", ["x", "a" * 64, "with an ordinary space", "~!{}", " "])
def test_printable_ascii_up_to_64_bytes_is_a_lane_name(name: str) -> None:
    assert parse_lane_id(name) == name


@pytest.mark.spec("EX-003")
def test_lane_id_boundaries() -> None:
    with pytest.raises(ids.LaneIdTooLong) as too_long:
        parse_lane_id("a" * 65)
    with pytest.raises(ids.LaneIdEmpty):
        parse_lane_id("")
    with pytest.raises(ids.LaneIdNonPrintable) as tab:
        parse_lane_id("a\tb")
    with pytest.raises(ids.LaneIdNonPrintable) as accent:
        parse_lane_id("é")

    assert (too_long.value.length, tab.value.index, accent.value.index) == (65, 1, 0)


@pytest.mark.parametrize(("name", "index"), [("ab\x7f", 2), ("a\n", 1), ("\x00", 0), ("ok\ud800", 2), ("naïve", 2)])
def test_the_first_unprintable_byte_of_a_lane_is_reported(name: str, index: int) -> None:
    with pytest.raises(ids.LaneIdNonPrintable) as caught:
        parse_lane_id(name)

    assert caught.value.index == index


def test_a_lane_is_measured_in_bytes() -> None:
    with pytest.raises(ids.LaneIdTooLong) as caught:
        parse_lane_id("é" * 33)

    assert caught.value.length == 66


@pytest.mark.parametrize("name", ["w", "w" * 256, "東京-1", "a|b:c,d", "é" * 128])
def test_text_without_whitespace_is_a_worker_name(name: str) -> None:
    assert parse_worker_id(name) == name
    assert parse_worker_instance_id(name) == name


@pytest.mark.parametrize(
    "name", ["", "w" * 257, "é" * 129, "a b", "a\tb", "a\x00", "a\x7f", "a\x85", "a\u00a0b", "a\u2003b", "\ud800"]
)
def test_blank_control_or_overlong_worker_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="worker_id"):
        parse_worker_id(name)
    with pytest.raises(InvalidInput, match="worker_instance_id"):
        parse_worker_instance_id(name)


# Partitions


@pytest.mark.spec("EX-002")
def test_partition_vectors() -> None:
    assert ids.crc16(b"123456789") == 0x31C3
    assert [ids.solo_partition(LaneId(lane), COUNTS) for lane in ("default", "main", "gpu", "lane-1")] == [
        86,
        213,
        144,
        173,
    ]
    assert [ids.flow_partition(FlowId(flow), COUNTS) for flow in (NIL, ONES, UUID)] == [0, 6, 24]


@pytest.mark.spec("EX-002")
def test_members_of_a_flow_share_its_partition() -> None:
    minter = RandomMinter()
    one, other = (ids.mint_for_flow(FlowId(UUID), COUNTS, minter) for _ in range(2))

    assert one != other
    assert partition_of(one) == partition_of(other) == ids.flow_partition(FlowId(UUID), COUNTS) == 24


@pytest.mark.spec("EX-002")
def test_deterministic_ids_are_the_same_every_time() -> None:
    given_uuid = "AAAAAAAA-0000-0000-0000-000000000000"

    assert ids.execution_id_for_flow(FlowId(UUID), COUNTS, NIL) == f"{{fp:24}}:{NIL}"
    assert ids.execution_id_for_flow(FlowId(UUID), COUNTS, given_uuid) == f"{{fp:24}}:{given_uuid.lower()}"
    assert ids.execution_id_for_lane(LaneId("gpu"), COUNTS, given_uuid) == f"{{fp:144}}:{given_uuid.lower()}"
    with pytest.raises(ids.InvalidUuid):
        ids.execution_id_for_lane(LaneId("gpu"), COUNTS, "gpu")


@pytest.mark.spec("EX-002")
def test_spreading_vectors() -> None:
    assert (ids.scan_jitter("worker-1", 256), ids.scan_jitter("inst-1", 256)) == (237, 151)
    assert (ids.scan_jitter("worker-1", 0), ids.scan_jitter("", 0)) == (0, 0)
    assert (ids.digest8(""), ids.digest8("a")) == ("4fd0bfc1", "296230c0")
    assert ids.fnv1a_64(b"") == 0xCBF29CE484222325


def slow_crc16(data: bytes) -> int:
    value = 0
    for byte in data:
        value ^= byte << 8
        for _ in range(8):
            value = (value << 1) ^ 0x1021 if value & 0x8000 else value << 1
            value &= 0xFFFF
    return value


@given(st.binary())
def test_the_table_driven_crc_equals_the_bitwise_one(data: bytes) -> None:
    assert ids.crc16(data) == slow_crc16(data)


@given(st.uuids(), st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 1000))
def test_partitions_stay_below_their_counts(uuid: stdlib_uuid.UUID, flow: int, budget: int, quota: int) -> None:
    counts = PartitionCounts(flow=flow, budget=budget, quota=quota)
    text = str(uuid)

    assert ids.flow_partition(FlowId(text), counts) == slow_crc16(uuid.bytes) % flow
    assert ids.budget_partition(BudgetId(text), counts) == slow_crc16(uuid.bytes) % budget
    assert ids.quota_partition(QuotaPolicyId(text), counts) == slow_crc16(uuid.bytes) % quota


@pytest.mark.parametrize("counts", [{"flow": 0}, {"budget": 0}, {"quota": -1}])
def test_a_deployment_has_at_least_one_partition_of_each_family(counts: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match=f"num_{next(iter(counts))}_partitions"):
        PartitionCounts(**counts)


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("", ids.MissingBraces),
        ("fp:7", ids.MissingBraces),
        ("{fp:7", ids.MissingBraces),
        ("{", ids.MissingBraces),
        ("{}", ids.MalformedBody),
        ("{fp7}", ids.MalformedBody),
        ("{x:7}", ids.UnknownFamilyPrefix),
        ("{:7}", ids.UnknownFamilyPrefix),
        ("{fp:}", ids.InvalidIndex),
        ("{fp:-1}", ids.InvalidIndex),
        ("{b:07}", ids.InvalidIndex),
        ("{q:65536}", ids.InvalidIndex),
        ("{q:1:2}", ids.InvalidIndex),
    ],
)
def test_a_partition_key_reports_why_it_does_not_parse(text: str, failure: type[InvalidInput]) -> None:
    with pytest.raises(failure):
        parse_partition_key(text)


@given(st.sampled_from(PartitionFamily), st.integers(0, 65535))
def test_a_partition_key_is_read_back_as_its_partition(family: PartitionFamily, index: int) -> None:
    assert parse_partition_key(Partition(family, index).key) == Partition(family, index)


def test_executions_use_the_flow_partitions() -> None:
    assert parse_partition_key("{fp:7}") == Partition(PartitionFamily.FLOW, 7)
    assert Partition(PartitionFamily.BUDGET, 3).key == "{b:3}"


# Minting


@pytest.mark.parametrize("minter", [RandomMinter(), SeededMinter(1)])
def test_minted_uuids_are_distinct_and_of_version_4(minter: ids.Minter) -> None:
    minted = [minter.uuid() for _ in range(2000)]

    assert len(set(minted)) == 2000
    assert all(stdlib_uuid.UUID(text).version == 4 and parse_uuid(text) == text for text in minted)


def test_uuids_minted_in_bulk_equal_those_minted_one_by_one() -> None:
    data = bytes(range(256)) * 5  # every digit at every position

    one_by_one = [ids._version_4(data[start : start + 16].hex()) for start in range(0, len(data), 16)]
    assert ids._versions_4(data) == one_by_one


@pytest.mark.parametrize("minter", [RandomMinter(), SeededMinter(1)])
def test_change_ids_are_positive_and_fit_a_signed_column(minter: ids.Minter) -> None:
    minted = [minter.change_id() for _ in range(2000)]

    assert len(set(minted)) == 2000
    assert all(0 < number < 2**63 for number in minted)


def test_a_seed_determines_every_identifier() -> None:
    one, same, other = SeededMinter(7), SeededMinter(7), SeededMinter(8)

    assert [(one.uuid(), one.change_id()) for _ in range(5)] == [(same.uuid(), same.change_id()) for _ in range(5)]
    assert one.uuid() != other.uuid()


def test_threads_never_mint_the_same_identifier() -> None:
    minter, minted = RandomMinter(), list[str]()

    def mint() -> None:
        minted.extend([minter.uuid() for _ in range(500)])

    threads = [threading.Thread(target=mint) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(minted)) == 4000


def test_ids_of_executions_without_a_flow_share_the_partition_of_their_lane() -> None:
    assert partition_of(ids.mint_solo(LaneId("main"), COUNTS, RandomMinter())) == 213


def test_identifiers_are_serialized_as_plain_strings() -> None:
    execution_id = parse_execution_id(f"{{fp:7}}:{UUID}")

    assert msgspec.json.decode(msgspec.json.encode(execution_id), type=ExecutionId) == execution_id
