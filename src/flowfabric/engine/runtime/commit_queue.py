"""CommitQueue: concurrent changes of one process are written in one round trip.

A batch never holds two changes about one aggregate root: the second one waits for the next batch, sees the first, and
is decided again if need be. A batch whose reply is lost raises `StoreUnavailable` with `in_doubt` for each of its
changes; `Runtime.decide_and_commit` finds out which were written, and sends the others again.

A claim of this process that wants the work which a batch enqueues is sent with it (`PendingClaim`), if the store can
commit and claim in one statement.

The topics to notify other processes of are known before the commit and sent with it. A change that is refused beside
others that are not is notified as well, which costs the receivers a poll that finds nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from math import inf
from typing import Any

from flowfabric import errors
from flowfabric.batcher import Batcher
from flowfabric.engine.runtime.wakeups import LANE_PREFIX, executions_enqueued, topics_of
from flowfabric.event_loop import start_task
from flowfabric.model.change import Change, Delete, Patch, Upsert
from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.claims import ClaimRequest, CommitAndClaimResult
from flowfabric.stores.codec import READ_KEY
from flowfabric.stores.port import Store
from flowfabric.stores.verdicts import Unstorable, Verdict

CommitResult = int | None | errors.FabricError


AGGREGATE_ROOT_KEYS = {row: READ_KEY[row] for row, table in TABLE.items() if table.is_aggregate_root}
MAX_BATCH_ROWS = 500  # rows of a batch if commits run concurrently: the next batch has the rest
MAX_IN_DOUBT_CHANGES = 1000


class PendingClaim:
    """A claim that is sent with the next batch that enqueues work in one of its lanes."""

    def __init__(self, make_request: dict[str, Callable[[], ClaimRequest]]) -> None:
        """`make_request` makes the claim request, by the topic of each lane."""
        self._make_request = make_request
        self.attached: ClaimRequest | None = None  # the request that is in flight
        self.drained = False  # True if the lane was empty after the claim
        self.rows: asyncio.Future[list[tuple[Execution, Payload]]] = asyncio.get_running_loop().create_future()

    def attach_to(self, lanes: Collection[str]) -> ClaimRequest | None:
        """Return the claim request for a batch that enqueues work in these lanes; None if none of them is wanted."""
        make = next((make for lane, make in self._make_request.items() if lane in lanes), None)
        self.attached = make and make()
        return self.attached

    async def resolve_from(self, answer: Awaitable[CommitAndClaimResult]) -> CommitAndClaimResult:
        """Resolve the claim from the reply to its batch."""
        try:
            result = await answer
        except BaseException as error:
            self._resolve([], error if isinstance(error, errors.StoreUnavailable) else None)
            raise
        self.drained = result.drained
        self._resolve(result.rows)
        return result

    def _resolve(self, rows: list[tuple[Execution, Payload]], error: errors.StoreUnavailable | None = None) -> None:
        if self.rows.done():  # the caller was cancelled
            return
        if error is None:
            self.rows.set_result(rows)
        else:
            self.rows.set_exception(error)


class CommitQueue:
    """Writes the changes of this process in batches."""

    def __init__(self, store: Store, wake_claims: Callable[[Sequence[Change]], None]) -> None:
        """`wake_claims` wakes the claims of this process that wait for lanes where these changes enqueue work.

        If the store executes operations in the order they are sent, it is called when a batch is sent, so that the
        claims are executed right after it. Otherwise it is called when the batch is written, before its callers resume.
        """
        self._store = store
        self._wake_claims = wake_claims
        self.notified_changes: set[int] = set()  # ids of changes that are not published yet and whose lanes were woken
        self.pending_topics: set[str] = set()  # topics to send to other processes, unless a commit sends them before
        self.in_doubt_changes: set[int] = (
            set()
        )  # ids of changes with a lost reply: their notifications may be lost, too
        self._batcher: Batcher[Change, int | None] = Batcher(
            self._flush,
            concurrency=store.concurrent_commits,
            max_items=store.batch_limit,
            max_weight=inf if store.executes_in_order else MAX_BATCH_ROWS,
            weight=lambda change: len(change.writes),
            keys=_roots_of,
            on_abandoned=lambda change: self.notified_changes.discard(change.id),
        )
        self._sent: set[asyncio.Task[list[CommitResult]]] = set()
        self._enqueuing: dict[asyncio.Future[None], set[str]] = {}  # batches in flight that enqueue work, and its lanes
        self._pending_claims: list[PendingClaim] = []

    def add(self, change: Change) -> asyncio.Future[int | None]:
        """Write a change in the next batch: the commit's time, or None if a guard did not hold."""
        return self._batcher.add(change)

    def send_batch(self, changes: Sequence[Change]) -> asyncio.Task[list[CommitResult]]:
        """Write a batch that the caller put together, at once; a change that fails does not fail the others."""
        sending = start_task(self._commit(changes))
        self._sent.add(sending)
        sending.add_done_callback(self._sent.discard)
        return sending

    async def add_all(self, changes: Sequence[Change]) -> list[CommitResult]:
        """Write many changes about different roots, a batch at a time; a change that fails does not fail the others."""
        results: list[CommitResult] = []
        for start in range(0, len(changes), self._store.batch_limit):
            results += await self.send_batch(changes[start : start + self._store.batch_limit])
        return results

    async def wait_for_lanes(self, topics: Collection[str]) -> None:
        """Wait for the batches in flight that enqueue work in one of these lanes."""
        for batch in [batch for batch, lanes in self._enqueuing.items() if not lanes.isdisjoint(topics)]:
            await asyncio.shield(batch)

    def add_pending_claim(self, claim: PendingClaim) -> None:
        """Let a claim be sent with the next batch that enqueues work in one of its lanes."""
        self._pending_claims.append(claim)

    def remove_pending_claim(self, claim: PendingClaim) -> None:
        """Withdraw a pending claim; one that was sent already is not affected."""
        if claim in self._pending_claims:
            self._pending_claims.remove(claim)

    async def drain(self) -> None:
        """Wait until nothing is queued or in flight."""
        await self._batcher.drain()
        while self._sent:
            await asyncio.wait(self._sent)

    async def _flush(self, changes: list[Change]) -> list[CommitResult]:
        return await self._commit(changes)

    async def _commit(self, changes: Sequence[Change]) -> list[CommitResult]:
        """Commit a batch and wake the claims that can use it."""
        if not self._store.executes_in_order:
            return await self._commit_then_wake(changes)
        self._wake_claims(changes)  # they send their claims after this batch, which is sent without a pause
        verdicts = await self._write(changes)
        if self.notified_changes:
            self.notified_changes.difference_update(
                change.id for change, verdict in zip(changes, verdicts, strict=True) if type(verdict) is not int
            )
        return verdicts

    async def _commit_then_wake(self, changes: Sequence[Change]) -> list[CommitResult]:
        """Commit, with a pending claim if one suits; claims of these lanes may `wait_for_lanes`."""
        topics = frozenset(topics_of(changes))
        if not (lanes := {topic for topic in topics if topic.startswith(LANE_PREFIX)}):
            return await self._write(changes, topics)
        batch: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._enqueuing[batch] = lanes
        claim = next((claim for claim in self._pending_claims if claim.attach_to(lanes)), None)
        if claim is not None:
            self._pending_claims.remove(claim)
        try:
            verdicts = await self._write(changes, topics, claim)
        finally:
            del self._enqueuing[batch]
            batch.set_result(None)
        self._wake_claims(
            [
                change
                for change, verdict in zip(changes, verdicts, strict=True)
                if type(verdict) is int and change.id not in self.notified_changes
            ]
        )
        return verdicts

    async def _write(
        self, changes: Sequence[Change], topics: frozenset[str] | None = None, claim: PendingClaim | None = None
    ) -> list[CommitResult]:
        """Commit, with a claim if one is attached; `topics` are those of the changes, if the caller has them."""
        topics = frozenset(topics_of(changes)) if topics is None else topics
        try:
            if claim is None or claim.attached is None:
                verdicts = await self._store.commit(changes, topics)
            else:
                verdicts = await self._commit_and_claim(changes, topics, claim, claim.attached)
        except errors.FabricError as error:
            if (
                isinstance(error, errors.StoreUnavailable)
                and error.in_doubt
                and len(self.in_doubt_changes) < MAX_IN_DOUBT_CHANGES
            ):
                self.in_doubt_changes.update(change.id for change in changes)
            return [error] * len(changes)
        except Exception as bug:  # every caller of the batch gets it, and the queue continues
            return [_bug(bug)] * len(changes)
        if self.pending_topics and int in map(type, verdicts):
            self.pending_topics -= topics
        return [verdict if type(verdict) is int else result_of(verdict) for verdict in verdicts]

    async def _commit_and_claim(
        self, changes: Sequence[Change], topics: frozenset[str], claim: PendingClaim, request: ClaimRequest
    ) -> list[Verdict]:
        """Commit and claim in one statement; no other claim is woken for what this one got."""
        result = await claim.resolve_from(self._store.commit_and_claim(changes, topics, request))
        if claimed := {row.execution_id for row, _ in result.rows}:
            for change, at in zip(changes, result.verdicts, strict=True):
                if type(at) is int and (enqueued := executions_enqueued(change)) and enqueued <= claimed:
                    self.notified_changes.add(change.id)
        return result.verdicts


def _roots_of(change: Change) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the roots that a change was decided on, and those that it writes without having loaded them.

    A store that writes a batch in one statement would write such a row once, for one of two changes.
    """
    touched: list[tuple[Any, tuple[Any, ...]]] = [(guard.row, guard.key) for guard in change.guards]
    for write in change.writes:
        row: Any = write.row
        if type(write) is Patch or type(write) is Delete:
            if row in AGGREGATE_ROOT_KEYS:
                touched.append((row, write.key))
        elif type(write) is Upsert and type(row) in AGGREGATE_ROOT_KEYS:
            touched.append((type(row), AGGREGATE_ROOT_KEYS[type(row)](row)))
    return touched


def _bug(cause: Exception) -> errors.FabricError:
    error = errors.BugError(f"commit: {cause!r}")
    error.__cause__ = cause
    return error


def result_of(verdict: Verdict) -> CommitResult:
    """Return the verdict, or the caller's error for an unstorable change."""
    if not isinstance(verdict, Unstorable):
        return verdict
    error = errors.InvalidInput(f"the store cannot keep this: {verdict}")
    error.__cause__ = verdict
    return error
