"""How a child ended without a result: recorded when the function moves past it, like the failure of a step.

So it stays as it was for the function, also if the child is replayed meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from flowfabric.model.failure import StoredFailure, read_failure
from flowfabric.sdk.durable.branches import current_branch
from flowfabric.sdk.durable.ledger import ENDED
from flowfabric.sdk.exceptions import RunCancelled, RunEnded, RunExpired, RunFailed, RunSkipped
from flowfabric.sdk.run import Run
from flowfabric.sdk.serialization.failures import encode_failure, make_exception

if TYPE_CHECKING:
    from flowfabric.sdk.durable.attempt import DurableAttempt

T = TypeVar("T")

_KINDS: dict[str, type[RunEnded]] = {one.__name__: one for one in (RunFailed, RunCancelled, RunExpired, RunSkipped)}


class EndedChild(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a child ended without a result, as its parent remembers it."""

    kind: str
    reason: str
    attempt: int | None = None
    failure: StoredFailure | None = None


async def read_child(durable: DurableAttempt, gate: str, run: Run[T]) -> T:
    """Return the result of a child whose gate has closed, or raise how it ended, for good once that is moved past."""
    place = (f"{ENDED}{gate}", 0)
    if (memo := durable.ledger.ends.get(place)) is not None:
        ended = _make_ended(run, msgspec.json.decode(memo.result, type=EndedChild))
        durable.note_raised(ended, place)
        raise ended
    try:
        return await Run.result(run)  # not ChildRun.result: its gate has closed
    except RunEnded as ended:
        durable.note_ended(current_branch(durable.branches), place, msgspec.json.encode(_describe_ended(ended)))
        durable.note_raised(ended, place)
        raise


def _describe_ended(ended: RunEnded) -> EndedChild:
    failure = None
    if isinstance(ended, RunFailed) and ended.type:
        failure = StoredFailure(ended.type, ended.text, ended.category)
        if ended.__cause__ is not None:
            failure = read_failure(encode_failure(ended.__cause__, ended.category))
    return EndedChild(type(ended).__name__, ended.reason, ended.attempt, failure)


def _make_ended(run: Run[Any], end: EndedChild) -> RunEnded:
    if end.kind != RunFailed.__name__:
        return _KINDS[end.kind](run.id, run.task, end.reason, end.attempt)
    failed = RunFailed(run.id, run.task, end.reason, end.attempt, failure=end.failure)
    failed.__cause__ = None if end.failure is None else make_exception(end.failure)
    return failed
