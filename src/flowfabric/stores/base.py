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

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from flowfabric.clock import Clock
from flowfabric.errors import Corruption
from flowfabric.handles import BackendTag
from flowfabric.model.deployment import SnapshotHolder
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Execution, LineKey, Payload
from flowfabric.rules.change import Change
from flowfabric.stores.rows import TABLE


class Unstorable(Exception):
    """The store refused a value; nothing of this batch was written, and one of its changes is at fault."""


class Collision(Unstorable):
    """A row that a change wanted to insert appeared meanwhile; nothing of this batch was written."""


class Schema(msgspec.Struct, frozen=True, gc=False):
    """The version of the schema that an opened store was found with, and the one that it has now; 0 is none."""

    found: int
    known: int
    compatible: bool = True  # False if a migration was applied beside which the release before cannot run


class Want(msgspec.Struct, frozen=True, gc=False):
    """Rows to load: those whose key begins like this, in key order."""

    row: type[msgspec.Struct]
    key: tuple[Any, ...]


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """The rows of each want, and the store's time."""

    now: int
    rows: list[list[Any]]


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """The identities that the n-th taken row gets."""

    lease_id: str
    attempt_id: str
    revision: int


class Take(msgspec.Struct, frozen=True, gc=False):
    """A uniform claim of the first rows of some lines: the batched form of `rules.lease.acquire`.

    `becomes` are the fields that every taken row gets alike, decided by that rule. The rest is the arithmetic of any
    claim, for the n-th row with the n-th stamp and the store's `now`:

    * lease: `lease_id`, `worker_id`, `worker_instance_id` as given, `lease_epoch` + 1,
      `lease_acquired_at` = `lease_renewed_at` = now, `lease_expires_at` = now + ttl, `current_lane` = `lane_id`;
    * a row with a `next_type` begins an attempt: `attempt_id` of the stamp, `attempt_type` = `next_type`,
      `attempt_index` = `total_attempt_count`, which then grows by 1, `attempt_started_at` = now,
      `attempt_resumed_at` unset; one without continues its attempt: only `attempt_resumed_at` = now;
    * `started_at` = now unless set; `attempt_timeout_at` = now + `next_timeout_ms`, unset without one;
    * `last_transition_at` = `last_mutation_at` = now; `revision` of the stamp.

    Each row adds an event: lease `acquired`, the new lease and attempt, `reason` = `claim_resumed` when it continues.
    """

    lines: tuple[LineKey, ...]
    stamps: tuple[Stamp, ...]
    worker_id: str
    worker_instance_id: str
    lease_ttl_ms: int
    becomes: dict[str, Any]

    def fields(self, row: Execution, stamp: Stamp, now: int) -> dict[str, Any]:
        """What the claim makes of this row: the arithmetic above, for stores that have no native telling of it."""
        fields = {
            **self.becomes,
            "lease_id": stamp.lease_id,
            "worker_id": self.worker_id,
            "worker_instance_id": self.worker_instance_id,
            "lease_epoch": row.lease_epoch + 1,
            "lease_acquired_at": now,
            "lease_renewed_at": now,
            "lease_expires_at": now + self.lease_ttl_ms,
            "current_lane": row.lane_id,
            "attempt_timeout_at": None if row.next_timeout_ms is None else now + row.next_timeout_ms,
            "last_transition_at": now,
            "last_mutation_at": now,
            "revision": stamp.revision,
        }
        if row.next_type is None:
            fields["attempt_resumed_at"] = now
        else:
            fields["attempt_id"] = stamp.attempt_id
            fields["attempt_type"] = row.next_type
            fields["attempt_index"] = row.total_attempt_count
            fields["total_attempt_count"] = row.total_attempt_count + 1
            fields["attempt_started_at"] = now
            fields["attempt_resumed_at"] = None
        if row.started_at is None:
            fields["started_at"] = now
        return fields


class Taken(msgspec.Struct, frozen=True, gc=False):
    """The rows as they are now, in rank order, each with its payload."""

    now: int
    rows: list[tuple[Execution, Payload]]


class Handed(msgspec.Struct, frozen=True, gc=False):
    """What a commit that hands over came to: its verdicts, and the rows that were claimed, as a take has them.

    `emptied` says that a take right after it would find nothing more.
    """

    verdicts: list[int | None]
    rows: list[tuple[Execution, Payload]]
    emptied: bool = False


class Held(msgspec.Struct, frozen=True, gc=False):
    """A lease to renew."""

    execution_id: str
    attempt_index: int
    attempt_id: str
    lease_id: str
    lease_epoch: int
    lease_ttl_ms: int


class Due(msgspec.Struct, frozen=True, gc=False):
    """Rows whose instant has come, earliest first, and the next instant to come (None: there is none)."""

    now: int
    rows: list[Any]
    next_at: int | None


Op = Literal["=", "<", "<=", ">", ">=", "in", "set", "unset", "starts"]


class Where(msgspec.Struct, frozen=True, gc=False):
    """One condition on one column; `set` and `unset` ask for a value and for none."""

    column: str
    op: Op
    value: Any = None


def after_prefix(prefix: str) -> str | None:
    """The first text after all that begin like this; None when there is none."""
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return None
    last = ord(kept[-1]) + 1
    return kept[:-1] + chr(0xE000 if last == 0xD800 else last)  # the half characters between are no text


class Scan(msgspec.Struct, frozen=True):
    """A list: rows of one table that meet all conditions, ordered, strictly after a place.

    `each` names a column that an `in` condition gives values for, or a `starts` condition several prefixes (none
    of them empty): the limit then holds for each of these, so that the first rows of many lines or ranges come in one
    trip. With `values`, a `starts` condition with one prefix stands for the values of an indexed text column that begin
    with it, in order and at most so many: the limit holds for each value. A `>` condition on that column skips values.

    A row that cannot be read fails the list with `Corruption`, unless it is `tolerant`: then an `Unreadable` stands in
    its place.

    A `partial` list of the first rows of some queues may leave out rows where it would cost too much to find them. A
    later list finds them: Postgres says when (its `dead_entries.py`), and the other stores leave out nothing.
    """

    row: type[msgspec.Struct]
    where: tuple[Where, ...] = ()
    order: tuple[str, ...] = ()
    after: tuple[Any, ...] | None = None
    limit: int = 100
    each: str | None = None
    tolerant: bool = False
    values: int | None = None
    partial: bool = False

    @property
    def full_order(self) -> tuple[str, ...]:
        """The columns that the rows are ordered by, the key included."""
        return self.order + tuple(name for name in TABLE[self.row].key if name not in self.order)

    def of_each(self) -> list[Scan]:
        """The same as one list for each value, for stores that read them one after the other."""
        named = self.named
        op: Op = "=" if named.op == "in" else "starts"
        return [
            msgspec.structs.replace(self, where=(Where(named.column, op, value), *self.beside_each), each=None)
            for value in dict.fromkeys(named.value)
        ]

    def of_values(self, values: Iterable[str]) -> Scan:
        """The same list for these values, which were found in the index."""
        where = (Where(self.named.column, "in", tuple(values)), *self.beside_each)
        return msgspec.structs.replace(self, where=where, values=None)

    @property
    def beside_each(self) -> tuple[Where, ...]:
        """The conditions that every row has to meet, whichever value it is listed for."""
        if self.values is not None:
            return tuple(one for one in self.where if one.column != self.each)
        return tuple(one for one in self.where if one is not self.named)

    @property
    def skipped_to(self) -> str | None:
        """The value behind which the values of the `each` column begin; None for the first."""
        return next((one.value for one in self.where if one.column == self.each and one.op == ">"), None)

    @property
    def named(self) -> Where:
        """The condition that `each` is about."""
        return next(one for one in self.where if one.column == self.each and one.op in ("in", "starts"))


class Unreadable(msgspec.Struct, frozen=True):
    """A row of a tolerant list that cannot be read: its place in the order of the list, and what is wrong with it."""

    place: tuple[Any, ...]
    fault: Corruption


class Tally(msgspec.Struct, frozen=True):
    """A count: rows that are set in an indexed column, by some columns of the execution that each belongs to.

    `execution` names the column that says which execution that is. The rows are looked at by the index, no more than
    `limit` of them, or of each value in `each` when there are such.
    """

    row: type[msgspec.Struct]
    column: str
    by: tuple[str, ...]
    limit: int
    execution: str = "execution_id"
    each: tuple[Any, ...] | None = None


class FeedPage(msgspec.Struct, frozen=True, gc=False):
    """Events in order, and how far the feed was read: the place to go on from, events or not.

    `lost` says that events of this topic after the place that was asked for are no longer kept. `diverged` says that
    the place itself is not in this feed: what was read up to it was lost, as by a failover or a restore. The page goes
    on with everything that came after the loss, and `position` may lie before the place that was asked for.
    """

    events: list[FeedEvent]
    position: int
    lost: bool = False
    diverged: bool = False


class Inside(Protocol):
    """A store as seen from inside a caller's own transaction: what is written is kept or lost with that."""

    async def load(self, wants: Sequence[Want]) -> Loaded:
        """The rows asked for, and the time."""
        ...

    async def commit(self, change: Change) -> int | None:
        """The time when all guards held and all was written, None when nothing was."""
        ...

    async def notify(self, topics: frozenset[str]) -> None:
        """Tell all processes to look at these topics when the transaction commits."""
        ...


@runtime_checkable
class NamesSnapshotHolders(Protocol):
    """A store whose server knows who holds old snapshots."""

    async def snapshot_holders(self, limit: int) -> list[SnapshotHolder]:
        """The holders, the oldest first."""
        ...


@runtime_checkable
class Joins(Protocol):
    """A store that lives in a database where callers have transactions of their own."""

    async def within(self, connection: Any) -> Inside:
        """Join the transaction of this connection."""
        ...


class Store(Protocol):
    """A place that keeps rows. All verbs are safe to call from many tasks at once."""

    tag: BackendTag
    commit_lanes: int  # how many commits are worth having under way at once
    batch_limit: int  # how many changes are worth putting into one commit
    clock: Clock | None  # the store's own, where it can be read without asking the store
    in_order: bool  # whether a take that is called after a commit sees what that writes, before it has answered

    async def open(self, *, migrate: bool) -> Schema:
        """Connect; apply the missing migrations when asked to; refuse a schema newer than this code."""
        ...

    async def close(self) -> None:
        """Let go of everything; a second call does nothing."""
        ...

    async def ping(self) -> int:
        """The store's time; raises StoreUnavailable when it cannot be reached."""
        ...

    async def load(self, wants: Sequence[Want]) -> Loaded:
        """The rows asked for, and the time."""
        ...

    def peek(self, wants: Sequence[Want]) -> Loaded | None:
        """The same if it can be had in less time than it takes to wait for it; else None, whatever the reason."""
        ...

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        """Per change: the commit's time when all its guards held and all was written, None when nothing was.

        No two changes of one call guard or write the same root, but that one may delete all roots that begin like a
        key and another one write one of those. When something was written, other processes are told
        to look at the topics of `hint`, as by `notify`: with the commit or right after it, as suits the store.
        """
        ...

    async def hand_over(self, changes: Sequence[Change], hint: frozenset[str], take: Take) -> Handed:
        """Commit, and take right after it, as far as that costs no further trip.

        The rows are the first that the take would find then, perhaps fewer than there are, perhaps none. A store that
        keeps the order hands nothing over: there a take that follows needs no trip of its own.
        """
        ...

    async def take(self, take: Take) -> Taken:
        """Claim up to one row per stamp from the heads of the lines, best rank first (then execution id).

        Passes over rows with a grant in force. Adds one `acquired` event a row.
        """
        ...

    async def renew(self, leases: Sequence[Held]) -> list[int | None]:
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

    async def tally(self, tally: Tally) -> dict[tuple[Any, ...], int]:
        """How many rows there are, by the values of the columns asked for."""
        ...

    async def lines(self, lane_id: str | None = None) -> list[LineKey]:
        """The lines that were ever written to, of one lane or of all."""
        ...

    async def standing(self, lane_id: str) -> list[LineKey]:
        """The lines of a lane in which something stands, in order; however many there ever were."""
        ...

    async def unlisted(self, limit: int) -> list[str]:
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

    def on_wake(self, callback: Callable[[frozenset[str]], None]) -> None:
        """Call back, on the event loop, when another process may have changed something."""
        ...
