"""Arguments of a suspend and the checks that need nothing but them."""

from __future__ import annotations

import msgspec

from flowfabric import errors
from flowfabric.model.condition import ByName, Condition, Single, TimeoutOnly
from flowfabric.model.suspension import Requester, TimeoutBehavior
from flowfabric.rules.suspension import conditions

SKEW_MS = 600_000
_ANSWER_GRACE_MS = 60_000
_MAX_ANSWER_TTL_MS = 7 * 24 * 60 * 60 * 1000


class FreshWaitpoint(msgspec.Struct, frozen=True):
    """A waitpoint that the suspend creates."""

    waitpoint_id: str
    waitpoint_key: str


class UsePendingWaitpoint(msgspec.Struct, frozen=True):
    """A waitpoint that was created before; it keeps its key and token."""

    waitpoint_id: str


WaitpointBinding = FreshWaitpoint | UsePendingWaitpoint


class ResumePolicy(msgspec.Struct, frozen=True):
    """The policy for resuming. All of it is stored; only the delay has an effect."""

    resume_target: str = "runnable"
    consume_matched_signals: bool = True
    retain_signal_buffer_until_closed: bool = False
    resume_delay_ms: int | None = None
    close_waitpoint_on_resume: bool = True


class SuspendArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a suspend. `now` is the caller's clock and is used only to check the arguments."""

    suspension_id: str
    waitpoints: tuple[WaitpointBinding, ...]
    resume_condition: Condition
    reason_code: str
    now: int
    resume_policy: ResumePolicy = ResumePolicy()
    requested_by: Requester = Requester.WORKER
    timeout_at: int | None = None
    timeout_behavior: TimeoutBehavior = TimeoutBehavior.FAIL
    continuation_metadata_pointer: str | None = None
    idempotency_key: str | None = None

    @property
    def answer_ttl_ms(self) -> int:
        """How long the answer is kept for a repeated call with the same idempotency key."""
        if self.timeout_at is None:
            return _MAX_ANSWER_TTL_MS
        return min(max(self.timeout_at - self.now, 0) + _ANSWER_GRACE_MS, _MAX_ANSWER_TTL_MS)


def check_arguments(args: SuspendArgs) -> errors.FabricError | None:
    """Return what is wrong with the arguments alone."""
    bindings, condition = args.waitpoints, args.resume_condition
    if not bindings:
        return errors.InvalidInput("waitpoints_empty")
    primary = bindings[0]
    if (
        isinstance(primary, FreshWaitpoint)
        and isinstance(condition, Single)
        and condition.waitpoint_key != primary.waitpoint_key
    ):
        return errors.InvalidInput("waitpoint_key_mismatch")
    if len(bindings) > 1 and (detail := _check_bindings(bindings, condition)):
        return errors.InvalidInput(detail)
    if isinstance(condition, TimeoutOnly) and args.timeout_at is None:
        return errors.InvalidInput("timeout_only_without_deadline")
    if isinstance(condition, Single) and condition.matcher == ByName(""):
        return errors.InvalidInput(conditions.EMPTY_NAME)
    if args.timeout_at is not None and args.timeout_at + SKEW_MS < args.now:
        return errors.InvalidInput("timeout_at_in_past")
    return conditions.check_structure(condition)


def _check_bindings(bindings: tuple[WaitpointBinding, ...], condition: Condition) -> str | None:
    """Return what is wrong with the bindings if there are several waitpoints."""
    for index, binding in enumerate(bindings[1:], start=1):
        if isinstance(binding, UsePendingWaitpoint):
            return f"additional_waitpoint_binding_must_be_fresh at waitpoints[{index}]"
    if isinstance(bindings[0], UsePendingWaitpoint):
        return "use_pending_with_extras_unsupported"
    fresh = [binding for binding in bindings if isinstance(binding, FreshWaitpoint)]
    for index, binding in enumerate(fresh[1:], start=1):
        if not binding.waitpoint_key:
            return f"additional_waitpoint_binding_empty_key at waitpoints[{index}]"
    keys = [binding.waitpoint_key for binding in fresh]
    referenced = conditions.referenced_keys(condition)
    for key in referenced:
        if key not in keys:
            return f"referenced_waitpoint_key_missing_binding: {key}"
    for key in keys:
        if key not in referenced:
            return f"extra_binding_not_referenced_by_condition: {key}"
    for index, binding in enumerate(fresh):
        earlier = fresh[:index]
        if any(
            binding.waitpoint_id == other.waitpoint_id or binding.waitpoint_key == other.waitpoint_key
            for other in earlier
        ):
            return f"duplicate_waitpoint_binding: {binding.waitpoint_key}"
    return None
