"""Rows and changes to try a store with; what they mean is no business of a store, so they mean nothing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import count
from typing import Any

import msgspec

from flowfabric.model.change import Change, Insert, RowTemplate, Write, from_now
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution, Payload, QueueKey
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
from flowfabric.rules.execution import lease
from flowfabric.stores.claims import ClaimRequest, LeaseIds
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read

MAIL = QueueKey("mail")

_ids = count(1)


def execution(name: str = "a", **fields: Any) -> Execution:
    """A row that may wait in a line; instants count from the commit."""
    row = Execution(
        execution_id=name,
        partition=7,
        namespace="default",
        lane_id="mail",
        priority=0,
        created_at=from_now(0),
        last_transition_at=from_now(0),
        last_mutation_at=from_now(0),
        lifecycle_phase=LifecyclePhase.RUNNABLE,
        ownership_state=OwnershipState.UNOWNED,
        eligibility_state=EligibilityState.ELIGIBLE_NOW,
        blocking_reason=BlockingReason.WAITING_FOR_WORKER,
        terminal_outcome=TerminalOutcome.NONE,
        attempt_state=AttemptState.PENDING_FIRST_ATTEMPT,
        public_state=PublicState.WAITING,
    )
    return msgspec.structs.replace(row, **fields)


def waiting(name: str, rank: int = 0, **fields: Any) -> Execution:
    """A row that stands in a line and begins an attempt when it is taken."""
    return execution(name, **({"line": MAIL, "rank": rank, "next_type": AttemptType.INITIAL} | fields))


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


async def line_up(store: Store, *rows: Execution) -> None:
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
    template = claim_template(**becomes)
    return ClaimRequest(lines or (MAIL,), stamps(number, prefix), "worker", "worker-1", ttl, template)


def claim_template(**becomes: Any) -> RowTemplate:
    """The template of a claim that gives these values to every row."""
    return _claim_template(tuple((BECOMES | becomes).items()))


@lru_cache
def _claim_template(becomes: tuple[tuple[str, Any], ...]) -> RowTemplate:
    fields = {name: value for name, value in lease.CLAIM.fields.items() if name not in lease.CLAIMED_FIELDS}
    return RowTemplate(Execution, {**dict(becomes), **fields}, lease.CLAIM.event)
