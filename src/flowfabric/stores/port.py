"""The store port: what the engine needs of a place that keeps rows.

A store answers yes or no to a change and never says why: after a no the engine loads again and asks the rule again.
It owns the clock: every verb reads the store's time once and judges and stamps everything with that one reading.

What each verb promises when the process dies or an answer is lost:

* `load`, `due`, `scan`, `feed` write nothing.
* `commit`: each change is written whole or not at all, on its own merits: a change whose guards fail does not disturb
  its neighbours. An error means that nothing was written (`StoreUnavailable.in_doubt` False, `Unstorable`) or that
  nobody knows (`in_doubt` True): then a root that shows the change's id as its revision tells that it was applied.
* `take`: like a commit; the rows carry the lease ids of the stamps, so that a lost answer can be found by them.
* `renew`: may be repeated at will.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from flowfabric.clock import Clock
from flowfabric.handles import BackendTag
from flowfabric.model.change import Change
from flowfabric.model.deployment import SnapshotHolder
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import QueueKey
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseRef
from flowfabric.stores.queries import Due, FeedPage, GroupedCount, Loaded, Read, Scan, Where


class Unstorable(Exception):
    """The store refused a value; nothing of this batch was written, and one of its changes is at fault."""


class Collision(Unstorable):
    """A row that a change wanted to insert appeared meanwhile; nothing of this batch was written."""


class SchemaVersion(msgspec.Struct, frozen=True, gc=False):
    """The version of the schema that an opened store was found with, and the one that it has now; 0 is none."""

    found: int
    current: int
    compatible: bool = True  # False if a migration was applied beside which the release before cannot run


class TransactionView(Protocol):
    """A store as seen from inside a caller's own transaction: what is written is kept or lost with that."""

    async def load(self, wants: Sequence[Read]) -> Loaded:
        """The rows asked for, and the time."""
        ...

    async def commit(self, change: Change) -> int | None:
        """The time when all guards held and all was written, None when nothing was."""
        ...

    async def notify(self, topics: frozenset[str]) -> None:
        """Tell all processes to look at these topics when the transaction commits."""
        ...


@runtime_checkable
class SupportsSnapshotHolders(Protocol):
    """A store whose server knows who holds old snapshots."""

    async def snapshot_holders(self, limit: int) -> list[SnapshotHolder]:
        """The holders, the oldest first."""
        ...


@runtime_checkable
class SupportsCallerTransaction(Protocol):
    """A store that lives in a database where callers have transactions of their own."""

    async def join_transaction(self, connection: Any) -> TransactionView:
        """Join the transaction of this connection."""
        ...


class Store(Protocol):
    """A place that keeps rows. All verbs are safe to call from many tasks at once."""

    tag: BackendTag
    concurrent_commits: int  # how many commits are worth having under way at once
    batch_limit: int  # how many changes are worth putting into one commit
    clock: Clock | None  # the store's own, where it can be read without asking the store
    executes_in_order: (
        bool  # whether a take that is called after a commit sees what that writes, before it has answered
    )

    async def open(self, *, migrate: bool) -> SchemaVersion:
        """Connect; apply the missing migrations when asked to; refuse a schema newer than this code."""
        ...

    async def close(self) -> None:
        """Let go of everything; a second call does nothing."""
        ...

    async def ping(self) -> int:
        """The store's time; raises StoreUnavailable when it cannot be reached."""
        ...

    async def load(self, wants: Sequence[Read]) -> Loaded:
        """The rows asked for, and the time."""
        ...

    def try_load_now(self, wants: Sequence[Read]) -> Loaded | None:
        """The same if it can be had in less time than it takes to wait for it; else None, whatever the reason."""
        ...

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        """Per change: the commit's time when all its guards held and all was written, None when nothing was.

        No two changes of one call guard or write the same root, but that one may delete all roots that begin like a
        key and another one write one of those. When something was written, other processes are told
        to look at the topics of `hint`, as by `notify`: with the commit or right after it, as suits the store.
        """
        ...

    async def commit_and_claim(
        self, changes: Sequence[Change], hint: frozenset[str], take: ClaimRequest
    ) -> CommitAndClaimResult:
        """Commit, and take right after it, as far as that costs no further trip.

        The rows are the first that the take would find then, perhaps fewer than there are, perhaps none. A store that
        keeps the order hands nothing over: there a take that follows needs no trip of its own.
        """
        ...

    async def claim_rows(self, take: ClaimRequest) -> ClaimedRows:
        """Claim up to one row per stamp from the heads of the lines, best rank first (then execution id).

        Passes over rows with a grant in force. Adds one `acquired` event a row.
        """
        ...

    async def renew(self, leases: Sequence[LeaseRef]) -> list[int | None]:
        """Per lease: its new end when it is in force, not marked as expired, and everything matches; else None.

        Adds `renewed` events.
        """
        ...

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        """Rows whose `column` is an instant that has come."""
        ...

    async def scan(self, scan: Scan) -> list[Any]:
        """The rows of a list."""
        ...

    async def count_grouped(self, tally: GroupedCount) -> dict[tuple[Any, ...], int]:
        """How many rows there are, by the values of the columns asked for."""
        ...

    async def queues(self, lane_id: str | None = None) -> list[QueueKey]:
        """The lines that were ever written to, of one lane or of all."""
        ...

    async def nonempty_queues(self, lane_id: str) -> list[QueueKey]:
        """The lines of a lane in which something stands, in order; however many there ever were."""
        ...

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        """The executions whose ready queue is missing from the store's list of queues, by id: no claim finds them."""
        ...

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        """The lanes that were ever written to, ascending."""
        ...

    async def feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        """Committed events of a topic strictly after a position, in an order that never changes afterwards.

        Positions never restart: a store that lost its newest events gives later ones higher positions than those had.
        """
        ...

    async def feed_end(self) -> int:
        """The position such that everything committed from now on lies strictly after it."""
        ...

    async def trim_feed(self, before: int, limit: int) -> int:
        """Drop the oldest events that were told before an instant, about `limit` of them; how many went."""
        ...

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str = "") -> list[FeedEvent]:
        """The newest events of one execution, oldest first; those that the topic calls `without` do not count."""
        ...

    def notify(self, topics: frozenset[str]) -> None:
        """Tell other processes to look at these topics now. A lost hint costs them at most a poll interval."""
        ...

    def limit_commands(self, command_s: float) -> None:
        """Take no longer than this for one statement from now on, where the store is a server that may go silent."""
        ...

    def on_notify(self, callback: Callable[[frozenset[str]], None]) -> None:
        """Call back, on the event loop, when another process may have changed something."""
        ...
