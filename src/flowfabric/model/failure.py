"""The failure of an attempt as a document: class, text and data of an exception, and how it is stored."""

from __future__ import annotations

from typing import Any, Final

import msgspec

FAILURE_ENCODING: Final = "ff.failure"  # the result row of a failed execution has it
MAX_FAILURE_BYTES: Final = 16 * 1024


class StoredFailure(msgspec.Struct, frozen=True, omit_defaults=True):
    """An exception as it is stored. `data` is what its class needs to be made again, beside the text."""

    type: str  # module and name of the class
    text: str
    category: str | None = None  # retries were decided by it
    data: dict[str, Any] | None = None


encode_stored = msgspec.json.Encoder().encode
decode_stored = msgspec.json.Decoder(StoredFailure).decode


def read_failure(data: bytes | str) -> StoredFailure:
    """Decode a stored failure; what is no such document becomes the text of an unknown exception."""
    try:
        return decode_stored(data)
    except (ValueError, RecursionError):
        text = data if isinstance(data, str) else data.decode("utf-8", "replace")
        return StoredFailure("Exception", text[:MAX_FAILURE_BYTES])
