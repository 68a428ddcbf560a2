"""Budgets and limits as an application declares them. They are made in the store when first needed, by name."""

from __future__ import annotations

import hashlib
import inspect
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from flowfabric.errors import InvalidInput
from flowfabric.sdk import validation
from flowfabric.sdk.durations import Duration, to_ms

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine

logger = logging.getLogger("flowfabric.worker")

CURRENCY_DIMENSIONS = frozenset({"usd", "eur", "gbp", "chf"})
MILLIONTHS_SUFFIX = "_millionths"  # a dimension with fractions is kept as a whole number of millionths

ScopeSelector = str | Callable[..., Any]  # a parameter, a field of one or a tag; or a function of the task's arguments


class Budget:
    """How much may be spent: of each dimension, by everybody or per something, until it begins anew.

    `soft` is the part of the limits from which on people are warned. At a hard limit `fail` fails the attempt that
    wanted more, and `suspend` puts it to sleep until there is room. Money, and what is limited by a number with a
    fraction, may be spent in fractions.
    """

    def __init__(
        self,
        name: str,
        limits: Mapping[str, int | float],
        *,
        soft: float | None = None,
        per: ScopeSelector | None = None,
        reset: Duration | None = None,
        on_hard: Literal["fail", "suspend"] = "fail",
    ) -> None:
        if not name or not limits or not isinstance(limits, Mapping):
            raise InvalidInput('budget: it needs a name and at least one limit, as in Budget("llm", {"usd": 5})')
        if soft is not None and not 0 < soft <= 1:
            raise InvalidInput(f"budget {name}: soft is a part of the limits, between 0 and 1")
        if on_hard not in ("fail", "suspend"):
            raise InvalidInput(f'budget {name}: on_hard is "fail" or "suspend", not {on_hard!r}')
        self.name = name
        self.limits = dict(limits)
        self._told: set[str] = set()  # what was spent although it has no limit: perhaps a slip of the pen
        self.per = per
        self.on_hard = on_hard
        self._soft = soft
        self._reset_ms = 0 if reset is None else to_ms(reset, "reset")
        self._fractional = CURRENCY_DIMENSIONS | {one for one, limit in limits.items() if isinstance(limit, float)}
        if not all(self.amounts(limits).values()):  # wrong numbers are refused here
            raise InvalidInput(f"budget {name}: a limit of 0 would be none; leave that dimension out")

    def amounts(self, given: Mapping[str, int | float]) -> dict[str, int]:
        """What is spent, as it is counted in the store."""
        if unlimited := [one for one in given if one not in self.limits and one not in self._told]:
            self._told.update(unlimited)
            known = ", ".join(self.limits)
            logger.warning(
                "budget %s: %s has no limit and is only counted; %s have one", self.name, ", ".join(unlimited), known
            )
        return {self.stored_dimension(one): self._counted(one, amount) for one, amount in given.items()}

    def stored_dimension(self, dimension: str) -> str:
        """The name of a dimension in the store."""
        return f"{dimension}{MILLIONTHS_SUFFIX}" if dimension in self._fractional else dimension

    def display_amounts(self, dimension: str, *amounts: int) -> tuple[str, list[int | float]]:
        """A dimension of the store and its numbers, as people wrote them."""
        if not dimension.endswith(MILLIONTHS_SUFFIX):
            return dimension, list(amounts)
        return dimension.removesuffix(MILLIONTHS_SUFFIX), [amount / 1_000_000 for amount in amounts]

    def _counted(self, dimension: str, amount: int | float) -> int:
        validation.validate_amount(f"budget {self.name}: {dimension}", amount)
        if dimension in self._fractional:
            return round(amount * 1_000_000)
        if int(amount) != amount:
            hint = f"write its limit with a fraction ({dimension}=10.0) to allow that"
            raise InvalidInput(f"budget {self.name}: {dimension}={amount!r} is not whole; {hint}")
        return int(amount)

    def id(self, namespace: str, scope: str = "") -> str:
        """Its id in the store."""
        return _named(namespace, "budget", self.name, scope)

    async def declare(self, engine: Engine, budget_id: str, scope: str = "", *, namespace: str) -> None:
        """Let it exist in a namespace with these limits.

        Numbers that were changed here take effect. Those that an operator set stay until then.
        """
        hard = self.amounts(self.limits)
        soft = {one: 0 if self._soft is None else round(limit * self._soft) for one, limit in hard.items()}
        numbers: dict[str, Any] = {
            "dimensions": [*hard],
            "hard_limits": [*hard.values()],
            "soft_limits": [*soft.values()],
        }
        await engine.create_budget(
            budget_id,
            **numbers,
            declaration=hashlib.sha256(msgspec.json.encode(numbers)).hexdigest()[:32],
            scope_type=self.per if isinstance(self.per, str) else "key" if self.per else "app",
            scope_id=f"{self.name}:{scope}" if scope else self.name,
            enforcement_mode="strict",
            on_hard_limit=self.on_hard,
            on_soft_limit="warn",
            reset_interval_ms=self._reset_ms,
            namespace=namespace,
        )


class Limit:
    """How much may run: so many at once, so many starts in a while ("100/1m"), by everybody or per `key`.

    Without a name it belongs to its task; a named one is shared by all tasks that name it with the same numbers.
    """

    def __init__(
        self,
        *,
        concurrency: int = 0,
        rate: str | None = None,
        key: ScopeSelector | None = None,
        name: str | None = None,
        spread: Duration = 0,
    ) -> None:
        """`spread` is by how much the starts that had to wait for the rate are spread."""
        validation.validate_int("concurrency", concurrency, minimum=0)
        if not concurrency and rate is None:
            raise InvalidInput('limit: say how many at once (concurrency=10) or how fast (rate="100/1m")')
        self.concurrency = concurrency
        self.rate = rate
        self.per = key
        self.name = name
        self._starts, self._window_s = (0, 0) if rate is None else _rate(rate)
        self._spread_ms = to_ms(spread, "spread")

    def id(self, namespace: str, task: str, scope: str = "") -> str:
        """Its id in the store. Other numbers are another limit: those of a deploy do not fight those of the last."""
        numbers = f"{self.concurrency}|{self._starts}/{self._window_s}|{self._spread_ms}"
        return _named(namespace, "limit", self.name or task, f"{numbers}|{scope}")

    async def declare(self, engine: Engine, limit_id: str, *, namespace: str) -> None:
        """Let it exist in a namespace."""
        await engine.create_quota_policy(
            limit_id,
            window_seconds=self._window_s,
            max_requests_per_window=self._starts,
            max_concurrent=self.concurrency,
            jitter_ms=self._spread_ms,
            namespace=namespace,
        )


class CallLimits(msgspec.Struct, frozen=True):
    """The budgets and limits that hold for one call, by their ids in the store."""

    budgets: dict[str, tuple[Budget, str, str]] = {}  # by name: the budget, its id, whose it is
    limits: dict[str, Limit] = {}  # by id
    fairness_key: str | None = None

    async def declare(self, engine: Engine, known: set[str], namespace: str) -> None:
        """Let all of them exist in a namespace; `known` are those that do."""
        for budget, budget_id, scope in self.budgets.values():
            if budget_id not in known:
                await budget.declare(engine, budget_id, scope, namespace=namespace)
                known.add(budget_id)
        for limit_id, limit in self.limits.items():
            if limit_id not in known:
                await limit.declare(engine, limit_id, namespace=namespace)
                known.add(limit_id)


def resolve_scope(
    per: ScopeSelector | None,
    what: str,
    arguments: Mapping[str, Any],
    tags: Mapping[str, str],
    *,
    all_known: bool = True,
) -> str:
    """Whose budget or limit it is for a call with these arguments; empty when it is everybody's.

    They are not the `whole` of the arguments when some are the results of other runs.
    """
    if per is None:
        return ""
    value = _called(per, what, arguments, whole=all_known) if callable(per) else _found(per, arguments, tags)
    if value is None:
        raise InvalidInput(f"{what}: the call does not say which {per if isinstance(per, str) else 'one'} it is for")
    return str(value)


def _called(per: Callable[..., Any], what: str, arguments: Mapping[str, Any], *, whole: bool) -> Any:
    """What a function makes of a call: of the parameters that it names, else of all in their order."""
    asked = inspect.signature(per)
    if all(name in arguments for name in asked.parameters):
        return per(**{name: arguments[name] for name in asked.parameters})
    try:
        given = asked.bind(*(arguments.values() if whole else ()))
    except TypeError as fault:
        known = ", ".join(arguments) or "nothing"
        raise InvalidInput(f"{what}: its function wants {asked}, the call has {known}") from fault
    return per(*given.args)


def _found(name: str, arguments: Mapping[str, Any], tags: Mapping[str, str]) -> Any:
    if name in arguments:
        return arguments[name]
    for value in arguments.values():
        found = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if found is not None:
            return found
    return tags.get(name, tags.get(f"app.{name}"))


def _rate(text: object) -> tuple[int, int]:
    if not isinstance(text, str):
        raise InvalidInput(f'rate: {text!r} is no rate; write it like "100/1m"')
    count, found, window = text.partition("/")
    if not found or not count.strip().isdecimal() or not int(count):
        raise InvalidInput(f'rate: {text!r} is no rate; write it like "100/1m"')
    window_ms = to_ms(window if window.strip()[:1].isdigit() else f"1{window.strip()}", "rate")
    if window_ms < 1000 or window_ms % 1000:
        raise InvalidInput(f"rate: {text!r} counts in less than whole seconds")
    return int(count), window_ms // 1000


def _named(namespace: str, *words: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "|".join(("flowfabric", namespace, *words))))
