"""How claimed rows come back: one JSON array a statement, since each step of one hands the interpreter lock to and fro.

Columns that hardly any claimed row has set travel together, as a list that is missing where nothing is set: what is
not told need not be written down, read and put in its place. The bytes of the payloads follow end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.codec import CODEC
from flowfabric.stores.taking import PAYLOAD, heard

# Optional columns that many a row has set when it is claimed, because of how it was created or by the claim itself.
_USUAL = {"flow_id", "tags", "required_capabilities", "terms", "parent_id", "successors", "next_type"}
_USUAL |= {"started_at", "attempt_index", "attempt_id", "attempt_type", "attempt_started_at"}
_LANE = "current_lane"  # which a claim makes the row's own lane

INPUT = next(column.name for column in CODEC[Payload].column.values() if column.kind is bytes)


@cache
def usual(becomes: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that are told of each row, when all claimed rows get these fields."""
    return tuple(name for name in heard(becomes) if name != _LANE and name not in rare(becomes))


@cache
def rare(becomes: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that are told together, of rows where one of them is set."""
    column = CODEC[Execution].column
    return tuple(name for name in heard(becomes) if column[name].optional and name not in _USUAL and name != _LANE)


def columns(becomes: tuple[str, ...], answers: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """The columns that were heard of, then the payload's, for all rows of some answers of (rows, payload bytes)."""
    rows: list[list[Any]] = []
    inputs: list[bytes | None] = []
    place = PAYLOAD.index(INPUT) - len(PAYLOAD)
    for listed, blob in answers:
        found = msgspec.json.decode(listed)
        begin = 0
        for row in found:
            length = row[place]
            inputs.append(blob[begin : begin + length] if length else None if length is None else b"")
            begin += length or 0
        rows += found
    told: dict[str, Sequence[Any]] = dict(zip((*usual(becomes), "", *PAYLOAD), zip(*rows, strict=True), strict=True))
    told |= _set_apart(rare(becomes), told[""])
    told[_LANE] = told["lane_id"]
    told[INPUT] = inputs
    return [told[name] for name in (*heard(becomes), *PAYLOAD)]


def _set_apart(names: tuple[str, ...], listed: Sequence[list[Any] | None]) -> dict[str, Sequence[Any]]:
    if not any(listed):
        return dict.fromkeys(names, [None] * len(listed))
    nothing = [None] * len(names)
    return dict(zip(names, zip(*(one or nothing for one in listed), strict=True), strict=True))
