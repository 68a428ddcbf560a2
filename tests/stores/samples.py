"""Rows and changes to try a store with; what they mean is no business of a store, so they mean nothing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from flowfabric.model.change import Change, Insert, Write
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.model.instant import NOW, Draft, FromNow
from flowfabric.model.states import (
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.stores.claims import ClaimRequest, LeaseIds
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read

MAIL = QueueKey("mail")

_ids = count(1)


def execution(name: str = "a", **fields: Any) -> Execution[Draft]:
    """A row that may wait in a line; instants count from the commit."""
    row: Execution[Draft] = Execution(
        execution_id=name,
        partition=7,
        namespace="default",
        lane_id="mail",
        priority=0,
        created_at=NOW,
        last_transition_at=NOW,
        last_mutation_at=NOW,
        lifecycle_phase=LifecyclePhase.RUNNABLE,
        ownership_state=OwnershipState.UNOWNED,
        eligibility_state=EligibilityState.ELIGIBLE_NOW,
        blocking_reason=BlockingReason.WAITING_FOR_WORKER,
        terminal_outcome=TerminalOutcome.NONE,
        attempt_state=AttemptState.PENDING_FIRST_ATTEMPT,
        public_state=PublicState.WAITING,
    )
    return replace(row, **fields)


def waiting(name: str, rank: Draft = 0, **fields: Any) -> Execution[Draft]:
    """A row that stands in a line and begins an attempt when it is taken."""
    return execution(name, **({"line": MAIL, "rank": rank, "next_type": AttemptType.INITIAL} | fields))


def loaded(row: Execution[Draft]) -> Execution:
    """The row as a store returns it that has committed it at 0."""
    now = {name: value.offset for name, value in asdict(row).items() if isinstance(value, FromNow)}
    return Execution(**asdict(row) | now)


def payload(name: str, content: bytes | None = b"{}") -> Payload:
    return Payload(name, "task", "someone", content, "json")


def event(name: str = "a", **fields: Any) -> Event:
    return Event(name, "default", **fields)


def change(*writes: Write, guards: Iterable[Any] = (), events: Iterable[Event] = (), **bounds: Any) -> Change:
    """A change with an id that no other has."""
    return Change(tuple(guards), writes, tuple(events), **({"id": next(_ids)} | bounds))


async def write(store: Store, *writes: Write, events: Iterable[Event] = ()) -> int:
    """Write without asking; the id of the change."""
    made = change(*writes, events=events)
    assert await store.commit([made]) != [None]
    return made.id


async def line_up(store: Store, *rows: Execution[Draft]) -> None:
    """Put rows with their payloads."""
    await write(store, *(Insert(row) for row in rows), *(Insert(payload(row.execution_id)) for row in rows))


async def one(store: Store, row: type[msgspec.Struct], *key: Any) -> Any:
    """The row with this key, or None."""
    found = (await store.load([Read(row, key)])).rows[0]
    assert len(found) <= 1
    return found[0] if found else None


def stamps(number: int, prefix: str = "") -> tuple[LeaseIds, ...]:
    """Identities for so many rows."""
    return tuple(LeaseIds(f"{prefix}lease-{n}", f"{prefix}attempt-{n}", next(_ids)) for n in range(number))


BECOMES: dict[str, Any] = {
    "lifecycle_phase": LifecyclePhase.ACTIVE,
    "ownership_state": OwnershipState.LEASED,
    "line": None,
    "next_type": None,
    "granted_until": None,
}


def a_take(number: int = 10, *lines: QueueKey, prefix: str = "", ttl: int = 1000, **becomes: Any) -> ClaimRequest:
    """A claim of so many rows, by default from the one line of these samples."""
    return ClaimRequest(lines or (MAIL,), stamps(number, prefix), "worker", "worker-1", ttl, BECOMES | becomes)
