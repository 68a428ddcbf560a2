"""Group commit: concurrent calls in one process are written together.

While one batch is on its way the next one fills; there is no timer, so an idle engine adds no delay and a busy one
writes hundreds of changes per round trip. A batch never holds two changes about one root: the second waits for the
next batch, sees the first, and is decided again if need be.

A claim of this process that wants what a batch puts into its lane goes along with it (`Wish`), where the store can hand
work over in the same trip.

What there is to tell other processes is known before the commit, which takes it along: they are told once it is there.
A change that is refused beside others that are not is told as well, which costs its hearers a look in vain.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from math import inf
from typing import Any

from flowfabric import errors
from flowfabric.engine.runtime.wakeups import LANE_PREFIX, executions_enqueued, topics_of
from flowfabric.model.change import Change, Delete, Patch, Upsert
from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.claims import ClaimRequest, CommitAndClaimResult
from flowfabric.stores.port import Collision, Store, Unstorable

CommitResult = int | None | errors.FabricError


def _key_of(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda row: tuple(getattr(row, name) for name in names)


AGGREGATE_ROOT_KEYS = {row: _key_of(table.key) for row, table in TABLE.items() if table.is_aggregate_root}
MAX_BATCH_ROWS = 450  # of a batch: where commits run side by side, the rest goes with the other lane
MAX_IN_DOUBT_CHANGES = 1000  # changes in doubt that are remembered; most are never heard of again


class PendingClaim:
    """A take that goes along with the next batch that puts work into its lane."""

    def __init__(self, takes: dict[str, Callable[[], ClaimRequest]]) -> None:
        """`takes` makes one, by the topic of each lane; the first batch that suits gets one of them."""
        self._takes = takes
        self.attached: ClaimRequest | None = None  # the one that is on its way
        self.drained = False  # whether it saw the end of its lane
        self.rows: asyncio.Future[list[tuple[Execution, Payload]]] = asyncio.get_running_loop().create_future()

    def attach_to(self, lanes: Collection[str]) -> ClaimRequest | None:
        """The take for a batch that puts work into these lanes."""
        make = next((make for lane, make in self._takes.items() if lane in lanes), None)
        self.attached = make and make()
        return self.attached

    async def resolve_from(self, answer: Awaitable[CommitAndClaimResult]) -> CommitAndClaimResult:
        """Learn from the answer to its batch what came of it."""
        try:
            handed = await answer
        except BaseException as error:
            self._end([], error if isinstance(error, errors.StoreUnavailable) else None)
            raise
        self.drained = handed.drained
        self._end(handed.rows)
        return handed

    def _end(self, rows: list[tuple[Execution, Payload]], error: errors.StoreUnavailable | None = None) -> None:
        if self.rows.done():  # whoever had the wish went away
            return
        if error is None:
            self.rows.set_result(rows)
        else:
            self.rows.set_exception(error)


class CommitQueue:
    """The way of all changes to the store."""

    def __init__(self, store: Store, announce: Callable[[Sequence[Change]], None]) -> None:
        """`announce` hears of changes when they are on their way, for those who can come along.

        Where the store keeps no order nobody can. Then it hears of them when they are written, before whoever sent
        them: the claims that they wake are on their way while these make something of the answer.
        """
        self._store = store
        self._announce = announce
        self.notified_changes: set[int] = set()  # ids of changes that are not noted yet and whose lanes have been woken
        self.pending_topics: set[str] = set()  # what others are to be told later, unless a commit tells it before
        self.in_doubt_changes: set[int] = (
            set()
        )  # ids of changes whose answers got lost, and with them perhaps their hints
        self._waiting: deque[tuple[Change, asyncio.Future[int | None]]] = deque()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._bringing: dict[asyncio.Future[None], set[str]] = {}  # batches under way that put work into lanes
        self._wishes: list[PendingClaim] = []
        self._running = 0  # counted by the lanes themselves: a task that has just returned is not running any more

    def add(self, change: Change) -> asyncio.Future[int | None]:
        """Write a change with whatever else is waiting: the commit's time, or None when a guard did not hold."""
        verdict: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, verdict))
        self._start_lane()
        return verdict

    def send_batch(self, changes: Sequence[Change]) -> asyncio.Task[list[CommitResult]]:
        """Write a batch that one caller put together, at once; one change that fails does not fail the others."""
        writing = asyncio.create_task(self._write_aloud(changes))
        self._under_way.add(writing)
        writing.add_done_callback(self._under_way.discard)
        return writing

    async def add_all(self, changes: Sequence[Change]) -> list[CommitResult]:
        """Write many changes about different roots, a batch at a time; each verdict stands for itself."""
        verdicts: list[CommitResult] = []
        for start in range(0, len(changes), self._store.batch_limit):
            verdicts += await self.send_batch(changes[start : start + self._store.batch_limit])
        return verdicts

    async def wait_for_lanes(self, topics: Collection[str]) -> None:
        """Wait until the batches under way that put work into one of these lanes are answered."""
        under_way = [batch for batch, lanes in self._bringing.items() if not lanes.isdisjoint(topics)]
        for batch in under_way:
            await asyncio.shield(batch)

    def add_pending_claim(self, wish: PendingClaim) -> None:
        """Let a take go along with the next batch that puts work into its lane."""
        self._wishes.append(wish)

    def remove_pending_claim(self, wish: PendingClaim) -> None:
        """Wish it no more; if it is on its way already, that changes nothing."""
        if wish in self._wishes:
            self._wishes.remove(wish)

    async def drain(self) -> None:
        """Wait until nothing is on its way."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    def _start_lane(self) -> None:
        if self._running < self._store.concurrent_commits:
            self._running += 1
            lane = asyncio.create_task(self._run_lane())
            self._under_way.add(lane)
            lane.add_done_callback(self._under_way.discard)

    async def _run_lane(self) -> None:
        try:
            while batch := self._next_batch():
                verdicts = await self._write_aloud([change for change, _ in batch])
                for (change, waiter), verdict in zip(batch, verdicts, strict=True):
                    if waiter.done():  # nobody will note what became of it
                        self.notified_changes.discard(change.id)
                    _answer(waiter, verdict)
        finally:
            self._running -= 1

    def _next_batch(self) -> list[tuple[Change, asyncio.Future[int | None]]]:
        batch: list[tuple[Change, asyncio.Future[int | None]]] = []
        later: list[tuple[Change, asyncio.Future[int | None]]] = []
        roots: set[object] = set()
        waiting, limit, rows = self._waiting, self._store.batch_limit, 0
        most = inf if self._store.executes_in_order else MAX_BATCH_ROWS
        while waiting and len(batch) < limit and rows < most:
            entry = waiting.popleft()
            touched = _roots_of(entry[0])
            if roots.isdisjoint(touched):
                roots.update(touched)
                batch.append(entry)
                rows += len(entry[0].writes)
            else:
                later.append(entry)
        waiting.extendleft(reversed(later))
        return batch

    async def _write_aloud(self, changes: Sequence[Change]) -> list[CommitResult]:
        """Commit, and let those come along who can; what was not written is not announced any more."""
        if not self._store.executes_in_order:
            return await self._write_for_lanes(changes)
        self._announce(changes)  # whoever hears it is heard after what is written here without a pause
        verdicts = await self._write(changes)
        if self.notified_changes:
            self.notified_changes.difference_update(
                change.id for change, verdict in zip(changes, verdicts, strict=True) if type(verdict) is not int
            )
        return verdicts

    async def _write_for_lanes(self, changes: Sequence[Change]) -> list[CommitResult]:
        """Commit where nobody can come along; those who would look in vain can wait for the answer."""
        topics = frozenset(topics_of(changes))
        if not (lanes := {topic for topic in topics if topic.startswith(LANE_PREFIX)}):
            return await self._write(changes, topics)
        batch: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bringing[batch] = lanes
        wish = next((one for one in self._wishes if one.attach_to(lanes)), None)
        if wish is not None:
            self._wishes.remove(wish)
        try:
            verdicts = await self._write(changes, topics, wish)
        finally:
            del self._bringing[batch]
            batch.set_result(None)
        self._announce(
            [
                change
                for change, verdict in zip(changes, verdicts, strict=True)
                if type(verdict) is int and change.id not in self.notified_changes
            ]
        )
        return verdicts

    async def _write(
        self, changes: Sequence[Change], topics: frozenset[str] | None = None, wish: PendingClaim | None = None
    ) -> list[CommitResult]:
        """Commit; a batch that the store cannot keep is halved until the one at fault stands alone.

        `topics` are those of the changes, if they are known already; a wish goes along with the whole batch only.
        """
        hint = frozenset(topics_of(changes)) if topics is None else topics
        try:
            if wish is None or wish.attached is None:
                verdicts = await self._store.commit(changes, hint)
            else:
                verdicts = await self._hand_over(changes, hint, wish, wish.attached)
        except Unstorable as fault:
            if len(changes) == 1:
                return [None if isinstance(fault, Collision) else _refused(fault)]
            self.notified_changes.difference_update(change.id for change in changes)  # who came along found nothing
            half = len(changes) // 2
            return await self._write(changes[:half]) + await self._write(changes[half:])
        except errors.FabricError as error:
            if (
                isinstance(error, errors.StoreUnavailable)
                and error.in_doubt
                and len(self.in_doubt_changes) < MAX_IN_DOUBT_CHANGES
            ):
                self.in_doubt_changes.update(change.id for change in changes)
            return [error] * len(changes)
        except Exception as bug:  # whatever it is, every caller of this batch must hear of it and no lane may die
            return [_bug(bug)] * len(changes)
        if self.pending_topics and any(at is not None for at in verdicts):
            self.pending_topics -= hint
        return list(verdicts)

    async def _hand_over(
        self, changes: Sequence[Change], hint: frozenset[str], wish: PendingClaim, take: ClaimRequest
    ) -> list[int | None]:
        """Commit and take; whoever waits for the lane need not be told of what went to the wish."""
        handed = await wish.resolve_from(self._store.commit_and_claim(changes, hint, take))
        if gone := {row.execution_id for row, _ in handed.rows}:
            for change, at in zip(changes, handed.verdicts, strict=True):
                if at is not None and (freed := executions_enqueued(change)) and freed <= gone:
                    self.notified_changes.add(change.id)
        return handed.verdicts


def _roots_of(change: Change) -> list[tuple[Any, tuple[Any, ...]]]:
    """The roots that a change is about: those it was decided on, and those it writes without having looked at them.

    A store that writes a batch in one statement would write such a row once, for one of two changes.
    """
    touched: list[tuple[Any, tuple[Any, ...]]] = [(guard.row, guard.key) for guard in change.guards]
    for write in change.writes:  # compared by type: this runs for every change
        row: Any = write.row
        if type(write) is Patch or type(write) is Delete:
            if row in AGGREGATE_ROOT_KEYS:
                touched.append((row, write.key))
        elif type(write) is Upsert and type(row) in AGGREGATE_ROOT_KEYS:
            touched.append((type(row), AGGREGATE_ROOT_KEYS[type(row)](row)))
    return touched


def _answer(waiter: asyncio.Future[int | None], verdict: CommitResult) -> None:
    if waiter.done():  # the caller went away; its change was written or refused all the same
        return
    if isinstance(verdict, errors.FabricError):
        waiter.set_exception(verdict)
    else:
        waiter.set_result(verdict)


def _bug(cause: Exception) -> errors.FabricError:
    error = errors.BugError(f"commit: {cause!r}")
    error.__cause__ = cause
    return error


def _refused(fault: Unstorable) -> errors.FabricError:
    error = errors.InvalidInput(f"the store cannot keep this: {fault}")
    error.__cause__ = fault
    return error
