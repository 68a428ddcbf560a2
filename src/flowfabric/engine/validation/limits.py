"""Validation of the arguments of budgets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flowfabric import errors
from flowfabric.engine.validation import execution as validate
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.rules import validation
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import usage

MAX_ACKNOWLEDGED = 1000


def build_owned_id(namespace: object, text: object) -> NamespacedId:
    """Parse a budget id together with its namespace."""
    return NamespacedId(validation.name("namespace", namespace), validate.parse_uuid("budget_id", text))


def validate_dimension(name: object) -> str:
    """Check the name of a dimension."""
    if not validation.name("dimension", name):
        raise errors.InvalidInput("dimension: empty")
    return str(name)


def build_limits(dimensions: object, hard_limits: object, soft_limits: object) -> usage.Limits:
    """Check the limits of dimensions; a dimension may be named once."""
    names = [*validate.validate_iterable("dimensions", dimensions)]
    hard = [
        validation.integer("hard_limits", value, least=0)
        for value in validate.validate_iterable("hard_limits", hard_limits)
    ]
    soft = [
        validation.integer("soft_limits", value, least=0)
        for value in validate.validate_iterable("soft_limits", soft_limits)
    ]
    if not len(names) == len(hard) == len(soft):
        lengths = f"{len(names)}, {len(hard)} and {len(soft)}"
        raise errors.InvalidInput(f"dimensions, hard_limits and soft_limits: of different lengths, {lengths}")
    _check_count(len(names))
    names = [validate_dimension(name) for name in names]
    if len(set(names)) < len(names):
        raise errors.InvalidInput("dimensions: one is named twice")
    return tuple(zip(names, hard, soft, strict=True))


def amounts_by_name(name: str, amounts: object) -> budget_rules.Amounts:
    """Check amounts by dimension; return them in order of name."""
    if not isinstance(amounts, Mapping):
        raise errors.InvalidInput(f"{name}: not a mapping")
    return _amounts(amounts.items(), by_name=True)


def amounts_in_order(dimensions: object, deltas: object) -> budget_rules.Amounts:
    """Check amounts of dimensions; keep their order, and add up amounts of the same dimension."""
    names = [*validate.validate_iterable("dimensions", dimensions)]
    amounts = [*validate.validate_iterable("deltas", deltas)]
    if len(names) != len(amounts):
        raise errors.InvalidInput(f"dimensions and deltas: of different lengths, {len(names)} and {len(amounts)}")
    return _amounts(zip(names, amounts, strict=True), by_name=False)


def key_digests(keys: object) -> tuple[str, ...]:
    """Check the keys of reports; return their digests, each once."""
    texts = [validation.text("acknowledged", key) for key in validate.validate_iterable("acknowledged", keys)]
    if len(texts) > MAX_ACKNOWLEDGED:
        raise errors.InvalidInput(f"acknowledged: {len(texts)} keys, the limit is {MAX_ACKNOWLEDGED}")
    return tuple(dict.fromkeys(usage.usage_key_digest(text) for text in texts))


def _amounts(pairs: Iterable[tuple[object, object]], *, by_name: bool) -> budget_rules.Amounts:
    valid = [(validate_dimension(name), validation.integer(str(name), amount, least=0)) for name, amount in pairs]
    _check_count(len(valid))
    amounts = usage.sum_by_dimension(valid, by_name=by_name)
    for name, amount in amounts:
        validation.integer(name, amount, least=0)  # the sum may be too large
    return amounts


def _check_count(count: int) -> None:
    if count > usage.MOST_DIMENSIONS:
        raise errors.InvalidInput(f"too_many_dimensions: limit={usage.MOST_DIMENSIONS}, got={count}")
