"""Decoder of claimed rows, which a statement returns as one JSON array and one blob of concatenated payloads.

A statement returns one row because each step of a statement releases and reacquires the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.model.execution import Payload
from flowfabric.stores.claim_result import PAYLOAD_COLUMNS
from flowfabric.stores.codec import CODEC

INPUT_COLUMN = next(column.name for column in CODEC[Payload].column.values() if column.kind is bytes)


def decode_columns(results: Sequence[Sequence[Any]]) -> tuple[Sequence[list[Any] | None], list[Sequence[Any]]]:
    """Decode results of (rows, payload blob); return the sparse values of each row, and the columns of all rows."""
    rows: list[list[Any]] = []
    inputs: list[bytes | None] = []
    input_index = PAYLOAD_COLUMNS.index(INPUT_COLUMN) - len(PAYLOAD_COLUMNS)
    for text, blob in results:
        decoded = msgspec.json.decode(text)
        begin = 0
        for row in decoded:
            length = row[input_index]
            inputs.append(blob[begin : begin + length] if length else None if length is None else b"")
            begin += length or 0
        rows += decoded
    sparse, *columns = list[Any](zip(*rows, strict=True))
    columns[input_index] = inputs
    return sparse, columns
