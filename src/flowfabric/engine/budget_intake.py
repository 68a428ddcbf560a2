"""What callers hand in about budgets, looked at once and put into its one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flowfabric import errors, ids
from flowfabric.engine import intake
from flowfabric.model.owned import OwnedId
from flowfabric.rules import budgets, limits, spending


def budget(text: object) -> str:
    """A budget's id."""
    return ids.parse_uuid(limits.text("budget_id", text), "budget_id")


def owned(namespace: object, text: object) -> OwnedId:
    """A budget by its owner and its id."""
    return OwnedId(limits.text("namespace", namespace, limit=limits.MAX_NAME_BYTES), budget(text))


def dimension(name: object) -> str:
    """The name of a dimension."""
    if not limits.text("dimension", name, limit=limits.MAX_NAME_BYTES):
        raise errors.InvalidInput("dimension: empty")
    return str(name)


def limits_of(dimensions: object, hard_limits: object, soft_limits: object) -> spending.Limits:
    """The limits of some dimensions, each named once."""
    names = [*intake.each("dimensions", dimensions)]
    hard = [limits.integer("hard_limits", value, least=0) for value in intake.each("hard_limits", hard_limits)]
    soft = [limits.integer("soft_limits", value, least=0) for value in intake.each("soft_limits", soft_limits)]
    if not len(names) == len(hard) == len(soft):
        lengths = f"{len(names)}, {len(hard)} and {len(soft)}"
        raise errors.InvalidInput(f"dimensions, hard_limits and soft_limits: of different lengths, {lengths}")
    _not_too_many(len(names))
    names = [dimension(name) for name in names]
    if len(set(names)) < len(names):
        raise errors.InvalidInput("dimensions: one is named twice")
    return tuple(zip(names, hard, soft, strict=True))


def amounts_by_name(name: str, amounts: object) -> budgets.Amounts:
    """Amounts by dimension, in order of name."""
    if not isinstance(amounts, Mapping):
        raise errors.InvalidInput(f"{name}: not a mapping")
    return _amounts(amounts.items(), by_name=True)


def amounts_in_order(dimensions: object, deltas: object) -> budgets.Amounts:
    """Amounts of dimensions in the order given, added up where one is named twice."""
    names, amounts = [*intake.each("dimensions", dimensions)], [*intake.each("deltas", deltas)]
    if len(names) != len(amounts):
        raise errors.InvalidInput(f"dimensions and deltas: of different lengths, {len(names)} and {len(amounts)}")
    return _amounts(zip(names, amounts, strict=True), by_name=False)


def _amounts(pairs: Iterable[tuple[object, object]], *, by_name: bool) -> budgets.Amounts:
    given = [(dimension(name), limits.integer(str(name), amount, least=0)) for name, amount in pairs]
    _not_too_many(len(given))
    amounts = spending.combined(given, by_name=by_name)
    for name, amount in amounts:
        limits.integer(name, amount, least=0)  # together they may be too much
    return amounts


def _not_too_many(count: int) -> None:
    if count > spending.MOST_DIMENSIONS:
        raise errors.InvalidInput(f"too_many_dimensions: limit={spending.MOST_DIMENSIONS}, got={count}")
