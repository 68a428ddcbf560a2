"""Budgets and limits as an application declares them. They are created in the store on first use, by name."""

from __future__ import annotations

import hashlib
import inspect
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from flowfabric.errors import InvalidInput
from flowfabric.model.text import MILLIONTHS_SUFFIX
from flowfabric.sdk import validation
from flowfabric.sdk.durations import Duration, to_ms

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI

logger = logging.getLogger("flowfabric.worker")

CURRENCY_DIMENSIONS = frozenset({"usd", "eur", "gbp", "chf"})

ScopeSelector = str | Callable[..., Any]  # a parameter, a field of one, or a tag; or a function of the arguments


class Budget:
    """Limits on what may be spent, by dimension such as `usd` or `tokens`: in total, or per value of `per`.

    Usage starts over after each `reset`. Usage beyond the share `soft` of the limits counts as a soft breach, of which
    operators are warned. At a hard limit `on_hard="fail"` raises `BudgetExceeded` in the handler, and `"suspend"`
    suspends the run until the budget has capacity. Currencies, and dimensions whose limit is a `float`, may be spent in
    fractions.
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
        self._warned: set[str] = set()  # dimensions that were spent although they have no limit: perhaps a typo
        self.per = per
        self.on_hard = on_hard
        self._soft = soft
        self._reset_ms = 0 if reset is None else to_ms(reset, "reset")
        self._fractional = CURRENCY_DIMENSIONS | {name for name, limit in limits.items() if isinstance(limit, float)}
        if not all(self.amounts(limits).values()):  # also refuses wrong numbers
            raise InvalidInput(f"budget {name}: a limit of 0 would be none; leave that dimension out")

    def amounts(self, spent: Mapping[str, int | float]) -> dict[str, int]:
        """Convert amounts to the dimensions and whole numbers of the store."""
        if unlimited := [name for name in spent if name not in self.limits and name not in self._warned]:
            self._warned.update(unlimited)
            known = ", ".join(self.limits)
            logger.warning(
                "budget %s: %s has no limit and is only counted; %s have one", self.name, ", ".join(unlimited), known
            )
        return {self.stored_dimension(name): self._stored_amount(name, amount) for name, amount in spent.items()}

    def stored_dimension(self, dimension: str) -> str:
        """Return the name of a dimension in the store."""
        return f"{dimension}{MILLIONTHS_SUFFIX}" if dimension in self._fractional else dimension

    def display_amounts(self, dimension: str, *amounts: int) -> tuple[str, list[int | float]]:
        """Convert a dimension of the store and its amounts to those of the declaration."""
        if not dimension.endswith(MILLIONTHS_SUFFIX):
            return dimension, list(amounts)
        return dimension.removesuffix(MILLIONTHS_SUFFIX), [amount / 1_000_000 for amount in amounts]

    def _stored_amount(self, dimension: str, amount: int | float) -> int:
        validation.validate_amount(f"budget {self.name}: {dimension}", amount)
        if dimension in self._fractional:
            return round(amount * 1_000_000)
        if int(amount) != amount:
            hint = f"write its limit with a fraction ({dimension}=10.0) to allow that"
            raise InvalidInput(f"budget {self.name}: {dimension}={amount!r} is not whole; {hint}")
        return int(amount)

    def id(self, namespace: str, scope: str = "") -> str:
        """Return its id in the store, derived from namespace, name and scope."""
        return _derive_id(namespace, "budget", self.name, scope)

    async def declare(self, engine: EngineAPI, budget_id: str, scope: str = "", *, namespace: str) -> None:
        """Create it in a namespace, or update its limits if the declaration has changed.

        Limits that an operator has set stay in force until the declaration changes.
        """
        hard = self.amounts(self.limits)
        soft = {name: 0 if self._soft is None else round(limit * self._soft) for name, limit in hard.items()}
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
    """A limit on concurrency, or on the rate of starts ("100/1m"): in total, or per value of `key`.

    Without a name it belongs to its task. A named limit is shared by all tasks that declare it with the same numbers.
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
        """Declare a limit. Starts that had to wait for the rate are spread randomly over `spread`."""
        validation.validate_int("concurrency", concurrency, minimum=0)
        if not concurrency and rate is None:
            raise InvalidInput('limit: say how many at once (concurrency=10) or how fast (rate="100/1m")')
        self.concurrency = concurrency
        self.rate = rate
        self.per = key
        self.name = name
        self._starts, self._window_s = (0, 0) if rate is None else _parse_rate(rate)
        self._spread_ms = to_ms(spread, "spread")

    def id(self, namespace: str, task: str, scope: str = "") -> str:
        """Return its id in the store. Changed numbers make another limit, so that two deployments do not conflict."""
        numbers = f"{self.concurrency}|{self._starts}/{self._window_s}|{self._spread_ms}"
        return _derive_id(namespace, "limit", self.name or task, f"{numbers}|{scope}")

    async def declare(self, engine: EngineAPI, limit_id: str, *, namespace: str) -> None:
        """Create it in a namespace, if it does not exist."""
        await engine.create_quota_policy(
            limit_id,
            window_seconds=self._window_s,
            max_requests_per_window=self._starts,
            max_concurrent=self.concurrency,
            jitter_ms=self._spread_ms,
            namespace=namespace,
        )


class CallLimits(msgspec.Struct, frozen=True):
    """The budgets and limits of one call, with their ids in the store."""

    budgets: dict[str, tuple[Budget, str, str]] = {}  # by name: the budget, its id, its scope
    limits: dict[str, Limit] = {}  # by id
    fairness_key: str | None = None

    async def declare(self, engine: EngineAPI, known: set[str], namespace: str) -> None:
        """Create all of them in a namespace, except those in `known`, to which they are added."""
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
    subject: str,
    arguments: Mapping[str, Any],
    tags: Mapping[str, str],
    *,
    all_known: bool = True,
) -> str:
    """Return the scope of a budget or limit for a call with these arguments; empty if it has no selector.

    `all_known` is False if some arguments are missing, because they are results of other runs.
    """
    if per is None:
        return ""
    value = _apply(per, subject, arguments, all_known=all_known) if callable(per) else _find(per, arguments, tags)
    if value is None:
        raise InvalidInput(f"{subject}: the call does not say which {per if isinstance(per, str) else 'one'} it is for")
    return str(value)


def _apply(per: Callable[..., Any], subject: str, arguments: Mapping[str, Any], *, all_known: bool) -> Any:
    """Call a selector with the arguments that it names, or if it names others, with all in their order."""
    signature = inspect.signature(per)
    if all(name in arguments for name in signature.parameters):
        return per(**{name: arguments[name] for name in signature.parameters})
    try:
        bound = signature.bind(*(arguments.values() if all_known else ()))
    except TypeError as error:
        known = ", ".join(arguments) or "nothing"
        raise InvalidInput(f"{subject}: its function wants {signature}, the call has {known}") from error
    return per(*bound.args)


def _find(name: str, arguments: Mapping[str, Any], tags: Mapping[str, str]) -> Any:
    """Return the argument of this name, the field of this name of an argument, or the tag of this name."""
    if name in arguments:
        return arguments[name]
    for argument in arguments.values():
        value = argument.get(name) if isinstance(argument, Mapping) else getattr(argument, name, None)
        if value is not None:
            return value
    return tags.get(name, tags.get(f"app.{name}"))


def _parse_rate(text: object) -> tuple[int, int]:
    if not isinstance(text, str):
        raise InvalidInput(f'rate: {text!r} is no rate; write it like "100/1m"')
    count, separator, window = text.partition("/")
    if not separator or not count.strip().isdecimal() or not int(count):
        raise InvalidInput(f'rate: {text!r} is no rate; write it like "100/1m"')
    window_ms = to_ms(window if window.strip()[:1].isdigit() else f"1{window.strip()}", "rate")
    if window_ms < 1000 or window_ms % 1000:
        raise InvalidInput(f"rate: {text!r} counts in less than whole seconds")
    return int(count), window_ms // 1000


def _derive_id(namespace: str, *parts: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "|".join(("flowfabric", namespace, *parts))))
