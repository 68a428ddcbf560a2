"""Handles: what a worker holds while it owns a lease, and their binary encoding.

A handle is opaque to everyone but the store that issued it. All integers are little-endian; texts are a u32 length and
UTF-8:

    0x02 · wire version 0x01 · backend tag · execution_id · attempt_index u32 · attempt_id · lease_id
         · lease_epoch u64 · lease_ttl_ms u64 · lane_id · worker_instance_id

An older form, 0x01 followed directly by `execution_id`, is still decoded and means Valkey; it is never written. A
handle minted in this process knows its fields and is encoded only when its bytes are needed.

Over HTTP a server appends an HMAC to the bytes and checks it when they come back (`rules/security/signed_handle.py`).
Clients carry it beside the bytes as `signature`; an engine neither creates nor reads it.
"""

from __future__ import annotations

import struct
from enum import IntEnum, StrEnum
from typing import Final

import msgspec

from flowfabric.errors import Corruption, HandleFromOtherBackend, InvalidInput
from flowfabric.ids import (
    AttemptId,
    ExecutionId,
    LaneId,
    LeaseId,
    WorkerInstanceId,
    parse_execution_id,
    parse_uuid,
)


class BackendTag(IntEnum):
    """The kind of store that issued a handle."""

    VALKEY = 1
    POSTGRES = 2
    SQLITE = 3
    MEMORY = 4

    @property
    def title(self) -> str:
        """The display name."""
        return _TITLES[self]


SIGNATURE_BYTES: Final = 32  # length of the HMAC that a server appends

_TITLES: Final = {
    BackendTag.VALKEY: "Valkey",
    BackendTag.POSTGRES: "Postgres",
    BackendTag.SQLITE: "SQLite",
    BackendTag.MEMORY: "Memory",
}


class HandleKind(StrEnum):
    """How its holder acquired a handle."""

    FRESH = "Fresh"
    RESUMED = "Resumed"
    SUSPENDED = "Suspended"  # returned by suspend; lease-bound operations refuse it
    RECLAIMED = "Reclaimed"


class HandleFields(msgspec.Struct, frozen=True, gc=False):
    """The content of a handle: the attempt and its lease."""

    execution_id: ExecutionId
    attempt_index: int
    attempt_id: AttemptId
    lease_id: LeaseId
    lease_epoch: int
    lease_ttl_ms: int
    lane_id: LaneId
    worker_instance_id: WorkerInstanceId


class Handle:
    """A worker's proof of its lease, valid as long as the lease. Handles are equal if their bytes are."""

    __slots__ = ("_embedded", "_fields", "_opaque", "backend", "kind", "signature")

    backend: Final[BackendTag]
    kind: Final[HandleKind]
    signature: Final[bytes]  # HMAC of the server that issued it; empty for a handle of an engine

    def __init__(self, backend: BackendTag, kind: HandleKind, opaque: bytes, signature: bytes = b"") -> None:
        """Wrap a handle that came from elsewhere; it is decoded only when it is opened."""
        self.backend = backend
        self.kind = kind
        self.signature = signature
        self._opaque: bytes | None = opaque
        self._embedded = backend  # replaced by the encoded tag when it is decoded
        self._fields: HandleFields | None = None

    @classmethod
    def mint(cls, backend: BackendTag, kind: HandleKind, fields: HandleFields) -> Handle:
        """Return a new handle."""
        handle = cls(backend, kind, b"")
        handle._opaque = None
        handle._fields = fields
        return handle

    @property
    def opaque(self) -> bytes:
        """The encoded bytes."""
        if self._opaque is None:
            assert self._fields is not None
            self._opaque = encode_handle(self._fields, self.backend)
        return self._opaque

    @property
    def fields(self) -> HandleFields:
        """The content, no matter which store issued it. Raises `Corruption` if the bytes cannot be decoded."""
        return self._fields or self._decode()

    def _decode(self) -> HandleFields:
        data: object = self._opaque
        if not isinstance(data, bytes | bytearray):
            raise InvalidInput("handle: not bytes")
        self._embedded, self._fields = decode_handle(bytes(data))
        return self._fields

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Handle):
            return NotImplemented
        return (self.backend, self.kind, self.opaque) == (other.backend, other.kind, other.opaque)

    def __hash__(self) -> int:
        return hash((self.backend, self.kind, self.opaque))

    def __reduce__(self) -> tuple[object, ...]:
        return Handle, (self.backend, self.kind, self.opaque, self.signature)

    def __repr__(self) -> str:
        fields = self._fields
        description = (
            f"{fields.execution_id} attempt {fields.attempt_index} epoch {fields.lease_epoch}" if fields else "unopened"
        )
        return f"<Handle {self.kind.value} {self.backend.title} {description}>"


def open_handle(handle: Handle, expected: BackendTag) -> HandleFields:
    """Return the content if a store of the expected kind issued the handle, else raise `HandleFromOtherBackend`.

    The outer tag is checked first, so that bytes of another store are not decoded.
    """
    if handle.backend is not expected:
        backend: object = handle.backend
        raise (
            _other_backend_error(expected, backend)
            if isinstance(backend, BackendTag)
            else InvalidInput("handle: no backend tag")
        )
    fields = handle._fields or handle._decode()
    if handle._embedded is not expected:
        raise _other_backend_error(expected, handle._embedded)
    return fields


def _other_backend_error(expected: BackendTag, actual: BackendTag) -> HandleFromOtherBackend:
    return HandleFromOtherBackend(
        f"expected={expected.title} actual={actual.title}", expected=expected.title, actual=actual.title
    )


# ---------------------------------------------------------------------------------------------------------------
# Encoding


class Truncated(Corruption):
    """The handle ends too early."""

    needed: int
    at: int
    have: int


class TrailingBytes(Corruption):
    """The handle has extra bytes at its end."""

    pos: int
    len: int


class BadWireVersion(Corruption):
    """The handle has a wire version that this release does not know."""


class BadV1Version(Corruption):
    """These bytes are not a handle."""


class BadBackendTag(Corruption):
    """The handle is from a store that this release does not know."""


class InvalidUtf8(Corruption):
    """A text in the handle is not valid UTF-8."""

    field: str


class ParseField(Corruption):
    """An identifier in the handle is not well formed."""

    field: str


_MAGIC: Final = 0x02
_LEGACY: Final = 0x01
_WIRE_VERSION: Final = 0x01
_U32: Final = struct.Struct("<I")
_PAIR: Final = struct.Struct("<QQ")
_TAGS: Final = {tag.value: tag for tag in BackendTag}


def encode_handle(fields: HandleFields, tag: BackendTag) -> bytes:
    """Return the bytes of a handle, or raise `InvalidInput` if a number does not fit its field."""
    execution_id = fields.execution_id.encode()
    attempt_id = fields.attempt_id.encode()
    lease_id = fields.lease_id.encode()
    lane_id = fields.lane_id.encode()
    instance = fields.worker_instance_id.encode()
    u32 = _U32.pack
    try:
        return b"".join(
            (
                bytes((_MAGIC, _WIRE_VERSION, tag)),
                u32(len(execution_id)),
                execution_id,
                u32(fields.attempt_index),
                u32(len(attempt_id)),
                attempt_id,
                u32(len(lease_id)),
                lease_id,
                _PAIR.pack(fields.lease_epoch, fields.lease_ttl_ms),
                u32(len(lane_id)),
                lane_id,
                u32(len(instance)),
                instance,
            )
        )
    except struct.error as error:
        raise InvalidInput("handle: attempt_index, lease_epoch or lease_ttl_ms out of range") from error


def decode_handle(data: bytes) -> tuple[BackendTag, HandleFields]:
    """Return the embedded tag and the fields, or raise a kind of `Corruption`.

    The whole structure is checked before any identifier in it is parsed.
    """
    tag, at = _read_head(data)
    execution_id, at = _read_text(data, at, "execution_id")
    if at + 4 > len(data):
        raise _truncated(data, at, 4)
    (attempt_index,) = _U32.unpack_from(data, at)
    attempt_id, at = _read_text(data, at + 4, "attempt_id")
    lease_id, at = _read_text(data, at, "lease_id")
    if at + 16 > len(data):
        raise _truncated(data, at if at + 8 > len(data) else at + 8, 8)
    lease_epoch, lease_ttl_ms = _PAIR.unpack_from(data, at)
    lane_id, at = _read_text(data, at + 16, "lane_id")
    instance, at = _read_text(data, at, "worker_instance_id")
    if at != len(data):
        raise TrailingBytes(f"handle_codec: trailing bytes: pos={at} len={len(data)}", pos=at, len=len(data))
    return tag, HandleFields(
        execution_id=_read_execution_id(execution_id),
        attempt_index=attempt_index,
        attempt_id=AttemptId(_read_uuid(attempt_id, "attempt_id")),
        lease_id=LeaseId(_read_uuid(lease_id, "lease_id")),
        lease_epoch=lease_epoch,
        lease_ttl_ms=lease_ttl_ms,
        lane_id=LaneId(lane_id),
        worker_instance_id=WorkerInstanceId(instance),
    )


def _read_head(data: bytes) -> tuple[BackendTag, int]:
    """Return the tag and the offset of the fields."""
    if not data:
        raise _truncated(data, 0, 1)
    if data[0] == _LEGACY:
        return BackendTag.VALKEY, 1
    if data[0] != _MAGIC:
        raise BadV1Version(f"handle_codec: bad v1 version: 0x{data[0]:02x}")
    if len(data) < 2:
        raise _truncated(data, 1, 1)
    if data[1] != _WIRE_VERSION:
        raise BadWireVersion(f"handle_codec: bad wire version: 0x{data[1]:02x}")
    if len(data) < 3:
        raise _truncated(data, 2, 1)
    tag = _TAGS.get(data[2])
    if tag is None:
        raise BadBackendTag(f"handle_codec: bad backend tag: 0x{data[2]:02x}")
    return tag, 3


def _read_text(data: bytes, at: int, field: str) -> tuple[str, int]:
    start = at + 4
    if start > len(data):
        raise _truncated(data, at, 4)
    end = start + _U32.unpack_from(data, at)[0]
    if end > len(data):
        raise _truncated(data, start, end - start)
    try:
        return data[start:end].decode(), end
    except UnicodeDecodeError as error:
        raise InvalidUtf8(f"handle_codec: invalid utf-8: field={field}", field=field) from error


def _read_execution_id(text: str) -> ExecutionId:
    try:
        return parse_execution_id(text)
    except InvalidInput as error:
        raise ParseField("handle_codec: parse field: field=execution_id", field="execution_id") from error


def _read_uuid(text: str, field: str) -> str:
    try:
        return parse_uuid(text, field)
    except InvalidInput as error:
        raise ParseField(f"handle_codec: parse field: field={field}", field=field) from error


def _truncated(data: bytes, at: int, needed: int) -> Truncated:
    have = len(data) - at
    return Truncated(f"handle_codec: truncated: needed={needed} at={at} have={have}", needed=needed, at=at, have=have)
