"""Cursors: the position of a subscription, as opaque bytes that the subscriber keeps.

A cursor has nine bytes: 0x02 and the position of the last event as a signed big-endian number. An empty cursor means
"from now on". Position 0 is before all stored events.
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
    """Return the cursor of a position, or raise `InvalidInput` beyond 64 bits."""
    try:
        return _OUTBOX.pack(_OUTBOX_FORM, position)
    except struct.error as error:
        raise InvalidInput("cursor: position out of range") from error


def decode_cursor(cursor: bytes) -> int | None:
    """Return the position after which to continue, None for "from now on". Raises `InvalidInput`."""
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
        raise InvalidInput("cursor: issued by a key-value log, which this store is not")
    raise InvalidInput(f"cursor: unknown form 0x{cursor[0]:02x}")
