"""Sweeps: what time makes due is done by any process that runs a sweeper; there is no leader.

Each sweep holds a short lease on its own name, so that many processes do not fetch the same rows; those whose filters
choose different executions hold different ones. It looks for rows whose instant has come, and hands each to the verb
that decides about it again. It then sleeps until the next instant that it saw, at most its interval. An item that fails
again and again is left alone for a while and never holds up the others. A sweep that meets an absent store is tried
again after a growing pause, one that crashes is started again; stopping waits for the items in hand.

The lease lasts one interval, and the other processes sleep until it ends: so they notice within one interval that its
holder is dead. Each process is late by a share of its own (`jitter`), the holder as well, so the one with the smallest
share keeps the sweep. Two processes that do a sweep at the same time cost a few refused changes and nothing else.
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
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.wakeups import due_topic
from flowfabric.engine.sweeps.failure_backoff import FailureBackoff
from flowfabric.engine.validation import execution as validate
from flowfabric.ids import scan_jitter
from flowfabric.model.deployment import SweepLease
from flowfabric.model.execution import Execution
from flowfabric.rules import sweep_lease, validation
from flowfabric.rules.feed import Filter
from flowfabric.settings import Sweeps
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.queries import Read, Scan, Where

logger = logging.getLogger("flowfabric.sweeper")

MIN_INTERVAL_MS = 100
MAX_PAUSE_S = 30.0
RESTART_DELAY_S = 5.0
MAX_PAGES = 20
LONG_PASS_SHARE = 0.05  # of its lease: after a pass that took longer the lease is renewed


class SweepResult(msgspec.Struct, frozen=True):
    """What one pass of a sweep did, and when the next row falls due."""

    processed: int
    errors: int
    now: int = 0
    next_at: int | None = None


class SweepFilter(msgspec.Struct, frozen=True):
    """The executions that sweeps may touch: those that every one of these filters accepts."""

    filters: tuple[Filter, ...] = ()

    @classmethod
    def of(cls, settings: Sweeps, chosen: Filter | None) -> SweepFilter:
        """What the settings say, and what is asked for on top of that."""
        filters = (
            validate.validate_filter(Filter(settings.namespace, settings.instance_tag)),
            validate.validate_filter(chosen),
        )
        return cls(tuple(one for one in filters if one != Filter()))

    def lease_name(self, sweep: str) -> str:
        """What a process holds that does this sweep for these executions: others may do it for others meanwhile."""
        if not self.filters:
            return sweep
        return f"{sweep}:{hashlib.sha256(msgspec.json.encode(self.filters)).hexdigest()[:16]}"

    def accepts(self, row: Execution | None) -> bool:
        """Whether a sweep may act on this execution; one that is not there is nobody's."""
        return not self.filters if row is None else all(one.accepts(row) for one in self.filters)


# By sweep and choice: behind which rows its next pass goes on, if the last one did nothing and did not see the end.
SweepCursors = dict[tuple[str, SweepFilter], tuple[Any, ...]]


class Sweep(msgspec.Struct, frozen=True):
    """One kind of due work: which instant, and the verb that decides about a row whose instant has come.

    The verb gets the id of an execution, or the row itself of another kind. `whole` is for work that is not found by
    an instant: it makes a pass of its own over about so many items. `owner` names the column with the execution that a
    row of another kind belongs to, and that a filter asks about. After a pass that found plenty the next one follows at
    once, unless the sweep `goes_round`: what it has dealt with comes up again. Processes that do a sweep in another
    `variant` hold another lease: none of them keeps the others from theirs.
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
        places: SweepCursors | None = None,
    ) -> None:
        """`chosen` restricts the sweeps over executions to some of them, on top of what the settings say.

        `places` lets it go on where others left off.
        """
        self.runtime = runtime
        self._settings = settings
        self._choice = SweepFilter.of(settings, chosen)
        self._holder = runtime.minter.uuid()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._forbearance: dict[str, FailureBackoff] = {}
        self._places: SweepCursors = {} if places is None else places
        self._outdated = False
        self.restarts = 0
        self.sweeps = {sweep.name: sweep for sweep in sweeps}

    # -- running --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run every sweep that has an interval."""
        for sweep in self.sweeps.values():
            interval = getattr(self._settings, f"{sweep.name}_ms")
            if interval > 0:
                self._tasks.append(asyncio.create_task(self._supervise(sweep, max(interval, MIN_INTERVAL_MS))))

    async def stop(self, grace_s: float = 15.0) -> int:
        """Stop after the items in hand; how many sweeps did not make it in time and were cut off."""
        self._stopping.set()
        if not self._tasks:
            return 0
        _, late = await asyncio.wait(self._tasks, timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if late:
            self.runtime.metrics.count("ff_shutdown_timeout", len(late))
        return len(late)

    async def _supervise(self, sweep: Sweep, interval_ms: int) -> None:
        """Run a sweep until it is time to stop, and start it again after a crash."""
        while not self._stopping.is_set():
            try:
                await self._run(sweep, interval_ms)
            except errors.SchemaTooNew as newer:
                if not self._outdated:  # once, although each sweep finds out by itself
                    self._outdated = True
                    logger.error("this process sweeps no more: %s", newer)
                return
            except Exception:
                self.restarts += 1
                self.runtime.metrics.count("ff_scanner_restart", scanner=sweep.name)
                logger.exception("sweep %s crashed; it starts again in %.0f s", sweep.name, RESTART_DELAY_S)
                await self._leave(sweep)  # what this process cannot do another one may
                await self._rest(RESTART_DELAY_S)

    async def _run(self, sweep: Sweep, interval_ms: int) -> None:
        failures = 0
        # So that the processes of a deployment do not march in step.
        spread = scan_jitter(f"{self._holder}:{sweep.name}", 1000) / 1000
        late_s = interval_ms / 1000 * self._settings.jitter * spread
        while not self._stopping.is_set():
            pause_s = interval_ms / 1000 + late_s
            hint = self.runtime.wakeups.subscribe(due_topic(sweep.row, sweep.column))
            self._plan(sweep, pause_s)  # an instant that is written while the pass is under way counts as well
            try:
                if held_ms := await self._hold(sweep, interval_ms):
                    pause_s = held_ms / 1000 + late_s
                else:
                    done = await self._kept(sweep, interval_ms)
                    if done.next_at is not None:
                        pause_s = min(pause_s, max(0.0, (done.next_at - done.now) / 1000))
                    if done.processed >= self._batch(sweep) and not sweep.cyclic:
                        pause_s = 0.0
                failures = 0
            except errors.StoreUnavailable as away:
                failures += 1
                pause_s = min(MAX_PAUSE_S, pause_s * 2**failures)
                logger.warning("sweep %s: the store is away (%s); next try in %.1f s", sweep.name, away, pause_s)
            await self._sleep(sweep, pause_s, hint)
        await self._leave(sweep)

    async def _kept(self, sweep: Sweep, lease_ms: int) -> SweepResult:
        """Make a pass; renew the lease while it takes long, and after that."""
        clock = asyncio.get_running_loop().time
        began, work = clock(), asyncio.create_task(self._timed(sweep))
        try:
            while not (await asyncio.wait({work}, timeout=lease_ms / 2000))[0]:
                await self._renew(sweep, lease_ms)
            if clock() - began > lease_ms / 1000 * LONG_PASS_SHARE:
                await self._renew(sweep, lease_ms)
            return work.result()
        finally:
            work.cancel()

    async def _renew(self, sweep: Sweep, lease_ms: int) -> None:
        """Keep the sweep; if that fails, another process may do it as well."""
        with contextlib.suppress(errors.FabricError):
            await self._hold(sweep, lease_ms)

    async def _sleep(self, sweep: Sweep, pause_s: float, hint: asyncio.Future[None]) -> None:
        """Until the pause is over, something falls due earlier, or it is time to stop."""
        planned = self._plan(sweep, pause_s)
        try:
            await self._rest(pause_s, hint)
        finally:
            planned.pop(sweep.column, None)
            hint.cancel()

    def _plan(self, sweep: Sweep, pause_s: float) -> dict[str, int]:
        """Say when the sweep looks next, so that a write of an earlier instant wakes it up."""
        planned = self.runtime.next_sweep_at.setdefault(sweep.row, {})
        if sweep.column:
            planned[sweep.column] = self.runtime.estimate.now() + int(pause_s * 1000)
        return planned

    async def _rest(self, pause_s: float, *hints: asyncio.Future[None]) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        waited: list[asyncio.Future[Any]] = [stopping, *hints]
        try:
            await asyncio.wait(waited, timeout=max(0.001, pause_s), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()

    # -- one pass -------------------------------------------------------------------------------------------------

    async def sweep_once(self, name: str, batch: int | None = None) -> SweepResult:
        """One pass now, whoever holds the sweep."""
        sweep = self.sweeps.get(validation.text("sweep", name))
        if sweep is None:
            raise errors.InvalidInput(f"sweep: {name!r} is none of {', '.join(self.sweeps)}")
        if batch is not None:
            validation.integer("batch", batch, least=1, most=10_000)
        return await self._timed(sweep, batch)

    async def _timed(self, sweep: Sweep, batch: int | None = None) -> SweepResult:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            return await self._pass(sweep, self._batch(sweep) if batch is None else batch)
        finally:
            self.runtime.metrics.count("ff_scanner_cycle", scanner=sweep.name)
            self.runtime.metrics.observe("ff_scanner_cycle_duration", clock() - began, scanner=sweep.name)

    def _batch(self, sweep: Sweep) -> int:
        return self._settings.batches.get(sweep.name, self._settings.batch)

    async def _pass(self, sweep: Sweep, batch: int) -> SweepResult:
        if sweep.run_pass is not None:
            return await sweep.run_pass(batch)
        forbearance = self._forbearance.setdefault(sweep.name, FailureBackoff())
        forbearance.next_cycle()
        rows, now, next_at, place = await self._due(sweep, batch, forbearance)
        acts = await asyncio.gather(*(self._act(sweep, row) for row in rows))
        for row, act in zip(rows, acts, strict=True):
            forbearance.record(_name(row), failed=isinstance(act, errors.FabricError))
        failed = [act for act in acts if isinstance(act, errors.FabricError)]
        if failed and len(failed) == len(acts) and isinstance(failed[0], errors.StoreUnavailable):
            raise failed[0]
        processed = sum(act is True for act in acts)
        if processed or place is None:
            self._places.pop((sweep.name, self._choice), None)
        else:
            self._places[sweep.name, self._choice] = place
        return SweepResult(processed, len(failed), now, next_at)

    async def _due(
        self, sweep: Sweep, batch: int, forbearance: FailureBackoff
    ) -> tuple[list[Any], int, int | None, tuple[Any, ...] | None]:
        """The rows to act on: due, chosen, and not left alone for having failed too often; and the place behind them.

        Those that are passed over, or that nothing could be done about, never hide the ones behind them: however many
        there are, a pass goes on where the last one did nothing. There is no place behind the end.
        """
        runtime, column = self.runtime, sweep.column
        where = sweep.where + self._wheres(sweep)
        due = await runtime.retry_while_unavailable(
            lambda: runtime.store.due(sweep.row, column, limit=batch, where=where)
        )
        runtime.estimate.update(due.now)
        order = (column, *(name for name in TABLE[sweep.row].key if name != column))

        def place_of(row: Any) -> tuple[Any, ...]:
            return tuple(getattr(row, name) for name in order)

        async def behind(place: tuple[Any, ...]) -> list[Any]:
            return await runtime.scan(Scan(sweep.row, (Where(column, "<=", due.now), *where), order, place, batch))

        begins = self._places.get((sweep.name, self._choice))
        page = (begins and await behind(begins)) or due.rows
        rows = await self._wanted(sweep, page, forbearance)
        for _ in range(MAX_PAGES):
            if len(rows) >= batch or len(page) < batch:
                break
            page = await behind(place_of(page[-1]))
            rows += await self._wanted(sweep, page, forbearance)
        if len(rows) > batch:
            return rows[:batch], due.now, due.next_at, place_of(rows[batch - 1])
        return rows, due.now, due.next_at, place_of(page[-1]) if len(page) == batch else None

    def _wheres(self, sweep: Sweep) -> tuple[Where, ...]:
        """What the store can filter by."""
        if sweep.row is not Execution:
            return ()
        names = [one.namespace for one in self._choice.filters if one.namespace is not None]
        return tuple(Where("namespace", "=", name) for name in names)

    async def _wanted(self, sweep: Sweep, page: list[Any], forbearance: FailureBackoff) -> list[Any]:
        """Those of the rows that the filters choose and that have not failed too often."""
        page = [row for row in page if not forbearance.is_backing_off(_name(row))]
        if not self._choice.filters or not page or (sweep.row is not Execution and sweep.owner is None):
            return page
        owners = page
        if sweep.owner is not None:
            loaded = await self.runtime.load([Read(Execution, (getattr(row, sweep.owner),)) for row in page])
            owners = [found[0] if found else None for found in loaded.rows]
        return [row for row, owner in zip(page, owners, strict=True) if self._choice.accepts(owner)]

    async def _act(self, sweep: Sweep, row: Any) -> bool | errors.FabricError:
        if self._stopping.is_set() or sweep.act is None:
            return False
        try:
            return await sweep.act(row.execution_id if sweep.row is Execution else row)
        except errors.FabricError as failed:
            logger.warning("sweep %s: %s is left for another pass: %s", sweep.name, _name(row), failed)
            return failed
        except Exception as bug:  # one item's, and no reason to leave the others
            logger.exception("sweep %s: %s is left for another pass", sweep.name, _name(row))
            return errors.BugError(f"{sweep.name}: {bug!r}")

    async def _hold(self, sweep: Sweep, ttl_ms: int) -> int:
        """For how many milliseconds another process holds the sweep; 0 if this one does."""
        name = self._lease_name(sweep)
        return await self.runtime.decide_and_commit(
            (Read(SweepLease, (name,)),),
            lambda rows, now: sweep_lease.hold_sweep(rows[0][0] if rows[0] else None, name, self._holder, ttl_ms, now),
        )

    def _lease_name(self, sweep: Sweep) -> str:
        return self._choice.lease_name(f"{sweep.name}:{sweep.variant}" if sweep.variant else sweep.name)

    async def _leave(self, sweep: Sweep) -> None:
        """Let others do the sweep; if that cannot be told, they may when the lease is over."""
        with contextlib.suppress(errors.FabricError):
            await self.runtime.decide_and_commit(
                (Read(SweepLease, (self._lease_name(sweep),)),),
                lambda rows, _: sweep_lease.release_sweep(rows[0][0] if rows[0] else None, self._holder),
            )


def _name(row: Any) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in TABLE[type(row)].key)
