"""A worker process that is told to stop: it drains, hands back what does not finish, and hurries when told again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from flowfabric import Fabric, Run
from flowfabric.model.states import PublicState
from flowfabric.sdk.worker.worker import SHUTDOWN_TIMEOUT_S, Worker
from flowfabric.testing import World
from tests.sdk import service
from tests.sdk.conftest import until, until_so, working
from tests.sdk.processes import Process, process


@asynccontextmanager
async def serving(app: Fabric, *, grace: str) -> AsyncIterator[Process]:
    """A worker process of the service, whose tasks can be submitted here meanwhile."""
    before = service.app.bind(await app.engine())
    try:
        with process(app.url, 2, grace) as worker:
            yield worker
    finally:
        service.app.unbind(before)


async def until_said(worker: Process, words: str) -> None:
    def said() -> bool:
        heard = worker.heard(words)
        assert heard or worker.process.poll() is None, "".join(worker.said)
        return heard

    await until_so(said, 30)


async def test_sigterm_finishes_what_runs_and_takes_nothing_more(file_app: Fabric) -> None:
    async with serving(file_app, grace="30s") as worker:
        run = await service.quick.submit(0.5)
        await until_said(worker, "began quick")
        worker.terminate()
        await until_said(worker, "draining")
        later = await service.quick.submit(0.0)
        assert worker.join() == 0
        assert await run.result(5) == "done"
        assert await later.state() is PublicState.WAITING


async def test_what_does_not_finish_in_time_is_handed_back_and_costs_no_attempt(shared_app: Fabric) -> None:
    async with serving(shared_app, grace="200ms") as worker:
        run = await service.endless.submit()
        await until_said(worker, "began endless 0")
        worker.terminate()
        assert worker.join() == 0
        assert worker.heard("cancelled endless")
        await _is_claimable_as_the_same_attempt(shared_app, run)


async def test_a_second_sigterm_hurries(file_app: Fabric) -> None:
    async with serving(file_app, grace="1h") as worker:
        run = await service.endless.submit()
        await until_said(worker, "began endless 0")
        worker.terminate()
        await until_said(worker, "draining")
        worker.terminate()
        assert worker.join() == 0
        await _is_claimable_as_the_same_attempt(file_app, run)


async def test_a_thread_that_does_not_listen_does_not_keep_the_process_from_ending(file_app: Fabric) -> None:
    async with serving(file_app, grace="100ms") as worker:
        run = await service.deaf.submit()
        await until_said(worker, "began deaf 0")
        worker.terminate()
        assert worker.join() == 0
        await _is_claimable_as_the_same_attempt(file_app, run)


async def test_a_handler_that_does_not_listen_does_not_keep_the_process_from_ending(file_app: Fabric) -> None:
    async with serving(file_app, grace="100ms") as worker:
        run = await service.deaf_to_cancels.submit()
        await until_said(worker, "began deaf_to_cancels")
        worker.terminate()
        assert worker.join() == 0
        assert worker.heard("not listening")
        assert any("the process ends without it" in line for line in worker.said)
        await _is_claimable_as_the_same_attempt(file_app, run)


async def test_a_store_that_is_away_does_not_keep_a_worker_from_ending() -> None:
    """Nobody hears of what it hands back; how much that is makes no difference."""
    app = Fabric("memory://")

    @app.task
    async def endless(number: int) -> None:
        await asyncio.Event().wait()

    async with World(app, workers=0) as world:
        runs = await endless.submit_many(range(20))
        worker = Worker(app, slots=20, grace="1s")
        working = asyncio.create_task(worker.run_until_told())
        await until_so(lambda: worker.running == len(runs))
        world.store.go_down()
        worker.stop()
        told_at = world.now_ms()
        await working
        assert world.now_ms() - told_at <= 1000 + 2 * 1000 * SHUTDOWN_TIMEOUT_S, "to take leave, and to close"


async def _is_claimable_as_the_same_attempt(app: Fabric, run: Run[Any]) -> None:
    engine = await app.engine()
    assert await run.state() in (PublicState.DELAYED, PublicState.WAITING)
    assert await engine.read_total_attempt_count(run.id) == 1
    async with working(app, lanes=["default"]):  # it knows no such task: claiming is enough

        async def touched() -> bool:
            [attempt] = await run.attempts()
            return attempt.lease_epoch >= 2

        await until(touched)
    assert await engine.read_total_attempt_count(run.id) == 1
