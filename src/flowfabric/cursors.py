"""Cursors: where a subscription stands, as bytes that its holder keeps and never looks into.

Ours are nine bytes: 0x02 and the position of the last event as a signed big-endian number. No bytes at all mean
"from now on". Position 0 stands before everything that is kept.
"""

from __future__ import annotations

import struct
from typing import Final

from flowfabric.errors import InvalidInput

FROM_NOW: Final = b""
FROM_THE_START: Final = b"\x02" + bytes(8)

_OUTBOX: Final = struct.Struct(">Bq")
_OUTBOX_FORM: Final = 0x02
_LOG_FORM: Final = 0x01
_LOG_LENGTH: Final = 17


def encode_cursor(position: int) -> bytes:
    """The cursor of an event's position; `InvalidInput` beyond 64 bits."""
    try:
        return _OUTBOX.pack(_OUTBOX_FORM, position)
    except struct.error as error:
        raise InvalidInput("cursor: position out of range") from error


def decode_cursor(cursor: bytes) -> int | None:
    """The position after which to go on, or None for "from now on"; `InvalidInput` for anything that is not ours."""
    if not isinstance(cursor, bytes | bytearray | memoryview):
        raise InvalidInput("cursor: not bytes")
    if not cursor:
        return None
    if cursor[0] == _OUTBOX_FORM and len(cursor) == _OUTBOX.size:
        position: int = _OUTBOX.unpack(cursor)[1]
        return position
    if cursor[0] == _OUTBOX_FORM:
        raise InvalidInput(f"cursor: {_OUTBOX.size} bytes expected, {len(cursor)} given")
    if cursor[0] == _LOG_FORM and len(cursor) == _LOG_LENGTH:
        raise InvalidInput("cursor: given out by a key-value log, which this store is not")
    raise InvalidInput(f"cursor: unknown form 0x{cursor[0]:02x}")
