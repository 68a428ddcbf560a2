"""Row templates as the library interprets them (`lua/templates.lua`)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from flowfabric.model.change import ColumnRef, Condition, IfSet, Parameter, Plus, RowTemplate
from flowfabric.model.execution import QueueKey
from flowfabric.model.instant import FromNow
from flowfabric.stores.claims import ROW_PARAMETERS, SHARED_PARAMETERS, LeaseRef
from flowfabric.stores.valkey.rows.codec import EVENT_PLACE, VALKEY_TABLES, Offset, ValkeyTable, wide_integer

CLAIM_PARAMETERS = (*ROW_PARAMETERS, *SHARED_PARAMETERS)
RENEWAL_PARAMETERS = LeaseRef.__struct_fields__[1:]  # the first one is the key

Form = list[Any]
Expression = list[Any]


@lru_cache(1024)
def template_form(template: RowTemplate, parameters: tuple[str, ...] = ()) -> Form:
    """Return a template as a form; a parameter is sent as its number in `parameters`."""
    table, constants, fields = VALKEY_TABLES[template.row], list[Any](), list[Any]()
    for name, value in template.fields.items():
        expression = _expression(table, name, value, parameters)
        if expression[0] == 0:
            constants += [table.place[name], expression[1]]
        else:
            fields.append([table.place[name], expression])
    event = [
        [EVENT_PLACE[name], _event_expression(table, value, parameters)]
        for name, value in template.event.items()
        if value is not None
    ]
    return [[len(constants) // 2, *constants], fields, event, template.event.get("lease") == "renewed"]


@lru_cache(64)
def condition_form(template: RowTemplate, parameters: tuple[str, ...]) -> list[Any] | None:
    """Return the condition of a template as a form."""
    table, condition = VALKEY_TABLES[template.row], template.condition
    if condition is None:
        return None
    return _condition(table, condition, parameters)


@lru_cache(64)
def packed_claim_form(template: RowTemplate) -> bytes:
    """Return the form of a claim, encoded, and whether similar rows may be claimed as a group."""
    form = template_form(template, CLAIM_PARAMETERS)
    return msgspec.msgpack.encode([*form, not any(_adds_an_id(expression) for _, expression in form[1])])


def _adds_an_id(expression: Expression) -> bool:
    """True if an expression calculates with a parameter that differs between rows."""
    match expression:
        case [4, *terms]:
            return any((term[0] == 3 and term[1] <= len(ROW_PARAMETERS)) or _adds_an_id(term) for term in terms)
        case [5, _, *choices]:
            return any(map(_adds_an_id, choices))
        case _:
            return False


def _condition(table: ValkeyTable, condition: Condition, parameters: tuple[str, ...]) -> list[Any]:
    equal = [
        [table.place[name], _expression(table, name, value, parameters)] for name, value in condition.equal.items()
    ]
    return [equal, [table.place[name] for name in condition.future]]


def _expression(table: ValkeyTable, name: str, value: Any, parameters: tuple[str, ...]) -> Expression:
    match value:
        case FromNow(offset):
            return [1, wide_integer(offset)]
        case ColumnRef(column):
            return [6] if column in table.table.key else [2, table.place[column]]
        case Parameter(parameter):
            return [3, parameters.index(parameter) + 1]
        case Plus(left, right):
            return [4, _expression(table, name, left, parameters), _expression(table, name, right, parameters)]
        case IfSet(column, then, otherwise):
            chosen = (_expression(table, name, one, parameters) for one in (then, otherwise))
            return [5, table.place[column], *chosen]
        case None:
            return [0, None]
        case _:
            cell = table.encode_value(name, value, _refuse_queue)
            assert not isinstance(cell, Offset | bytes)
            return [0, cell]


def _event_expression(table: ValkeyTable, value: Any, parameters: tuple[str, ...]) -> Expression:
    match value:
        case ColumnRef(column):
            return [6] if column in table.table.key else [2, table.place[column]]
        case IfSet(column, then, otherwise):
            return [5, table.place[column], *(_event_expression(table, one, parameters) for one in (then, otherwise))]
        case int():
            return [0, wide_integer(value)]
        case _:
            return [0, value]


def _refuse_queue(queue: QueueKey) -> str:
    raise TypeError(f"a template sets no queue: {queue}")
