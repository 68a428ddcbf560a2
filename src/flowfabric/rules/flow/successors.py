"""Successors: who waits for the end of an execution, and what that end leaves behind for them.

The sheet of an execution names its applied outgoing edges when there are few, and otherwise says that there are many.
So an end knows its edges without asking: applying one writes the sheet, and an end decided on an older sheet is
refused. Few edges are settled in the change that ends the execution. Many are left to a dispatch row, which is worked
off in bounded steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.change import NOW, Change, Delete, Patch, Upsert, Write, from_now, seen
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.flow import CompletionDispatch, Dependency, DependencyKind, Edge
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.rules.decision import Decision

MAX_NAMED_SUCCESSORS = 128  # edges that are named on the sheet, with about a hundred bytes each
MANY = "many"


class Successor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One applied outgoing edge."""

    edge_id: str
    execution_id: str
    is_sole: bool = False  # when the edge was applied it waited for this success only
    passes_result: bool = False  # the result becomes its input
    # Where it will stand when it waits for nothing else; () when that is not known.
    queue: tuple[str | int | bool, ...] = ()


_read = msgspec.json.Decoder(list[Successor]).decode
_write = msgspec.json.Encoder().encode


def successor(
    edge_id: str,
    execution_id: str,
    kind: DependencyKind,
    *,
    inbound: int,
    ref: str | None,
    queue: QueueKey | None,
) -> Successor:
    """An applied edge as its upstream names it; `inbound` counts the edges that lead to the downstream."""
    alone = inbound == 1 and kind is not DependencyKind.FAILURE_ONLY
    return Successor(edge_id, execution_id, alone, bool(ref), _encode_queue(queue) if alone and queue else ())


def encode_only_successor(edge: Dependency, inbound: int) -> str:
    """The field of a sheet with this applied edge and no other; `inbound` counts the edges to its downstream."""
    kind, ref = edge.dependency_kind, edge.data_passing_ref
    return encode_successors(
        [successor(edge.edge_id, edge.downstream_execution_id, kind, inbound=inbound, ref=ref, queue=None)]
    )


def _encode_queue(line: QueueKey) -> tuple[str | int | bool, ...]:
    """A line as its values, without those at the end that most lines have."""
    values = msgspec.structs.astuple(line)
    while values[-1] == _USUAL[len(values) - 1]:
        values = values[:-1]
    return values


_USUAL = msgspec.structs.astuple(QueueKey(""))


def named_successors(row: Execution) -> list[Successor]:
    """The successors that the sheet names; none when there are none, or too many. `Corruption` for no successors."""
    try:
        return [] if row.successors is None or row.successors == MANY else _read(row.successors)
    except msgspec.DecodeError as fault:
        raise errors.Corruption(f"exec_core: successors: {fault}") from fault


def has_many(row: Execution | None) -> bool:
    """Whether there are too many successors for the sheet to name them."""
    return row is not None and row.successors == MANY


def with_successors(row: Execution, more: list[Successor]) -> str:
    """The field of the sheet when these edges have been applied as well."""
    return MANY if row.successors == MANY else encode_successors(named_successors(row) + more)


def encode_successors(successors: list[Successor]) -> str:
    """The field of a sheet with exactly these successors."""
    return MANY if len(successors) > MAX_NAMED_SUCCESSORS else _write(successors).decode()


def outcome_writes(row: Execution, outcome: TerminalOutcome) -> tuple[Write, ...]:
    """What the end of this execution writes for those who wait for it."""
    if row.successors is None:
        return ()
    if row.successors == MANY:
        return (Upsert(CompletionDispatch(row.execution_id, row.flow_id or "", outcome, from_now(0))),)
    return tuple(record_outcome(one.execution_id, one.edge_id, outcome) for one in named_successors(row))


@lru_cache(maxsize=1024)
def decode_queue(values: tuple[Any, ...]) -> QueueKey:
    """The line that a successor names."""
    return QueueKey(*values)


def record_outcome(downstream: str, edge_id: str, outcome: TerminalOutcome) -> Patch:
    """Note on a dependency how its upstream ended; the first end that is counted counts.

    One that nobody had counted when the upstream was given another life is no end any more, and is written over.
    """
    fields = {"outcome": outcome, "unfolded_at": NOW}
    return Patch(Dependency, (downstream, edge_id), fields, unless_set="last_resolved_at")


def retraction_writes(row: Execution) -> tuple[Write, ...]:
    """What another life of this execution takes back of what its end left: notes that nobody has counted yet.

    Of many edges the notes were taken back before (`take_back`), in changes of their own.
    """
    if row.successors == MANY:
        return (Delete(CompletionDispatch, (row.execution_id,)),)
    return tuple(clear_outcome(one.execution_id, one.edge_id) for one in named_successors(row))


def clear_outcome(downstream: str, edge_id: str) -> Patch:
    """Take back the note of an end that nobody has counted; whoever is about to count it is refused."""
    fields = {"outcome": None, "unfolded_at": None}
    return Patch(Dependency, (downstream, edge_id), fields, unless_set="last_resolved_at")


def retract_outcomes(row: Execution | None, edges: Sequence[Edge], revision: int | None) -> Decision[int | None]:
    """Take back what the end of an execution with many edges left on some of them, before it is given another life.

    The answer is the revision of the execution that this was decided on; None if there is nothing to do, or if the
    execution is no longer of the `revision` that earlier steps saw. It stays as it is, and ended: if nothing follows,
    the reconciler finds its end again. The dispatch row goes with the first step, so that nobody notes the end anew.
    """
    if row is None or row.successors != MANY or row.lifecycle_phase is not LifecyclePhase.TERMINAL:
        return Decision(None)
    if revision is not None and row.revision != revision:
        return Decision(None)
    writes: tuple[Write, ...] = (Delete(CompletionDispatch, (row.execution_id,)),)
    writes += tuple(clear_outcome(edge.downstream_execution_id, edge.edge_id) for edge in edges)
    return Decision(row.revision, Change(guards=(seen(row),), writes=writes))
