"""Decoding of claimed rows that are alike, as `lua/alike.lua` claims them: equal except for key, revision and new ids.

One row of such a group is decoded from its blob. Each other one is a copy of it with its own key, revision and ids,
which costs a fifth. The group of a row is its blob without these values.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec.structs import force_setattr

from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.claims import LeaseIds
from flowfabric.stores.homes import HomeTag
from flowfabric.stores.valkey.rows.codec import VALKEY_TABLES, QueueOf, integer

_REVISION = slice(4, 20)  # where the blob of an execution has it if it begins as usual
_AFTER_REVISION = 20
_LONG_ARRAY, _TEXT_OF_16 = 0xDC, 0xB0

Row = TypeVar("Row", bound=msgspec.Struct)

_EXECUTIONS, _PAYLOADS = VALKEY_TABLES[Execution], VALKEY_TABLES[Payload]


def copy_of(row: Row) -> Row:
    """Return a shallow copy, which `copy.copy` makes in three times the time."""
    copied: Row = row.__copy__()  # type: ignore[attr-defined]
    return copied


class ClaimedDecoder:
    """Decodes the rows of one claim in one partition."""

    def __init__(self, home: HomeTag, queue_of: QueueOf) -> None:
        self._home = home
        self._queue_of = queue_of
        self._executions: dict[bytes, Execution] = {}  # one row of each group
        self._payloads: dict[bytes, Payload] = {}

    def decode(self, key_text: bytes, blob: bytes, payload: bytes, ids: LeaseIds) -> tuple[Execution, Payload]:
        """Decode an execution that was claimed with these ids, and its payload."""
        key = _EXECUTIONS.key(key_text.decode(), self._home)
        return self._execution(key, blob, ids), self._payload(key, payload)

    def _execution(self, key: tuple[Any, ...], blob: bytes, ids: LeaseIds) -> Execution[int]:
        rest = blob[_AFTER_REVISION:].replace(ids.lease_id.encode(), b"").replace(ids.attempt_id.encode(), b"")
        size = len(rest) + len(ids.lease_id) + len(ids.attempt_id) + _AFTER_REVISION
        if blob[0] != _LONG_ARRAY or blob[3] != _TEXT_OF_16 or len(blob) != size:
            return self._decode_execution(key, blob)
        if (known := self._executions.get(rest)) is None:
            row = self._executions[rest] = self._decode_execution(key, blob)
            return row
        row = copy_of(known)
        force_setattr(row, "execution_id", key[0])
        force_setattr(row, "revision", integer(blob[_REVISION].decode()))
        force_setattr(row, "lease_id", ids.lease_id)
        force_setattr(row, "attempt_id", ids.attempt_id)
        return row

    def _decode_execution(self, key: tuple[Any, ...], blob: bytes) -> Execution:
        row: Execution = _EXECUTIONS.decode(key, blob, self._queue_of)
        return row

    def _payload(self, key: tuple[Any, ...], blob: bytes) -> Payload:
        """Decode a payload; one whose cells are known differs from that one in key and content only."""
        end = 4 + int.from_bytes(blob[:4], "big")
        if (known := self._payloads.get(blob[:end])) is None:
            row: Payload = _PAYLOADS.decode(key, blob, self._queue_of)
            self._payloads[blob[:end]] = row
            return row
        row = copy_of(known)
        force_setattr(row, "execution_id", key[0])
        if known.input_payload is not None:
            force_setattr(row, "input_payload", blob[end:])
        return row
