"""Sample rows and changes for store tests; their meaning does not matter to a store."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import count
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from flowfabric.model.change import Change, Insert, RowTemplate, Write
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
from flowfabric.rules.execution import lease
from flowfabric.stores.claims import ClaimRequest, LeaseIds
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read

MAIL = QueueKey("mail")

_ids = count(1)


def execution(name: str = "a", **fields: Any) -> Execution[Draft]:
    """Return a row; its instants are relative to the commit."""
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


def queued(name: str, rank: Draft = 0, **fields: Any) -> Execution[Draft]:
    """Return a queued row that starts an attempt when it is claimed."""
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
    """Return a change with a unique id."""
    return Change(tuple(guards), writes, tuple(events), **({"id": next(_ids)} | bounds))


async def write(store: Store, *writes: Write, events: Iterable[Event] = ()) -> int:
    """Write without guards; return the id of the change."""
    made = change(*writes, events=events)
    assert await store.commit([made]) != [None]
    return made.id


async def insert_queued(store: Store, *rows: Execution[Draft]) -> None:
    """Insert rows with their payloads."""
    await write(store, *(Insert(row) for row in rows), *(Insert(payload(row.execution_id)) for row in rows))


async def one(store: Store, row: type[msgspec.Struct], *key: Any) -> Any:
    """Return the row with this key, or None."""
    found = (await store.load([Read(row, key)])).rows[0]
    assert len(found) <= 1
    return found[0] if found else None


def lease_ids(number: int, prefix: str = "") -> tuple[LeaseIds, ...]:
    """Return ids for this many leases."""
    return tuple(LeaseIds(f"{prefix}lease-{n}", f"{prefix}attempt-{n}", next(_ids)) for n in range(number))


CLAIM_PATCH: dict[str, Any] = {
    "lifecycle_phase": LifecyclePhase.ACTIVE,
    "ownership_state": OwnershipState.LEASED,
    "line": None,
    "next_type": None,
    "granted_until": None,
}


def claim_request(number: int = 10, *lines: QueueKey, prefix: str = "", ttl: int = 1000, **patch: Any) -> ClaimRequest:
    """Return a request for this many rows, by default from the one queue of these samples."""
    template = claim_template(**patch)
    return ClaimRequest(lines or (MAIL,), lease_ids(number, prefix), "worker", "worker-1", ttl, template)


def claim_template(**patch: Any) -> RowTemplate:
    """Return the template of a claim that gives these values to every row."""
    return _claim_template(tuple((CLAIM_PATCH | patch).items()))


@lru_cache
def _claim_template(patch: tuple[tuple[str, Any], ...]) -> RowTemplate:
    fields = {name: value for name, value in lease.CLAIM.fields.items() if name not in lease.CLAIMED_FIELDS}
    return RowTemplate(Execution, {**dict(patch), **fields}, lease.CLAIM.event)
