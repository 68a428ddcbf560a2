"""The store port: the operations that the engine needs from a database.

A store accepts or refuses a change and never says why. After a refusal the engine loads the rows again and asks the
rule again.

A store may keep its partitions on several servers. Every row has a home, its partition, which follows from its table
and key (`homes.py`), and every change has one home. What holds within a partition need not hold across partitions:

* The store owns the clock, one for each partition. An operation reads it once per partition and uses that one reading
  for all comparisons and timestamps there. Clocks of different partitions may differ; no rule compares their instants.
  `Loaded.now` is the time in the partition of the first read, which is the one that the rule decides on. A store with
  several clocks also returns the time of each read, because the engine joins the loads of its callers.
* A load is one snapshot of each partition, so no row is newer than its aggregate root. Two partitions may be read at
  different moments. Guards protect a decision on rows of its own partition only; others are hints.
* A batch of a commit may hold changes of many partitions. Each change is atomic, the batch is not.
* A claim orders rows by position within each partition, and a due list by instant.
* A read whose key prefix does not name the partition asks all of them, which is slow.

What each operation guarantees when the process dies or a reply is lost:

* `load`, `due`, `scan` and `feed` write nothing.
* `commit` writes each change completely or not at all, and answers each with a verdict of its own: a change that is
  refused, or that holds a value which the store cannot keep, does not affect the other changes of the batch.
  `StoreUnavailable` means either that nothing of the batch was written (`in_doubt` False) or that the outcome of every
  change is unknown (`in_doubt` True). An aggregate root whose revision is the change's id then proves that the change
  was applied.
* `claim_rows` behaves like a commit. The claimed rows carry the lease ids of the request, so they can be found by those
  ids after a lost reply.
* `renew` is idempotent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from flowfabric.clock import Clock
from flowfabric.handles import BackendTag
from flowfabric.ids import DEFAULT_PARTITIONS, PartitionCounts
from flowfabric.model.change import Change, RowTemplate
from flowfabric.model.deployment import ServerReport, SnapshotHolder
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import QueueKey
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseRef
from flowfabric.stores.queries import Due, FeedPage, GroupedCount, Loaded, Read, Scan, Search, SearchPage, Where
from flowfabric.stores.verdicts import Verdict


class SchemaVersion(msgspec.Struct, frozen=True, gc=False):
    """The schema version before and after opening a store; 0 means that there was no schema."""

    found: int
    current: int
    compatible: bool = True  # False if a migration was applied that the previous release cannot run on


class TransactionView(Protocol):
    """A store inside a caller's transaction: its writes are committed or rolled back with that transaction."""

    async def load(self, reads: Sequence[Read]) -> Loaded:
        """Load the requested rows and the store's time."""

    async def commit(self, change: Change) -> Verdict:
        """Write the change if all guards hold and its values can be stored; otherwise write nothing."""

    async def notify(self, topics: frozenset[str]) -> None:
        """Notify all processes about these topics when the transaction commits."""


@runtime_checkable
class SupportsSnapshotHolders(Protocol):
    """A store whose server can report which sessions hold old snapshots."""

    async def snapshot_holders(self, limit: int) -> list[SnapshotHolder]:
        """List the holders, oldest snapshot first."""


@runtime_checkable
class SupportsServerReport(Protocol):
    """A store whose durability depends on settings of its servers."""

    async def server_report(self) -> ServerReport:
        """Ask the servers for their settings."""


@runtime_checkable
class SupportsCallerTransaction(Protocol):
    """A store in a database that callers use with transactions of their own."""

    async def join_transaction(self, connection: Any) -> TransactionView:
        """Join the open transaction of this connection."""


class Store(Protocol):
    """A database of rows. All operations may be called from many tasks at once."""

    tag: BackendTag
    concurrent_commits: int  # the number of commits that are worth having in flight at once
    batch_limit: int  # the number of changes that are worth putting into one commit
    deletes_in_pages: bool  # True if a change that deletes many rows delays all other calls
    clock: Clock | None  # the store's clock, if it can be read without asking the store
    claim_parts: int  # claims into which a worker divides its slots: with 2, one is made while the other's rows run
    executes_in_order: bool  # True if a claim sent after a commit sees its writes, even before the commit has returned

    async def open(self, *, migrate: bool, partitions: PartitionCounts = DEFAULT_PARTITIONS) -> SchemaVersion:
        """Connect, apply missing migrations if `migrate` is set, and refuse a schema newer than this code.

        The homes of rows follow from the numbers of `partitions`; a store on one server does not need them.
        """

    async def close(self) -> None:
        """Release all resources; a second call does nothing."""

    async def ping(self) -> int:
        """Return the store's time; raise `StoreUnavailable` if the store cannot be reached."""

    async def load(self, reads: Sequence[Read]) -> Loaded:
        """Load the requested rows and the store's time."""

    def try_load_now(self, reads: Sequence[Read]) -> Loaded | None:
        """Load the rows synchronously if that is faster than waiting for `load`; otherwise return None."""

    async def commit(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> list[Verdict]:
        """Commit changes; return the verdict on each.

        It is the commit's time if the change was written, None if a guard does not hold or a row to be inserted exists,
        `Unstorable` if a value cannot be kept; a change may get either of the last two if both are true.

        No two changes of one call may guard or write the same aggregate root, with one exception: one change may delete
        all roots whose key has a prefix while another writes one of those roots. If anything was written, other
        processes are notified about `topics`, with the commit or right after it.
        """

    async def commit_and_claim(
        self, changes: Sequence[Change], topics: frozenset[str], request: ClaimRequest
    ) -> CommitAndClaimResult:
        """Commit the changes and claim rows right after, as far as that costs no further round trip.

        The claimed rows are the first ones that a separate claim would return. They may be fewer than the request could
        get, or none. A store that executes in order claims nothing here, because a following claim needs no round trip.
        """

    async def claim_rows(self, request: ClaimRequest) -> ClaimedRows:
        """Claim the first rows of some queues, at most one per `LeaseIds`.

        They are ordered by position and execution id, within each partition. Rows with an unexpired grant are skipped.
        """

    async def renew(self, leases: Sequence[LeaseRef], template: RowTemplate) -> list[int | None]:
        """Apply the template to the execution of each lease; return, per lease, its new expiry, or None if it was
        refused because the execution does not meet the template's condition.
        """

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        """Return the rows that meet the conditions and whose `column` holds an instant that has passed."""

    async def scan(self, scan: Scan) -> list[Any]:
        """Return the rows of a scan, in its order."""

    async def search(self, search: Search) -> SearchPage:
        """Return executions of all partitions that meet the conditions, newest first.

        At most the search's budget of rows is read, whether they meet the conditions or not, so that no call takes
        long. The order holds across partitions.
        """

    async def kinds(self, execution_ids: Sequence[str]) -> dict[str, str]:
        """Return the execution kinds from the payload rows of these executions, without reading their inputs.

        An execution without a payload row is left out.
        """

    async def count_grouped(self, query: GroupedCount) -> dict[tuple[Any, ...], int]:
        """Count rows by the values of the `group_by` columns."""

    async def queues(self, lane_id: str | None = None) -> list[QueueKey]:
        """List the queues that were ever written to, of one lane or of all lanes."""

    async def nonempty_queues(self, lane_id: str) -> list[QueueKey]:
        """List the nonempty queues of a lane, in order; the cost does not depend on how many empty queues exist."""

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        """List executions whose queue is missing from the store's queue table: no claim finds them."""

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        """List the lanes that were ever written to, ascending, strictly after `after`."""

    async def feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        """Return committed events of a topic strictly after a position, in an order that never changes.

        Positions never restart: a store that lost its newest events gives higher positions to later ones.
        """

    async def feed_end(self) -> int:
        """Return a position such that everything committed from now on lies strictly after it."""

    async def trim_feed(self, before: int, limit: int) -> int:
        """Delete about `limit` of the oldest events emitted before an instant; return the number of deleted events."""

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str = "") -> list[FeedEvent]:
        """Return the newest events of an execution, oldest first, except those that the topic names `without`.

        Their positions in the feed may be missing (0).
        """

    def notify(self, topics: frozenset[str]) -> None:
        """Notify other processes about these topics. A lost notification delays them by at most a poll interval."""

    def limit_commands(self, command_s: float) -> None:
        """Bound the duration of each further statement. A store without a server ignores this."""

    def on_notify(self, callback: Callable[[frozenset[str]], None]) -> None:
        """Call back on the event loop when another process may have changed something."""
