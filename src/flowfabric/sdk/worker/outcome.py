"""Outcomes: how an attempt ends, made from a handler's result or exception, and reported to the engine."""

from __future__ import annotations

import logging
import os
import traceback
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from flowfabric.errors import (
    FabricError,
    InvalidInput,
    OperationTimeout,
    ResourceExhausted,
    StoreFault,
    StoreUnavailable,
    Unauthorized,
    ValidationError,
)
from flowfabric.handles import Handle
from flowfabric.model.answers.execution import Completed
from flowfabric.sdk.exceptions import BudgetExceeded, Fatal, RetryAfter, StepFailed, is_lease_loss
from flowfabric.sdk.serialization.failures import encode_failure, group_leaves
from flowfabric.sdk.task import Task

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI

logger = logging.getLogger("flowfabric.worker")

UNAUTHORIZED_DELAY_MS = 30_000
MAX_REASON_BYTES = 8000
MAX_CAUSES = 20  # causes of an exception that are inspected
MAX_CATEGORY_CHARS = 200
NO_RETRY = '{"max_retries": 0}'
PACKAGE_PREFIX = f"{Path(__file__).parents[1]}{os.sep}"


class Succeeded(msgspec.Struct, frozen=True, tag="done"):
    """The handler returned; the result is JSON."""

    result: bytes


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The handler raised, or its result does not fit its annotation. If it is final, no attempt follows."""

    reason: str
    category: str
    failure: bytes | None = None  # the exception as JSON
    is_final: bool = False


class Postponed(msgspec.Struct, frozen=True, tag="later"):
    """The attempt is delayed and continues later, which does not count as a retry."""

    after_ms: int
    reason: str = ""


class NothingToReport(msgspec.Struct, frozen=True, tag="away"):
    """There is nothing to report: the run was parked, its lease was lost, or a test simulated a crash."""


Outcome = Succeeded | Failed | Postponed | NothingToReport
NOTHING_TO_REPORT = NothingToReport()


def outcome_of_result(task: Task[..., Any], value: Any) -> Outcome:
    """Return the outcome of a handler's result; a result that does not fit its annotation is a failure."""
    try:
        return Succeeded(task.handler_signature.result_codec.to_json(value, "result"))
    except InvalidInput as error:
        return outcome_of_exception(error.with_traceback(None))  # the traceback shows library code only


def outcome_of_exception(failure: BaseException, *, is_final: bool = False) -> Outcome:
    """Return the outcome of an exception that a handler raised. A final one is not retried, whatever the policy."""
    outcome = _outcome_of(failure)
    if not is_final:
        return outcome
    failed = outcome if isinstance(outcome, Failed) else _failed(failure, type(failure).__name__)
    return msgspec.structs.replace(failed, is_final=True)


def _outcome_of(failure: BaseException) -> Outcome:
    match failure:
        case BaseExceptionGroup():
            return _outcome_of_group(failure)
        case RetryAfter():
            return Postponed(failure.after_ms)
        case Unauthorized() | StoreUnavailable(source=StoreFault.AUTH):  # an operator will fix this; do not fail runs
            return Postponed(UNAUTHORIZED_DELAY_MS, str(failure))
        case Fatal() | InvalidInput():
            return _failed(failure, "permanent")
        case TimeoutError():
            return _failed(failure, "timeout")
        case BudgetExceeded():
            return _failed(failure, "budget_exceeded")
        case StepFailed():
            return _failed(failure, failure.type.rpartition(".")[2])
        case _:
            return _failed(failure, type(failure).__name__)


def _failed(failure: BaseException, category: str) -> Failed:
    """Return the outcome of a failure. A group with one exception in it is stored as that exception."""
    category = category[:MAX_CATEGORY_CHARS]
    leaves = [*islice(group_leaves(failure), 2)]
    return Failed(
        failure_reason(failure), category, encode_failure(leaves[0] if len(leaves) == 1 else failure, category)
    )


def _outcome_of_group(group: BaseExceptionGroup) -> Outcome:
    """Return the outcome of an exception group: one permanent failure makes the whole group permanent."""
    outcomes = [outcome_of_exception(error) for error in group.exceptions]
    categories = {outcome.category for outcome in outcomes if isinstance(outcome, Failed)}
    if not categories:
        return Postponed(max(outcome.after_ms for outcome in outcomes if isinstance(outcome, Postponed)))
    if "permanent" in categories:
        return _failed(group, "permanent")
    return _failed(group, categories.pop() if len(categories) == 1 else type(group).__name__)


def find_lease_loss(failure: BaseException, run_id: str) -> FabricError | None:
    """Return the refusal that shows that the handler lost its lease, if that caused the failure."""
    for leaf in group_leaves(failure):
        cause: BaseException | None = leaf
        for _ in range(MAX_CAUSES):
            if isinstance(cause, FabricError) and is_lease_loss(cause, run_id):
                return cause
            if cause is None:
                break
            cause = cause.__cause__ or cause.__context__
    return None


def is_definitive(refusal: FabricError) -> bool:
    """True if the store has decided about an outcome; False if it was not reached, or refused the request itself."""
    return not isinstance(refusal, StoreUnavailable | Unauthorized | ResourceExhausted | OperationTimeout)


def unstorable_outcome(refusal: FabricError) -> Failed:
    """Return the failure of an attempt whose outcome can never be stored."""
    return _failed(refusal, "permanent")


def is_unstorable(refusal: FabricError) -> bool:
    """True if an outcome can never be stored, such as a result that is too large."""
    return isinstance(refusal, ValidationError) and is_definitive(refusal)


async def report_outcome(engine: EngineAPI, handle: Handle, outcome: Outcome) -> None:
    """Report the outcome of an attempt to the engine; a result that cannot be stored is reported as a failure."""
    try:
        await _send(engine, handle, outcome)
    except ValidationError as error:
        if not is_unstorable(error):
            raise
        await _send(engine, handle, unstorable_outcome(error))


def warn_of_unread(completed: Completed) -> None:
    """Log that a run has ended although messages to it are unread."""
    if completed.unread is not UNSET:
        counts = ", ".join(f"{name}: {count}" for name, count in completed.unread.items())
        hint = "`if await ctx.inbox().close(): return` loses none"
        logger.warning("%s has ended with unread messages (%s); %s", completed.execution_id, counts, hint)


async def _send(engine: EngineAPI, handle: Handle, outcome: Outcome) -> None:
    match outcome:
        case Succeeded(result=result):
            warn_of_unread(await engine.complete(handle, result=result, encoding="json"))
        case Failed(reason=reason, category=category, failure=failure, is_final=is_final):
            policy = NO_RETRY if is_final else None
            await engine.fail(handle, reason=reason, category=category, failure=failure, retry_policy=policy)
        case Postponed(after_ms=after_ms, reason=reason):
            await engine.delay_for(handle, after_ms, reason=reason)
        case NothingToReport():
            pass


def failure_reason(failure: BaseException) -> str:
    """Return a failure as text: one line, and the first and the last two frames in the application's code.

    For an exception group the line names all exceptions in it, and each follows with its own frames.
    """
    leaves = [*group_leaves(failure)]
    summary = _summary(failure)
    if leaves != [failure]:
        summary = f"{'; '.join(map(_summary, leaves))} ({summary})"
    parts = [(summary, failure), *((_summary(leaf), leaf) for leaf in leaves if leaf is not failure)]
    text = "\n".join(f"{line}\n{_frames_text(error)}".rstrip("\n") for line, error in parts)
    return text.replace("\x00", "\\0").encode("utf-8", "backslashreplace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")


def _frames_text(failure: BaseException) -> str:
    frames = [*traceback.extract_tb(failure.__traceback__)]
    frames = [frame for frame in frames if not frame.filename.startswith(PACKAGE_PREFIX)] or frames
    return "".join(traceback.format_list(frames if len(frames) <= 3 else [frames[0], *frames[-2:]]))


def _summary(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {_text(failure)}"


def application_traceback(failure: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame outside this library; all of it if there is no such frame."""
    trace = failure.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE_PREFIX):
        trace = trace.tb_next
    return trace or failure.__traceback__


def is_encodable(failure: BaseException) -> bool:
    """True if its text can be encoded; a lone surrogate cannot."""
    try:
        for error in (failure, *group_leaves(failure)):
            _text(error).encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(failure: BaseException) -> str:
    try:
        return str(failure)
    except Exception as error:
        return f"(its text cannot be made: {type(error).__name__})"
