"""`Call`: a task with its arguments and the options of its submit."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from flowfabric.engine.validation import execution as validate
from flowfabric.errors import InvalidInput
from flowfabric.sdk import validation
from flowfabric.sdk.keys.key import validate_key
from flowfabric.sdk.limits import Budget, CallLimits, Limit, ScopeSelector
from flowfabric.sdk.retry import Retry
from flowfabric.sdk.serialization.inputs import BUDGET_IDS_KEY

if TYPE_CHECKING:
    from flowfabric.sdk.task import Task

R_co = TypeVar("R_co", covariant=True)


class TaskOptions(msgspec.Struct, frozen=True):
    """The options of a submit: those of the task, with the changes made by `Task.options`."""

    lane: str = "default"
    priority: int = 0
    retry: Retry | None = None
    needs: frozenset[str] = frozenset()
    timeout_ms: int | None = None
    delay_ms: int | None = None
    deadline: datetime | None = None
    key: str | None = None
    tags: dict[str, str] = {}
    budgets: tuple[Budget, ...] = ()
    limits: tuple[Limit, ...] = ()
    fair: ScopeSelector | None = None
    weight: int = 1
    detached: bool = False
    inbox: dict[str, dict[str, Any]] = {}  # JSON schemas of the messages that a run takes

    @property
    def depends_on_arguments(self) -> bool:
        """True if the policy of a call depends on its arguments."""
        return bool(self.budgets or self.limits or self.fair is not None)

    def policy(self, call_limits: CallLimits, *, is_read: bool = False) -> str | None:
        """Encode the execution policy; None if it is empty. `is_read` keeps the result for a downstream node."""
        policy: dict[str, Any] = {"kept_for_successors": True} if is_read else {}
        if self.retry is not None:
            policy["retry_policy"] = self.retry.policy()
        if self.detached:
            policy["detached"] = True
        if self.inbox:
            policy["inbox"] = self.inbox
        if self.needs:
            policy["routing_requirements"] = {"required_capabilities": sorted(self.needs)}
        if call_limits.budgets:
            policy["budget_ids"] = [budget_id for _, budget_id, _ in call_limits.budgets.values()]
            policy[BUDGET_IDS_KEY] = {name: budget_id for name, (_, budget_id, _) in call_limits.budgets.items()}
        if call_limits.limits:
            policy["quota_policy_ids"] = list(call_limits.limits)
        if call_limits.fairness_key is not None:
            policy |= {"fairness_key": call_limits.fairness_key, "fairness_weight": self.weight}
        return msgspec.json.encode(policy).decode() if policy else None


def validate_submit_options(**options: Any) -> dict[str, Any]:
    """Check options that a submit may change, and return them."""
    checks: dict[str, Callable[[Any], Any]] = {
        "lane": validate.validate_lane_id,
        "priority": lambda value: validation.validate_int("priority", value),
        "weight": lambda value: validation.validate_int("weight", value, minimum=1),
        "tags": validation.validate_tags,
        "retry": _validate_retry,
        "fair": _validate_scope,
        "deadline": _validate_deadline,
        "key": validate_key,
    }
    return {name: checks[name](value) for name, value in options.items()}


def _validate_retry(value: object) -> Retry | None:
    if value is not None and not isinstance(value, Retry):
        raise InvalidInput(f"retry: {value!r} is no Retry; write retry=Retry(max=3)")
    return value


def _validate_scope(value: object) -> ScopeSelector | None:
    if value is not None and not isinstance(value, str) and not callable(value):
        raise InvalidInput(f"fair: {value!r} is neither the name of a parameter nor a function of the arguments")
    return value


def _validate_deadline(value: object) -> datetime:
    if not isinstance(value, datetime):
        raise InvalidInput(f"deadline: {value!r} is no datetime; write datetime.now(timezone.utc) + timedelta(hours=1)")
    if value.tzinfo is None:
        raise InvalidInput("deadline: it needs a time zone (datetime.now(timezone.utc) + …)")
    return value


class Call(msgspec.Struct, Generic[R_co], frozen=True):
    """A task with its arguments, to be submitted later, alone or together with others."""

    task: Task[Any, R_co]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: TaskOptions
