"""Validation errors: the request itself is wrong; repeating it unchanged is refused again."""

from __future__ import annotations

from flowfabric.errors.base import FabricError


class ValidationError(FabricError):
    """The request is not acceptable."""

    family = "validation"
    explained_by_detail = True


class InvalidInput(ValidationError):
    """An argument is missing, malformed or out of range; the detail says which and why."""

    explained_by_detail = True

    def __str__(self) -> str:
        explanation = _CODES.get(self.detail)
        return super().__str__() if explanation is None else f"{self.kind}: {self.detail} — {explanation}"


# Explanations of details that are codes of the specification.
_CODES = {
    "count_limit_exceeds_hard_cap": "A page holds at most 10,000 entries: ask for fewer, then for the next page.",
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


class InvalidCapabilities(ValidationError):
    """The capability list is not well formed or too long."""


class InvalidPolicyJson(ValidationError):
    """The execution policy cannot be used."""


class PayloadTooLarge(ValidationError):
    """The payload is larger than allowed."""


class FactTooLarge(ValidationError):
    """The value of a fact is larger than allowed; store it elsewhere, and set a reference to it."""


class SignalLimitExceeded(ValidationError):
    """This execution has accepted as many signals as it may."""


class InvalidWaitpointKey(ValidationError):
    """The waitpoint key is not usable here."""


class InvalidToken(ValidationError):
    """The waitpoint token is missing, wrong or no longer valid."""


class WaitpointNotTokenBound(ValidationError):
    """This waitpoint has no token, so it cannot be activated or signalled."""


class RetentionLimitExceeded(ValidationError):
    """Keeping this much would exceed the retention limit."""


class InvalidLeaseForSuspend(ValidationError):
    """Only the holder of a live lease can suspend an execution."""


class InvalidDependency(ValidationError):
    """The dependency is not known to this execution or cannot be used."""


class InvalidWaitpointForExecution(ValidationError):
    """The waitpoint belongs to another execution or another attempt."""


class InvalidBlockingReason(ValidationError):
    """An execution cannot be blocked or unblocked for this reason."""


class InvalidOffset(ValidationError):
    """This log does not know the position."""


class Unauthorized(ValidationError):
    """The server refuses this: FLOWFABRIC_TOKEN (or `token=`) holds no token, or none that is good for it."""


class InvalidBudgetScope(ValidationError):
    """The budget's scope does not fit what it is attached to."""


class BudgetOverrideNotAllowed(ValidationError):
    """This budget may not be overridden."""


class InvalidQuotaSpec(ValidationError):
    """The limits of the quota policy contradict each other."""


class InvalidKid(ValidationError):
    """A key id must not be empty and must not contain a colon."""


class InvalidSecretHex(ValidationError):
    """A secret must be an even number of hexadecimal digits, at least 64 for a new one."""


class InvalidGraceMs(ValidationError):
    """The grace period must be a whole number of milliseconds from 0 to 2^53 - 1."""


class InvalidTagKey(ValidationError):
    """A tag key is a lowercase namespace other than ff, a dot and a lowercase field; the detail names the key."""


class InvalidFrameType(ValidationError):
    """The frame type is not known."""


class Corruption(ValidationError):
    """Stored bytes can no longer be read."""


class HandleFromOtherBackend(ValidationError):
    """The handle was issued by another store."""
