"""A worker process drains on the first signal, releases what does not finish, and exits at once on the second."""

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
from tests.sdk.conftest import running_worker, wait_until, wait_until_true
from tests.sdk.processes import Process, process


@asynccontextmanager
async def running_service(app: Fabric, *, grace: str) -> AsyncIterator[Process]:
    """A worker process of the service, whose tasks can be submitted here meanwhile."""
    before = service.app.bind(await app.engine())
    try:
        with process(app.url, 2, grace) as worker:
            yield worker
    finally:
        service.app.unbind(before)


async def wait_for_output(worker: Process, words: str) -> None:
    def said() -> bool:
        printed = worker.printed(words)
        assert printed or worker.process.poll() is None, "".join(worker.said)
        return printed

    await wait_until_true(said, 30)


async def test_sigterm_finishes_running_handlers_and_claims_nothing_more(file_app: Fabric) -> None:
    async with running_service(file_app, grace="30s") as worker:
        run = await service.quick.submit(0.5)
        await wait_for_output(worker, "began quick")
        worker.terminate()
        await wait_for_output(worker, "draining")
        later = await service.quick.submit(0.0)
        assert worker.join() == 0
        assert await run.result(5) == "done"
        assert await later.state() is PublicState.WAITING


async def test_a_handler_that_does_not_finish_in_time_is_released_and_costs_no_attempt(shared_app: Fabric) -> None:
    async with running_service(shared_app, grace="200ms") as worker:
        run = await service.endless.submit()
        await wait_for_output(worker, "began endless 0")
        worker.terminate()
        assert worker.join() == 0
        assert worker.printed("cancelled endless")
        await _is_claimable_as_the_same_attempt(shared_app, run)


async def test_a_second_sigterm_stops_at_once(file_app: Fabric) -> None:
    async with running_service(file_app, grace="1h") as worker:
        run = await service.endless.submit()
        await wait_for_output(worker, "began endless 0")
        worker.terminate()
        await wait_for_output(worker, "draining")
        worker.terminate()
        assert worker.join() == 0
        await _is_claimable_as_the_same_attempt(file_app, run)


async def test_a_thread_that_ignores_cancellation_does_not_keep_the_process_alive(file_app: Fabric) -> None:
    async with running_service(file_app, grace="100ms") as worker:
        run = await service.deaf.submit()
        await wait_for_output(worker, "began deaf 0")
        worker.terminate()
        assert worker.join() == 0
        await _is_claimable_as_the_same_attempt(file_app, run)


async def test_a_handler_that_ignores_cancellation_does_not_keep_the_process_alive(file_app: Fabric) -> None:
    async with running_service(file_app, grace="100ms") as worker:
        run = await service.deaf_to_cancels.submit()
        await wait_for_output(worker, "began deaf_to_cancels")
        worker.terminate()
        assert worker.join() == 0
        assert worker.printed("not listening")
        assert any("the process ends without it" in line for line in worker.said)
        await _is_claimable_as_the_same_attempt(file_app, run)


async def test_an_unavailable_store_does_not_keep_a_worker_alive() -> None:
    """The releases are lost; their number does not matter."""
    app = Fabric("memory://")

    @app.task
    async def endless(number: int) -> None:
        await asyncio.Event().wait()

    async with World(app, workers=0) as world:
        runs = await endless.submit_many(range(20))
        worker = Worker(app, slots=20, grace="1s")
        working = asyncio.create_task(worker.run_until_told())
        await wait_until_true(lambda: worker.running == len(runs))
        world.store.go_down()
        worker.stop()
        told_at = world.now_ms()
        await working
        assert world.now_ms() - told_at <= 1000 + 2 * 1000 * SHUTDOWN_TIMEOUT_S, "to take leave, and to close"


async def _is_claimable_as_the_same_attempt(app: Fabric, run: Run[Any]) -> None:
    engine = await app.engine()
    assert await run.state() in (PublicState.DELAYED, PublicState.WAITING)
    assert await engine.read_total_attempt_count(run.id) == 1
    async with running_worker(app, lanes=["default"]):  # It knows no such task: the claim is enough.

        async def touched() -> bool:
            [attempt] = await run.attempts()
            return attempt.lease_epoch >= 2

        await wait_until(touched)
    assert await engine.read_total_attempt_count(run.id) == 1
