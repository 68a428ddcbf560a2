"""The rows of a take that a store did by itself: what it was told about them, and what it heard back.

A store answers only with the columns that nobody could know before; the others are those of the take. Columns that
hardly any claimed row has set travel together, as a list that is missing where nothing is set: what is not told need
not be written down, read and put in its place. Rows are put together a column at a time, which costs a third of doing
it row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import repeat
from typing import Any

from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.stores.claims import ClaimRequest, LeaseIds
from flowfabric.stores.codec import CODEC, QueueDecoder, members_by_code

PAYLOAD_COLUMNS = tuple(name for name in CODEC[Payload].columns if name != "execution_id")

# Optional columns that many a row has set when it is claimed, because of how it was created or by the claim itself.
_USUAL = {"flow_id", "tags", "required_capabilities", "terms", "parent_id", "successors", "next_type"}
_USUAL |= {"started_at", "attempt_index", "attempt_id", "attempt_type", "attempt_started_at"}


@cache
def dense_columns(becomes: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that a store answers with for each row, when all taken rows get these fields."""
    return tuple(name for name in _heard(becomes) if name not in sparse_columns(becomes))


@cache
def sparse_columns(becomes: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that are told together, of rows where one of them is set."""
    column = CODEC[Execution].column
    return tuple(name for name in _heard(becomes) if column[name].optional and name not in _USUAL)


@cache
def overwritten_columns(becomes: tuple[str, ...]) -> frozenset[str]:
    """The columns of which nothing is left in a taken row, whatever they were."""
    return frozenset({*becomes, *_stamped(ClaimRequest((), (), "", "", 0, {}), (), 0)})


@cache
def _heard(becomes: tuple[str, ...]) -> tuple[str, ...]:
    told = overwritten_columns(becomes) | {"current_lane"}
    return tuple(name for name in CODEC[Execution].columns if name not in told)


def decode_claimed_rows(
    take: ClaimRequest,
    stamps: Sequence[LeaseIds],
    now: int,
    rarities: Sequence[list[Any] | None],
    answer: Iterable[Sequence[Any]],
    line_at: QueueDecoder,
) -> list[tuple[Execution, Payload]]:
    """The rows, of which the n-th got the n-th stamp; `answer` has the usual columns, then those of the payload."""
    columns = iter(answer)
    found: dict[str, Iterable[Any]] = {name: repeat(value) for name, value in take.shared_fields.items()}
    found |= _stamped(take, stamps, now)
    becomes = tuple(take.shared_fields)
    found.update(zip(dense_columns(becomes), columns, strict=False))
    found |= _set_apart(sparse_columns(becomes), rarities)
    found["current_lane"] = found["lane_id"]
    for name in _encoded(becomes):
        found[name] = _decoded(name, found[name], line_at)
    rows = map(Execution, *(found[name] for name in Execution.__struct_fields__))
    return list(zip(rows, map(Payload, found["execution_id"], *columns), strict=True))


def _set_apart(names: tuple[str, ...], rarities: Sequence[list[Any] | None]) -> dict[str, Iterable[Any]]:
    if not any(rarities):
        return dict.fromkeys(names, [None] * len(rarities))
    nothing = [None] * len(names)
    return dict(zip(names, zip(*(one or nothing for one in rarities), strict=True), strict=True))


def _stamped(take: ClaimRequest, stamps: Sequence[LeaseIds], now: int) -> dict[str, Iterable[Any]]:
    """The columns that a take sets in the same way whatever the row, for each of its rows."""
    return {
        "lease_id": [stamp.lease_id for stamp in stamps],
        "worker_id": repeat(take.worker_id),
        "worker_instance_id": repeat(take.worker_instance_id),
        "lease_acquired_at": repeat(now),
        "lease_renewed_at": repeat(now),
        "lease_expires_at": repeat(now + take.lease_ttl_ms),
        "last_transition_at": repeat(now),
        "last_mutation_at": repeat(now),
        "revision": [stamp.revision for stamp in stamps],
    }


_COLUMNS = CODEC[Execution].column.values()
_MEMBERS = {column.name: members_by_code(column.kind) for column in _COLUMNS if column.is_enum}
_LINES = {column.name for column in _COLUMNS if column.kind is QueueKey}
_BOOLS = {column.name for column in _COLUMNS if column.kind is bool}


@cache
def _encoded(becomes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the columns that are heard that are not kept as they are."""
    return tuple(name for name in _heard(becomes) if name in _MEMBERS or name in _LINES or name in _BOOLS)


def _decoded(name: str, values: Iterable[Any], line_at: QueueDecoder) -> Iterable[Any]:
    if (kinds := _MEMBERS.get(name)) is not None:
        return [None if code is None else kinds[code] for code in values]
    if name in _LINES:
        return [None if line is None else line_at(line) for line in values]
    return map(bool, values)
