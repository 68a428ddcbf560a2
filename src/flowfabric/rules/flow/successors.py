"""Successors: the executions that wait for an execution, and what its completion writes for them.

The execution row names its applied outgoing edges if there are few; otherwise it says that there are many. So a
completion knows its edges without a load: applying an edge writes the row, and a completion decided on an older row
conflicts. With few edges, the completing change records the outcome on each. With many, it inserts a dispatch row,
which is handled in bounded steps (`fan_out`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Delete, Patch, Upsert, Write, outcome_of, seen
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.flow import CompletionDispatch, Dependency, DependencyKind, Edge
from flowfabric.model.instant import NOW
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.rules.decision import Decision

MAX_NAMED_SUCCESSORS = 128  # about a hundred bytes each
MANY = "many"


class Successor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One applied outgoing edge."""

    edge_id: str
    execution_id: str
    is_sole: bool = False  # the downstream had no other dependency when the edge was applied
    passes_result: bool = False  # the result becomes the downstream's input
    # The downstream's ready queue once released; () if unknown.
    queue: tuple[str | int | bool, ...] = ()


_decode = msgspec.json.Decoder(list[Successor]).decode
_encode = msgspec.json.Encoder().encode


def successor(
    edge_id: str,
    execution_id: str,
    kind: DependencyKind,
    *,
    inbound: int,
    ref: str | None,
    queue: QueueKey | None,
) -> Successor:
    """Return an applied edge as its upstream stores it; `inbound` is the number of edges into the downstream."""
    is_sole = inbound == 1 and kind is not DependencyKind.FAILURE_ONLY
    return Successor(edge_id, execution_id, is_sole, bool(ref), _encode_queue(queue) if is_sole and queue else ())


def encode_only_successor(edge: Dependency, inbound: int) -> str:
    """Encode a row's successors if this edge is the only one; `inbound` is the number of edges into its downstream."""
    kind, ref = edge.dependency_kind, edge.data_passing_ref
    return encode_successors(
        [successor(edge.edge_id, edge.downstream_execution_id, kind, inbound=inbound, ref=ref, queue=None)]
    )


def _encode_queue(key: QueueKey) -> tuple[str | int | bool, ...]:
    """Return the values of a queue key without trailing defaults."""
    values = msgspec.structs.astuple(key)
    while values[-1] == _DEFAULT_QUEUE[len(values) - 1]:
        values = values[:-1]
    return values


_DEFAULT_QUEUE = msgspec.structs.astuple(QueueKey(""))


def named_successors(row: Execution) -> list[Successor]:
    """Return the successors that the row names; none if there are none or too many. Raises `Corruption`."""
    try:
        return [] if row.successors is None or row.successors == MANY else _decode(row.successors)
    except msgspec.DecodeError as fault:
        raise errors.Corruption(f"exec_core: successors: {fault}") from fault


def has_many(row: Execution | None) -> bool:
    """True if there are too many successors for the row to name them."""
    return row is not None and row.successors == MANY


def with_successors(row: Execution, more: list[Successor]) -> str:
    """Encode the row's successors after these edges were applied as well."""
    return MANY if row.successors == MANY else encode_successors(named_successors(row) + more)


def encode_successors(successors: list[Successor]) -> str:
    """Encode exactly these successors."""
    return MANY if len(successors) > MAX_NAMED_SUCCESSORS else _encode(successors).decode()


def outcome_writes(row: Execution, outcome: TerminalOutcome) -> tuple[Write, ...]:
    """Return what the completion of this execution writes for its successors."""
    if row.successors is None:
        return ()
    if row.successors == MANY:
        return (Upsert(CompletionDispatch(row.execution_id, row.flow_id or "", outcome, NOW)),)
    return tuple(record_outcome(edge.execution_id, edge.edge_id, outcome) for edge in named_successors(row))


@lru_cache(maxsize=1024)
def decode_queue(values: tuple[Any, ...]) -> QueueKey:
    """Return the queue that a successor names."""
    return QueueKey(*values)


def record_outcome(downstream: str, edge_id: str, outcome: TerminalOutcome) -> Patch:
    """Return the patch that records an upstream's outcome on a dependency, unless an outcome was counted.

    An outcome that was not counted before the upstream was replayed is overwritten.
    """
    fields = {"outcome": outcome, "unfolded_at": NOW}
    return Patch(Dependency, (downstream, edge_id), fields, unless_set="last_resolved_at")


def retraction_writes(row: Execution) -> tuple[Write, ...]:
    """Return what a replay of this execution retracts: recorded outcomes that were not counted yet.

    With many edges, `retract_outcomes` has retracted them before, in changes of its own.
    """
    if row.successors == MANY:
        return (Delete(CompletionDispatch, (row.execution_id,)),)
    return tuple(clear_outcome(edge.execution_id, edge.edge_id) for edge in named_successors(row))


def clear_outcome(downstream: str, edge_id: str) -> Patch:
    """Return the patch that retracts an outcome that was not counted; a concurrent count then conflicts."""
    fields = {"outcome": None, "unfolded_at": None}
    return Patch(Dependency, (downstream, edge_id), fields, unless_set="last_resolved_at")


def retract_outcomes(row: Execution | None, edges: Sequence[Edge], revision: int | None) -> Decision[int | None]:
    """Retract the outcome from some of many edges before the execution is replayed.

    Answers the revision that this was decided on; None if there is nothing to do or the execution no longer has the
    `revision` of earlier steps. The execution stays terminal: if no replay follows, the reconciler finds its outcome
    again. The first step deletes the dispatch row, so that nobody records the outcome again.
    """
    if row is None or row.successors != MANY or row.lifecycle_phase is not LifecyclePhase.TERMINAL:
        return Decision(None)
    if revision is not None and row.revision != revision:
        return Decision(None)
    writes: tuple[Write, ...] = (Delete(CompletionDispatch, (row.execution_id,)),)
    writes += tuple(clear_outcome(edge.downstream_execution_id, edge.edge_id) for edge in edges)
    return Decision(row.revision, Change(guards=(seen(row),), writes=writes))


def succeeded_upstream(change: Change, row: msgspec.Struct | None) -> Execution | None:
    """Return the row if the change completes it with success and other executions depend on it."""
    if type(row) is not Execution or row.successors is None or outcome_of(change) != TerminalOutcome.SUCCESS:
        return None
    return row if change.guards[0].key == (row.execution_id,) else None
