"""Sweeper: any process may run the sweeps, which act on rows that fall due; there is no leader.

Each sweep holds a short lease on its name, so that many processes do not load the same rows. Sweeps with different
filters hold different leases. A pass loads the rows that are due and calls an operation for each, which decides again.
The sweep then sleeps until the next row falls due, at most its interval. An item that fails repeatedly is skipped for a
while and never blocks the others. If the store is unavailable the sweep retries with a growing delay; after a crash it
is restarted. Stopping waits for the items in progress.

The lease lasts one interval, and the other processes sleep until it expires: so a dead holder is replaced within one
interval. Each process, the holder included, adds its own delay (`jitter`), so the one with the smallest delay keeps the
sweep. Two processes that run a sweep at the same time cost a few conflicts and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.read_set import decide_row, load_each
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.wakeups import due_topic
from flowfabric.engine.sweeps.failure_backoff import FailureBackoff
from flowfabric.engine.validation import execution as validate
from flowfabric.event_loop import finish_tasks, start_task
from flowfabric.ids import scan_jitter
from flowfabric.model.deployment import SweepLease
from flowfabric.model.execution import Execution
from flowfabric.rules import sweep_lease, validation
from flowfabric.rules.feed import Filter
from flowfabric.settings import Sweeps
from flowfabric.stores.catalog import TABLE, key_of
from flowfabric.stores.queries import Scan, Where

logger = logging.getLogger("flowfabric.sweeper")

MIN_INTERVAL_MS = 100
MAX_DELAY_S = 30.0
RESTART_DELAY_S = 5.0
MAX_PAGES = 20
LONG_PASS_SHARE = 0.05  # after a pass that took a larger share of the lease, the lease is renewed


class SweepResult(msgspec.Struct, frozen=True):
    """The result of one pass, and when the next row falls due."""

    processed: int
    errors: int
    now: int = 0
    next_at: int | None = None


class SweepFilter(msgspec.Struct, frozen=True):
    """The executions that sweeps may touch: those that every one of these filters accepts."""

    filters: tuple[Filter, ...] = ()

    @classmethod
    def of(cls, settings: Sweeps, chosen: Filter | None) -> SweepFilter:
        """Return the filter of the settings together with a chosen one."""
        filters = (
            validate.validate_filter(Filter(settings.namespace, settings.instance_tag)),
            validate.validate_filter(chosen),
        )
        return cls(tuple(each for each in filters if each != Filter()))

    def lease_name(self, sweep: str) -> str:
        """Return the name of the lease on a sweep of these executions; other filters have other leases."""
        if not self.filters:
            return sweep
        return f"{sweep}:{hashlib.sha256(msgspec.json.encode(self.filters)).hexdigest()[:16]}"

    def accepts(self, row: Execution | None) -> bool:
        """Return whether a sweep may act on this execution; a missing one is accepted only without filters."""
        return not self.filters if row is None else all(each.accepts(row) for each in self.filters)


# By sweep and filter: where its next pass begins, if the last one processed nothing and did not reach the end.
SweepCursors = dict[tuple[str, SweepFilter], tuple[Any, ...]]


class Sweep(msgspec.Struct, frozen=True):
    """One kind of due work: the column with the instant, and the operation on a row that is due.

    `act` gets the id of an execution, or a row of another kind. `run_pass` is for work that is not found by an instant:
    it makes a pass over about that many items. `owner` names the column with the execution that a row of another kind
    belongs to, which filters apply to. A pass with a full batch is followed by the next one at once, unless the sweep
    is `cyclic`: its rows fall due again and again. Each `variant` of a sweep has its own lease.
    """

    name: str
    column: str = ""
    act: Callable[[Any], Awaitable[bool]] | None = None
    where: tuple[Where, ...] = ()
    run_pass: Callable[[int], Awaitable[SweepResult]] | None = None
    row: type[msgspec.Struct] = Execution
    owner: str | None = None
    cyclic: bool = False
    variant: str = ""


class Sweeper:
    """The background sweeps of one process."""

    def __init__(
        self,
        runtime: Runtime,
        settings: Sweeps,
        sweeps: Iterable[Sweep],
        chosen: Filter | None = None,
        cursors: SweepCursors | None = None,
    ) -> None:
        """`chosen` restricts the sweeps of executions further than the settings.

        `cursors` lets it continue where another sweeper of this process stopped.
        """
        self.runtime = runtime
        self._settings = settings
        self._choice = SweepFilter.of(settings, chosen)
        self._holder = runtime.minter.uuid()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._backoffs: dict[str, FailureBackoff] = {}
        self._cursors: SweepCursors = {} if cursors is None else cursors
        self._schema_too_new = False
        self.restarts = 0
        self.sweeps = {sweep.name: sweep for sweep in sweeps}

    # -- running --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run every sweep that has an interval."""
        for sweep in self.sweeps.values():
            interval = getattr(self._settings, f"{sweep.name}_ms")
            if interval > 0:
                self._tasks.append(start_task(self._supervise(sweep, max(interval, MIN_INTERVAL_MS))))

    async def stop(self, grace_s: float = 15.0) -> int:
        """Stop after the items in progress; return how many sweeps were stopped after the grace."""
        self._stopping.set()
        late = await finish_tasks(self._tasks, grace_s)
        self._tasks.clear()
        if late:
            self.runtime.metrics.count("ff_shutdown_timeout", late)
        return late

    async def _supervise(self, sweep: Sweep, interval_ms: int) -> None:
        """Run a sweep until `stop`; restart it after a crash."""
        while not self._stopping.is_set():
            try:
                await self._run(sweep, interval_ms)
            except errors.SchemaTooNew as newer:
                if not self._schema_too_new:  # log it once, not for each sweep
                    self._schema_too_new = True
                    logger.error("this process stops its sweeps: %s", newer)
                return
            except Exception:
                self.restarts += 1
                self.runtime.metrics.count("ff_scanner_restart", scanner=sweep.name)
                logger.exception("sweep %s crashed; it restarts in %.0f s", sweep.name, RESTART_DELAY_S)
                await self._release(sweep)  # another process may be able to run it
                await self._wait(RESTART_DELAY_S)

    async def _run(self, sweep: Sweep, interval_ms: int) -> None:
        failures = 0
        # The processes of a deployment must not run in lockstep.
        spread = scan_jitter(f"{self._holder}:{sweep.name}", 1000) / 1000
        jitter_s = interval_ms / 1000 * self._settings.jitter * spread
        while not self._stopping.is_set():
            delay_s = interval_ms / 1000 + jitter_s
            wakeup = self.runtime.wakeups.subscribe(due_topic(sweep.row, sweep.column))
            self._plan(sweep, delay_s)  # an instant that is written during the pass wakes the sweep, too
            try:
                if held_ms := await self._hold(sweep, interval_ms):
                    delay_s = held_ms / 1000 + jitter_s
                else:
                    done = await self._run_leased(sweep, interval_ms)
                    if done.next_at is not None:
                        delay_s = min(delay_s, max(0.0, (done.next_at - done.now) / 1000))
                    if done.processed >= self._batch(sweep) and not sweep.cyclic:
                        delay_s = 0.0
                failures = 0
            except errors.StoreUnavailable as error:
                failures += 1
                delay_s = min(MAX_DELAY_S, delay_s * 2**failures)
                logger.warning(
                    "sweep %s: the store is unavailable (%s); next attempt in %.1f s", sweep.name, error, delay_s
                )
            await self._sleep(sweep, delay_s, wakeup)
        await self._release(sweep)

    async def _run_leased(self, sweep: Sweep, lease_ms: int) -> SweepResult:
        """Make a pass; renew the lease during and after a long one."""
        clock = asyncio.get_running_loop().time
        began, work = clock(), start_task(self._run_timed(sweep))
        try:
            while not (await asyncio.wait({work}, timeout=lease_ms / 2000))[0]:
                await self._renew(sweep, lease_ms)
            if clock() - began > lease_ms / 1000 * LONG_PASS_SHARE:
                await self._renew(sweep, lease_ms)
            return work.result()
        finally:
            work.cancel()

    async def _renew(self, sweep: Sweep, lease_ms: int) -> None:
        """Renew the lease; if that fails, another process may run the sweep as well."""
        with contextlib.suppress(errors.FabricError):
            await self._hold(sweep, lease_ms)

    async def _sleep(self, sweep: Sweep, delay_s: float, wakeup: asyncio.Future[None]) -> None:
        """Sleep until the delay is over, a row falls due earlier, or the sweeper stops."""
        planned = self._plan(sweep, delay_s)
        try:
            await self._wait(delay_s, wakeup)
        finally:
            planned.pop(sweep.column, None)
            wakeup.cancel()

    def _plan(self, sweep: Sweep, delay_s: float) -> dict[str, int]:
        """Record when the next pass begins, so that a commit with an earlier instant wakes the sweep."""
        planned = self.runtime.next_sweep_at.setdefault(sweep.row, {})
        if sweep.column:
            planned[sweep.column] = self.runtime.estimate.now() + int(delay_s * 1000)
        return planned

    async def _wait(self, delay_s: float, *wakeups: asyncio.Future[None]) -> None:
        stopping = start_task(self._stopping.wait())
        waited: list[asyncio.Future[Any]] = [stopping, *wakeups]
        try:
            await asyncio.wait(waited, timeout=max(0.001, delay_s), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()

    # -- one pass -------------------------------------------------------------------------------------------------

    async def sweep_once(self, name: str, batch: int | None = None) -> SweepResult:
        """Make one pass now, regardless of the lease."""
        sweep = self.sweeps.get(validation.text("sweep", name))
        if sweep is None:
            raise errors.InvalidInput(f"sweep: {name!r} is not one of {', '.join(self.sweeps)}")
        if batch is not None:
            validation.integer("batch", batch, least=1, most=10_000)
        return await self._run_timed(sweep, batch)

    async def _run_timed(self, sweep: Sweep, batch: int | None = None) -> SweepResult:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            return await self._run_pass(sweep, self._batch(sweep) if batch is None else batch)
        finally:
            self.runtime.metrics.count("ff_scanner_cycle", scanner=sweep.name)
            self.runtime.metrics.observe("ff_scanner_cycle_duration", clock() - began, scanner=sweep.name)

    def _batch(self, sweep: Sweep) -> int:
        return self._settings.batches.get(sweep.name, self._settings.batch)

    async def _run_pass(self, sweep: Sweep, batch: int) -> SweepResult:
        if sweep.run_pass is not None:
            return await sweep.run_pass(batch)
        backoff = self._backoffs.setdefault(sweep.name, FailureBackoff())
        backoff.next_cycle()
        rows, now, next_at, cursor = await self._due_rows(sweep, batch, backoff)
        results = await asyncio.gather(*(self._act(sweep, row) for row in rows))
        for row, result in zip(rows, results, strict=True):
            backoff.record(key_of(row), failed=isinstance(result, errors.FabricError))
        failed = [result for result in results if isinstance(result, errors.FabricError)]
        if failed and len(failed) == len(results) and isinstance(failed[0], errors.StoreUnavailable):
            raise failed[0]
        processed = sum(result is True for result in results)
        if processed or cursor is None:
            self._cursors.pop((sweep.name, self._choice), None)
        else:
            self._cursors[sweep.name, self._choice] = cursor
        return SweepResult(processed, len(failed), now, next_at)

    async def _due_rows(
        self, sweep: Sweep, batch: int, backoff: FailureBackoff
    ) -> tuple[list[Any], int, int | None, tuple[Any, ...] | None]:
        """Return the rows to act on, the store's time, when the next row falls due, and a cursor behind the rows.

        Rows that are skipped or cannot be processed never hide the rows behind them: the next pass begins behind a pass
        that processed nothing. The cursor is None at the end.
        """
        runtime, column = self.runtime, sweep.column
        where = sweep.where + self._store_filters(sweep)
        due = await runtime.retry_while_unavailable(
            lambda: runtime.store.due(sweep.row, column, limit=batch, where=where)
        )
        runtime.estimate.update(due.now)
        order = (column, *(name for name in TABLE[sweep.row].key if name != column))

        def cursor_at(row: Any) -> tuple[Any, ...]:
            return tuple(getattr(row, name) for name in order)

        async def page_after(cursor: tuple[Any, ...]) -> list[Any]:
            return await runtime.scan(Scan(sweep.row, (Where(column, "<=", due.now), *where), order, cursor, batch))

        begin = self._cursors.get((sweep.name, self._choice))
        page = (begin and await page_after(begin)) or due.rows
        rows = await self._accepted(sweep, page, backoff)
        for _ in range(MAX_PAGES):
            if len(rows) >= batch or len(page) < batch:
                break
            page = await page_after(cursor_at(page[-1]))
            rows += await self._accepted(sweep, page, backoff)
        if len(rows) > batch:
            return rows[:batch], due.now, due.next_at, cursor_at(rows[batch - 1])
        return rows, due.now, due.next_at, cursor_at(page[-1]) if len(page) == batch else None

    def _store_filters(self, sweep: Sweep) -> tuple[Where, ...]:
        """Return the part of the filters that the store applies."""
        if sweep.row is not Execution:
            return ()
        namespaces = [each.namespace for each in self._choice.filters if each.namespace is not None]
        return tuple(Where("namespace", "=", namespace) for namespace in namespaces)

    async def _accepted(self, sweep: Sweep, page: list[Any], backoff: FailureBackoff) -> list[Any]:
        """Return the rows that the filters accept and that are not skipped for their failures."""
        page = [row for row in page if not backoff.is_backing_off(key_of(row))]
        if not self._choice.filters or not page or (sweep.row is not Execution and sweep.owner is None):
            return page
        owners: list[Execution | None] = page
        if sweep.owner is not None:
            owners = await load_each(self.runtime, Execution, ((getattr(row, sweep.owner),) for row in page))
        return [row for row, owner in zip(page, owners, strict=True) if self._choice.accepts(owner)]

    async def _act(self, sweep: Sweep, row: Any) -> bool | errors.FabricError:
        if self._stopping.is_set() or sweep.act is None:
            return False
        try:
            return await sweep.act(row.execution_id if sweep.row is Execution else row)
        except errors.FabricError as failed:
            logger.warning("sweep %s: %s is left for another pass: %s", sweep.name, key_of(row), failed)
            return failed
        except Exception as bug:  # a bug with one item must not stop the others
            logger.exception("sweep %s: %s is left for another pass", sweep.name, key_of(row))
            return errors.BugError(f"{sweep.name}: {bug!r}")

    async def _hold(self, sweep: Sweep, ttl_ms: int) -> int:
        """Acquire or renew the lease; return for how many milliseconds another process holds it, 0 if none does."""
        name = self._lease_name(sweep)
        return await decide_row(
            self.runtime,
            SweepLease,
            (name,),
            lambda lease, now: sweep_lease.hold_sweep(lease, name, self._holder, ttl_ms, now),
        )

    def _lease_name(self, sweep: Sweep) -> str:
        return self._choice.lease_name(f"{sweep.name}:{sweep.variant}" if sweep.variant else sweep.name)

    async def _release(self, sweep: Sweep) -> None:
        """Release the lease; if that fails, it expires."""
        key = (self._lease_name(sweep),)
        with contextlib.suppress(errors.FabricError):
            await decide_row(
                self.runtime, SweepLease, key, lambda lease, _: sweep_lease.release_sweep(lease, self._holder)
            )
