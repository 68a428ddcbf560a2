"""Validation errors: the request itself is wrong; repeating it unchanged is refused again."""

from __future__ import annotations

from flowfabric.errors.base import FabricError


class ValidationError(FabricError):
    """The request is not acceptable."""

    family = "validation"
    kind = "validation_error"
    explained_by_detail = True


class InvalidInput(ValidationError):
    """An argument is missing, malformed or out of range; the detail says which and why."""

    kind = "invalid_input"
    explained_by_detail = True

    def __str__(self) -> str:
        explanation = _CODES.get(self.detail)
        return super().__str__() if explanation is None else f"{self.kind}: {self.detail} — {explanation}"


# Explanations of details that are codes of the specification.
_CODES = {
    "count_limit_exceeds_hard_cap": "A page holds at most 10,000 entries: ask for fewer, and go on from the last one.",
    "fence_required": "Only the holder of the lease may do this: pass its lease id, epoch and attempt id.",
    "hmac_secret_not_initialized": "There is no signing key yet: `ff admin rotate-secret k1` makes one.",
    "partial_fence_triple": "Pass all of lease id, epoch and attempt id, as the claim gave them.",
    "patch_depth_exceeded": "The patch is nested too deeply: write it flatter.",
    "timeout_at_in_past": "The timeout has passed already: choose a later one.",
    "timeout_only_without_deadline": "A wait that only time can end needs a timeout: set timeout_at.",
    "waitpoint_key_mismatch": "The condition names another waitpoint key than the waitpoint: use the same key in both.",
    "waitpoints_empty": "A suspension needs at least one waitpoint.",
}


class CapabilityMismatch(ValidationError):
    """The worker lacks capabilities that this execution requires."""

    kind = "capability_mismatch"


class InvalidCapabilities(ValidationError):
    """The capability list is not well formed or too long."""

    kind = "invalid_capabilities"


class InvalidPolicyJson(ValidationError):
    """The execution policy cannot be used."""

    kind = "invalid_policy_json"


class PayloadTooLarge(ValidationError):
    """The payload is larger than allowed."""

    kind = "payload_too_large"


class SignalLimitExceeded(ValidationError):
    """This execution has accepted as many signals as it may."""

    kind = "signal_limit_exceeded"


class InvalidWaitpointKey(ValidationError):
    """The waitpoint key is not usable here."""

    kind = "invalid_waitpoint_key"


class InvalidToken(ValidationError):
    """The waitpoint token is missing, wrong or no longer valid."""

    kind = "invalid_token"


class WaitpointNotTokenBound(ValidationError):
    """This waitpoint has no token, so it cannot be activated or signalled."""

    kind = "waitpoint_not_token_bound"


class RetentionLimitExceeded(ValidationError):
    """Keeping this much would exceed the retention limit."""

    kind = "retention_limit_exceeded"


class InvalidLeaseForSuspend(ValidationError):
    """Only the holder of a live lease can suspend an execution."""

    kind = "invalid_lease_for_suspend"


class InvalidDependency(ValidationError):
    """The dependency is not known to this execution or cannot be used."""

    kind = "invalid_dependency"


class InvalidWaitpointForExecution(ValidationError):
    """The waitpoint belongs to another execution or another attempt."""

    kind = "invalid_waitpoint_for_execution"


class InvalidBlockingReason(ValidationError):
    """An execution cannot be blocked or unblocked for this reason."""

    kind = "invalid_blocking_reason"


class InvalidOffset(ValidationError):
    """This log does not know the position."""

    kind = "invalid_offset"


class Unauthorized(ValidationError):
    """The server refuses this: FLOWFABRIC_TOKEN (or `token=`) holds no token, or none that is good for it."""

    kind = "unauthorized"


class InvalidBudgetScope(ValidationError):
    """The budget's scope does not fit what it is attached to."""

    kind = "invalid_budget_scope"


class BudgetOverrideNotAllowed(ValidationError):
    """This budget may not be overridden."""

    kind = "budget_override_not_allowed"


class InvalidQuotaSpec(ValidationError):
    """The limits of the quota policy contradict each other."""

    kind = "invalid_quota_spec"


class InvalidKid(ValidationError):
    """A key id must not be empty and must not contain a colon."""

    kind = "invalid_kid"


class InvalidSecretHex(ValidationError):
    """A secret must be an even number of hexadecimal digits, at least 64 for a new one."""

    kind = "invalid_secret_hex"


class InvalidGraceMs(ValidationError):
    """The grace period must be a whole number of milliseconds from 0 to 2^53 - 1."""

    kind = "invalid_grace_ms"


class InvalidTagKey(ValidationError):
    """A tag key is a lowercase namespace other than ff, a dot and a lowercase field; the detail names the key."""

    kind = "invalid_tag_key"


class InvalidFrameType(ValidationError):
    """The frame type is not known."""

    kind = "invalid_frame_type"


class Corruption(ValidationError):
    """Stored bytes can no longer be read."""

    kind = "corruption"


class HandleFromOtherBackend(ValidationError):
    """The handle was issued by another store."""

    kind = "handle_from_other_backend"
