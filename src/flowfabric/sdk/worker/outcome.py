"""Outcomes: the one word with which an attempt ends, wherever its handler ran."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from flowfabric.engine_api import EngineAPI
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
from flowfabric.sdk.exceptions import BudgetExceeded, Fatal, RetryAfter
from flowfabric.sdk.task import Task

UNAUTHORIZED_DELAY_MS = 30_000
MAX_REASON_BYTES = 8000
MAX_CAUSES = 20  # of a failure that are looked through
MAX_CATEGORY_CHARS = 200
PACKAGE_PREFIX = f"{Path(__file__).parents[1]}{os.sep}"


class Succeeded(msgspec.Struct, frozen=True, tag="done"):
    """It returned; the result as JSON."""

    result: bytes


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It raised."""

    reason: str
    category: str


class Postponed(msgspec.Struct, frozen=True, tag="later"):
    """It wants to go on after a while, as the same attempt."""

    after_ms: int
    reason: str = ""  # for people


class NothingToReport(msgspec.Struct, frozen=True, tag="away"):
    """The run was put away, or the worker died on purpose: there is nothing to say any more."""


Outcome = Succeeded | Failed | Postponed | NothingToReport
NOTHING_TO_REPORT = NothingToReport()


def outcome_of_result(task: Task[..., Any], value: Any) -> Outcome:
    """What a handler's value means; one that does not fit its annotation is a failure."""
    try:
        return Succeeded(task.signature.result_codec.to_json(value, "result"))
    except InvalidInput as wrong:
        return outcome_of_exception(wrong.with_traceback(None))  # it leads through our own pages only


def outcome_of_exception(failure: BaseException) -> Outcome:
    """What a handler's exception means."""
    match failure:
        case BaseExceptionGroup():
            return _together(failure)
        case RetryAfter():
            return Postponed(failure.after_ms)
        case Unauthorized() | StoreUnavailable(source=StoreFault.AUTH):  # that somebody mends, and no run ends for it
            return Postponed(UNAUTHORIZED_DELAY_MS, str(failure))
        case Fatal() | InvalidInput():
            return Failed(failure_reason(failure), "permanent")
        case TimeoutError():
            return Failed(failure_reason(failure), "timeout")
        case BudgetExceeded():
            return Failed(failure_reason(failure), "budget_exceeded")
        case _:
            return Failed(failure_reason(failure), type(failure).__name__[:MAX_CATEGORY_CHARS])


def _together(group: BaseExceptionGroup) -> Outcome:
    """What failures at once mean, as of a task group: one that no retry can mend is none among others either."""
    each = [outcome_of_exception(one) for one in group.exceptions]
    categories = {one.category for one in each if isinstance(one, Failed)}
    if not categories:
        return Postponed(max(one.after_ms for one in each if isinstance(one, Postponed)))
    if "permanent" in categories:
        return Failed(failure_reason(group), "permanent")
    category = categories.pop() if len(categories) == 1 else type(group).__name__
    return Failed(failure_reason(group), category[:MAX_CATEGORY_CHARS])


LEASE_LOST_KINDS = ("stale_lease", "lease_expired", "lease_revoked", "execution_not_active", "execution_not_found")


def find_lease_loss(failure: BaseException, run_id: str) -> FabricError | None:
    """The refusal that says that this run is no longer the handler's own, if that is why it failed."""
    for one in _leaves(failure):
        cause: BaseException | None = one
        for _ in range(MAX_CAUSES):
            if isinstance(cause, FabricError) and cause.kind in LEASE_LOST_KINDS and cause.execution_id == run_id:
                return cause
            if cause is None:
                break
            cause = cause.__cause__ or cause.__context__
    return None


def is_definitive(refusal: FabricError) -> bool:
    """True if the store has judged an end; False if it could not be reached, or would not listen to this caller."""
    return not isinstance(refusal, StoreUnavailable | Unauthorized | ResourceExhausted | OperationTimeout)


def is_unstorable(refusal: FabricError) -> bool:
    """True if what an end brings can never be kept, such as a result that is too large."""
    return isinstance(refusal, ValidationError) and is_definitive(refusal)


async def report_outcome(engine: EngineAPI, handle: Handle, outcome: Outcome) -> None:
    """End the attempt with this word; a result that cannot be kept, being too large, is a failure."""
    try:
        await _told(engine, handle, outcome)
    except ValidationError as refused:
        if not is_unstorable(refused):
            raise
        await _told(engine, handle, Failed(failure_reason(refused), "permanent"))


async def _told(engine: EngineAPI, handle: Handle, outcome: Outcome) -> None:
    match outcome:
        case Succeeded(result=result):
            await engine.complete(handle, result=result, encoding="json")
        case Failed(reason=reason, category=category):
            await engine.fail(handle, reason=reason, category=category)
        case Postponed(after_ms=after_ms, reason=why):
            await engine.delay_for(handle, after_ms, reason=why)
        case NothingToReport():
            pass


def failure_reason(failure: BaseException) -> str:
    """The failure in a line, and where it happened: where the application called what failed, and where that did.

    Of several that were raised together the line names all, and each is told after it.
    """
    each = [*_leaves(failure)]
    line = _line(failure)
    if each != [failure]:
        line = f"{'; '.join(map(_line, each))} ({line})"
    told = [(line, failure), *((_line(one), one) for one in each if one is not failure)]
    text = "\n".join(f"{words}\n{_where(one)}".rstrip("\n") for words, one in told)
    return text.replace("\x00", "\\0").encode("utf-8", "backslashreplace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")


def _where(failure: BaseException) -> str:
    frames = [*traceback.extract_tb(failure.__traceback__)]
    theirs = [frame for frame in frames if not frame.filename.startswith(PACKAGE_PREFIX)] or frames
    return "".join(traceback.format_list(theirs if len(theirs) <= 3 else [theirs[0], *theirs[-2:]]))


def _line(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {_text(failure)}"


def _leaves(failure: BaseException) -> Iterator[BaseException]:
    """The failures in a group and in the groups within it; else the failure itself."""
    if not isinstance(failure, BaseExceptionGroup):
        yield failure
        return
    for one in failure.exceptions:
        yield from _leaves(one)


def application_traceback(failure: BaseException) -> TracebackType | None:
    """Its traceback from where it enters the application; the whole of it when it never does."""
    trace = failure.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE_PREFIX):
        trace = trace.tb_next
    return trace or failure.__traceback__


def is_encodable(failure: BaseException) -> bool:
    """Whether what it says can be written down as it is: half a character cannot."""
    try:
        for one in (failure, *_leaves(failure)):
            _text(one).encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(failure: BaseException) -> str:
    try:
        return str(failure)
    except Exception as fault:
        return f"(its text cannot be made: {type(fault).__name__})"
