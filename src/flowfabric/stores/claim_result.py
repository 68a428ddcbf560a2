"""Decoder of claimed rows, for stores that compute a claim natively.

A store returns only the columns that the caller cannot know; the others follow from the request and its template.
Columns that hardly any claimed row has set (sparse columns) are returned as one list, which is null if none of them is
set. Rows are assembled column by column, which costs a third of assembling them row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from typing import Any

from flowfabric.model.change import ColumnRef, IfSet, Parameter, Plus, RowTemplate, at, evaluate
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.model.instant import FromNow
from flowfabric.stores.claims import ROW_PARAMETERS, ClaimRequest, LeaseIds
from flowfabric.stores.codec import CODEC, QueueDecoder, members_by_code

PAYLOAD_COLUMNS = tuple(name for name in CODEC[Payload].columns if name != "execution_id")

# Optional columns that many claimed rows have set, at their creation or by the claim itself.
_DENSE = {"flow_id", "tags", "required_capabilities", "terms", "parent_id", "successors", "next_type"}
_DENSE |= {"started_at", "attempt_index", "attempt_id", "attempt_type", "attempt_started_at"}


class ClaimColumns:
    """The columns of an execution that a claim with this template writes, by what a store has to return of them."""

    def __init__(self, template: RowTemplate) -> None:
        column, fields = CODEC[Execution].column, template.fields
        known = {name: value for name, value in fields.items() if _is_known(value)}
        known["revision"] = Parameter("revision")
        self.constants = {name: value for name, value in known.items() if type(value) not in _COMPUTED}
        self.computed = {name: value for name, value in known.items() if type(value) in _COMPUTED}
        self.copied = {
            name: value.column
            for name, value in fields.items()
            if type(value) is ColumnRef and value.column not in fields
        }
        self.overwritten = known.keys()  # whatever their values were
        returned = tuple(name for name in column if name not in known and name not in self.copied)
        self.sparse = tuple(name for name in returned if column[name].optional and name not in _DENSE)
        self.dense = tuple(name for name in returned if name not in self.sparse)
        self.encoded = tuple(name for name in returned if name in _MEMBERS or name in _QUEUES or name in _BOOLS)


_COMPUTED = (FromNow, Parameter, Plus)


def _is_known(value: Any) -> bool:
    """True if the value does not depend on the row."""
    if type(value) is Plus:
        return _is_known(value.left) and _is_known(value.right)
    return type(value) not in (ColumnRef, IfSet)


claim_columns = lru_cache(64)(ClaimColumns)


def decode_claimed_rows(
    request: ClaimRequest,
    lease_ids: Sequence[LeaseIds],
    now: int,
    sparse: Sequence[list[Any] | None],
    result: Iterable[Sequence[Any]],
    decode_queue: QueueDecoder,
) -> list[tuple[Execution, Payload]]:
    """Decode rows, of which the n-th got the n-th lease ids; `result` has the dense columns, then the payload's."""
    columns, rest = claim_columns(request.template), iter(result)
    values_by_column: dict[str, Iterable[Any]] = {name: repeat(value) for name, value in columns.constants.items()}
    parameters = request.parameters
    for name, value in columns.computed.items():
        if type(value) is Parameter and value.name in ROW_PARAMETERS:
            values_by_column[name] = map(attrgetter(value.name), lease_ids)
        else:
            values_by_column[name] = repeat(at(evaluate(value, None, parameters), now))
    values_by_column.update(zip(columns.dense, rest, strict=False))
    values_by_column |= _spread_sparse(columns.sparse, sparse)
    for name in columns.encoded:
        values_by_column[name] = _decode_column(name, values_by_column[name], decode_queue)
    for name, source in columns.copied.items():
        values_by_column[name] = values_by_column[source]
    rows = map(Execution, *(values_by_column[name] for name in Execution.__struct_fields__))
    return list(zip(rows, map(Payload, values_by_column["execution_id"], *rest), strict=True))


def _spread_sparse(names: tuple[str, ...], sparse: Sequence[list[Any] | None]) -> dict[str, Iterable[Any]]:
    if not any(sparse):
        return dict.fromkeys(names, [None] * len(sparse))
    nulls = [None] * len(names)
    return dict(zip(names, zip(*(values or nulls for values in sparse), strict=True), strict=True))


_COLUMNS = CODEC[Execution].column.values()
_MEMBERS = {column.name: members_by_code(column.kind) for column in _COLUMNS if column.is_enum}
_QUEUES = {column.name for column in _COLUMNS if column.kind is QueueKey}
_BOOLS = {column.name for column in _COLUMNS if column.kind is bool}


def _decode_column(name: str, values: Iterable[Any], decode_queue: QueueDecoder) -> Iterable[Any]:
    if (members := _MEMBERS.get(name)) is not None:
        return [None if code is None else members[code] for code in values]
    if name in _QUEUES:
        return [None if queue_id is None else decode_queue(queue_id) for queue_id in values]
    return map(bool, values)
