"""How claimed rows come back: one JSON array a statement, since each step of one hands the interpreter lock to and fro.

The bytes of the payloads follow end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.model.execution import Payload
from flowfabric.stores.claim_result import PAYLOAD_COLUMNS
from flowfabric.stores.codec import CODEC

INPUT_COLUMN = next(column.name for column in CODEC[Payload].column.values() if column.kind is bytes)


def decode_columns(answers: Sequence[Sequence[Any]]) -> tuple[Sequence[list[Any] | None], list[Sequence[Any]]]:
    """What is rare of all rows of some answers of (rows, payload bytes); their usual columns, then the payload's."""
    rows: list[list[Any]] = []
    inputs: list[bytes | None] = []
    place = PAYLOAD_COLUMNS.index(INPUT_COLUMN) - len(PAYLOAD_COLUMNS)
    for listed, blob in answers:
        found = msgspec.json.decode(listed)
        begin = 0
        for row in found:
            length = row[place]
            inputs.append(blob[begin : begin + length] if length else None if length is None else b"")
            begin += length or 0
        rows += found
    rarities, *told = list[Any](zip(*rows, strict=True))
    told[place] = inputs
    return rarities, told
