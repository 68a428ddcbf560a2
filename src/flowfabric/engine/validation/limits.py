"""What callers hand in about budgets, looked at once and put into its one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flowfabric import errors, ids
from flowfabric.engine.validation import execution as validate
from flowfabric.model.owned_id import OwnedId
from flowfabric.rules import validation
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import usage


def budget(text: object) -> str:
    """A budget's id."""
    return ids.parse_uuid(validation.text("budget_id", text), "budget_id")


def owned(namespace: object, text: object) -> OwnedId:
    """A budget by its owner and its id."""
    return OwnedId(validation.text("namespace", namespace, limit=validation.MAX_NAME_BYTES), budget(text))


def dimension(name: object) -> str:
    """The name of a dimension."""
    if not validation.text("dimension", name, limit=validation.MAX_NAME_BYTES):
        raise errors.InvalidInput("dimension: empty")
    return str(name)


def limits_of(dimensions: object, hard_limits: object, soft_limits: object) -> usage.Limits:
    """The limits of some dimensions, each named once."""
    names = [*validate.each("dimensions", dimensions)]
    hard = [validation.integer("hard_limits", value, least=0) for value in validate.each("hard_limits", hard_limits)]
    soft = [validation.integer("soft_limits", value, least=0) for value in validate.each("soft_limits", soft_limits)]
    if not len(names) == len(hard) == len(soft):
        lengths = f"{len(names)}, {len(hard)} and {len(soft)}"
        raise errors.InvalidInput(f"dimensions, hard_limits and soft_limits: of different lengths, {lengths}")
    _not_too_many(len(names))
    names = [dimension(name) for name in names]
    if len(set(names)) < len(names):
        raise errors.InvalidInput("dimensions: one is named twice")
    return tuple(zip(names, hard, soft, strict=True))


def amounts_by_name(name: str, amounts: object) -> budget_rules.Amounts:
    """Amounts by dimension, in order of name."""
    if not isinstance(amounts, Mapping):
        raise errors.InvalidInput(f"{name}: not a mapping")
    return _amounts(amounts.items(), by_name=True)


def amounts_in_order(dimensions: object, deltas: object) -> budget_rules.Amounts:
    """Amounts of dimensions in the order given, added up where one is named twice."""
    names, amounts = [*validate.each("dimensions", dimensions)], [*validate.each("deltas", deltas)]
    if len(names) != len(amounts):
        raise errors.InvalidInput(f"dimensions and deltas: of different lengths, {len(names)} and {len(amounts)}")
    return _amounts(zip(names, amounts, strict=True), by_name=False)


def _amounts(pairs: Iterable[tuple[object, object]], *, by_name: bool) -> budget_rules.Amounts:
    given = [(dimension(name), validation.integer(str(name), amount, least=0)) for name, amount in pairs]
    _not_too_many(len(given))
    amounts = usage.combined(given, by_name=by_name)
    for name, amount in amounts:
        validation.integer(name, amount, least=0)  # together they may be too much
    return amounts


def _not_too_many(count: int) -> None:
    if count > usage.MOST_DIMENSIONS:
        raise errors.InvalidInput(f"too_many_dimensions: limit={usage.MOST_DIMENSIONS}, got={count}")
