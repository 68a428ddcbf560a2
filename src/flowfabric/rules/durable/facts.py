"""Facts: values that a run shows by name. The last value is kept, and no earlier one ever replaces it.

A replay reaches every `set` again. Each branch of a function counts how often it has set a fact, and the count is
stored with the value: a set that was counted before is skipped, however late its request arrives. The number of a fact
counts all its sets and never falls, so that a reader knows whether it has seen a value.
"""

from __future__ import annotations

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Guard, Upsert, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import Fact, StepMemo, StepState, step_row_name
from flowfabric.model.instant import NOW
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable.steps import mark_has_steps
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence

MAX_FACT_BYTES = 65_536


class FactArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A set of a fact: the place in the function that sets it, and how often it was set there, this time included."""

    name: str
    value: bytes
    encoding: str | None = None
    place: str
    count: int
    number: int | None = None  # its place in the order of the run's operations

    @property
    def memo_name(self) -> str:
        """The name of the memo that counts the sets at this place."""
        return step_row_name(self.place, StepState.FACT)


def set_fact(
    row: Execution | None, fact: Fact | None, counted: StepMemo | None, args: FactArgs, fence: Fence, now: int
) -> Decision[Fact]:
    """Set a fact as the holder of the lease; one that was counted before changes nothing."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_lease(row, fence, now):
        return refused
    if fact is not None and counted is not None and sets_of(counted) >= args.count:
        return Decision(fact)
    new = Fact(row.execution_id, args.name, 1 if fact is None else fact.number + 1, NOW, args.value, args.encoding)
    memo = StepMemo(
        execution_id=row.execution_id,
        name=args.memo_name,
        occurrence=0,
        attempt_index=row.attempt_index or 0,
        recorded_at=NOW,
        result=str(args.count).encode(),
        encoding="json",
        number=args.number,
    )
    guard = Guard(Fact, (row.execution_id, args.name), None if fact is None else fact.revision)
    change = Change(guards=(seen(row, live(row)), guard), writes=(Upsert(new), Upsert(memo), *mark_has_steps(row)))
    return Decision(lambda now: Fact(new.execution_id, new.name, new.number, now, new.value, new.encoding), change)


def sets_of(counted: StepMemo) -> int:
    """Return how often a fact has been set at the place of this memo."""
    return msgspec.json.decode(counted.result, type=int)
