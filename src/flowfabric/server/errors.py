"""The one table that turns errors into status codes and response bodies.

The body is `{"error": text}`, and for conflicts and faults also `kind` and `retryable`. A domain error is never a 500.
"""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error body."""

    error: str
    kind: str | None = None
    retryable: bool | None = None


class OversizeProblem(msgspec.Struct, frozen=True):
    """The error body for a request that is too large."""

    limit_bytes: int
    route: str
    error: str = "payload_too_large"


class HttpError(Exception):
    """An error response that no engine error causes. `detail` says more to clients that read the error header."""

    def __init__(
        self,
        status: int,
        error: str = "",
        *,
        kind: str | None = None,
        retryable: bool | None = None,
        detail: str = "",
        **headers: str,
    ) -> None:
        super().__init__(detail or error)
        self.status = status
        self.body: Problem | OversizeProblem | None = Problem(error, kind, retryable) if error else None
        self.headers = headers

    @property
    def client_error(self) -> errors.FabricError | None:
        """The error that a client raises for this response; None if it retries."""
        text = str(self)
        match self.status:
            case 400 | 415 | 422 | 431:
                return errors.InvalidInput(text)
            case 401 | 403:
                return errors.Unauthorized(text)
            case 404:
                return errors.NotFound("execution", text)
            case 413:
                return errors.PayloadTooLarge(text)
            case _:
                return None


class BodyTooLarge(HttpError):
    """The body is larger than the limit of the route."""

    def __init__(self, limit: int, route: str) -> None:
        super().__init__(413, f"the request is larger than the {limit} bytes that {route} takes")
        self.body = OversizeProblem(limit, route)


def bad_request(text: str) -> HttpError:
    return HttpError(400, text)


def not_found(text: str) -> HttpError:
    return HttpError(404, text)


_NAMED_STATES = frozenset(
    {
        "execution_not_terminal",
        "max_replays_exhausted",
        "replay_not_allowed",
        "not_runnable",
        "terminal",
        "flow_already_terminal",
        "budget_exceeded",
        "budget_soft_exceeded",
    }
)
_DONE_STATES = frozenset(
    {
        "already_satisfied",
        "duplicate_signal",
        "ok_already_applied",
        "attempt_already_terminal",
        "stream_already_closed",
        "lease_expired",
        "lease_revoked",
    }
)
_UNREADABLE = frozenset({"corruption", "handle_from_other_backend"})


def status_and_problem(error: errors.FabricError) -> tuple[int, Problem]:
    """Return the status and the body for an engine error."""
    variant = type(error).__name__
    match error:
        case errors.NotFound(entity=entity):
            return 404, Problem(f"not found: {entity}")
        case errors.ValidationError():
            code = "validation_error" if error.kind in _UNREADABLE else error.kind
            return 400, Problem(f"{code}: {error.detail}" if error.detail not in ("", code) else code)
        case errors.RateLimitExceeded() | errors.ConcurrencyLimitExceeded():
            return 429, Problem(f"{error.kind}: {variant}", error.kind, True)
        case errors.RetryExhausted():
            return 500, Problem(f"{error.kind}: {variant}", error.kind, False)
        case errors.ContentionError():
            return 409, Problem(f"contention: {variant}", "contention", True)
        case errors.ConflictError():
            return 409, Problem(f"{error.kind}: {error.detail or variant}", error.kind, False)
        case errors.StateError():
            code = _state_code(error.kind)
            return 409, Problem(f"{code}: {variant}", code, False)
        case errors.ResourceExhausted(pool=pool, max=most):
            words = f"too many concurrent {pool} calls (server max: {most}); retry with backoff"
            return 429, Problem(words, "resource_exhausted", True)
        case errors.OperationTimeout(op=op):
            return 504, Problem(f"timeout: {op}", "timeout", False)
        case errors.Unavailable(op=op):
            return 503, Problem(f"backend op unavailable: {op}", "unavailable", False)
        case errors.StoreUnavailable(source=source):
            return 500, Problem(f"backend: {source.value}", source.value, error.retryable)
        case _:
            return 500, Problem(f"engine: {error.kind}", None, error.retryable)


def error_entry(error: errors.FabricError) -> dict[str, Any]:
    """Return the error body of one item of a batch, with `code` and facts, so that a client can raise it again."""
    problem = status_and_problem(error)[1]
    return {**msgspec.to_builtins(problem), **error_details(error)}


def error_details(error: errors.FabricError) -> dict[str, Any]:
    """Return code, detail and facts of an error, beyond its response body."""
    facts = {name: value for name, value in error.facts.items() if isinstance(value, str | int | bool)}
    return {"code": error.kind, "detail": error.detail, "facts": facts}


def _state_code(kind: str) -> str:
    if kind in _NAMED_STATES:
        return kind
    return "already_satisfied" if kind in _DONE_STATES else "state_conflict"
