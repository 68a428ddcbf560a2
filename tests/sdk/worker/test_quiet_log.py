"""What a worker does not log as a problem: its own parks, leases that others took over, a store that starts late."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from flowfabric import Context, Fabric, errors
from flowfabric.engine.types import GateArgs
from flowfabric.model.gate import GateKind
from flowfabric.sdk.worker import worker as worker_page
from flowfabric.sdk.worker.heartbeat import HeldLeases
from flowfabric.sdk.worker.registration import WorkerRegistrar
from flowfabric.sdk.worker.worker import Worker
from tests.client.server_thread import ServerThread
from tests.sdk.conftest import running_worker, wait_until_true


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "flowfabric.worker")
    return caplog


class SlowPark:
    """Delays the reply to the first park until a renewal has been answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> None:
        self.parked, self.renewed = asyncio.Event(), asyncio.Event()
        loop, park, renew = asyncio.get_running_loop(), kind.open_gates_and_park, HeldLeases.renew_all

        async def slow(engine: Any, *given: Any, **ways: Any) -> Any:
            answer = await park(engine, *given, **ways)
            if not self.parked.is_set():
                self.parked.set()
                await self.renewed.wait()
                await asyncio.sleep(0)  # The result of the renewal is processed first.
            return answer

        async def noted(leases: HeldLeases, *given: Any) -> Any:
            is_after = self.parked.is_set()
            lost = await renew(leases, *given)
            if is_after:
                loop.call_soon_threadsafe(self.renewed.set)
            return lost

        monkeypatch.setattr(kind, "open_gates_and_park", slow)
        monkeypatch.setattr(HeldLeases, "renew_all", noted)


async def test_a_renewal_that_races_with_a_park_is_no_lost_lease(
    app: Fabric, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    slow = SlowPark(monkeypatch, type(await app.engine()))

    @app.task
    async def waits(ctx: Context) -> str:
        return await ctx.receive("go", str)

    async with running_worker(app, lease_ttl="2s"):
        run = await waits.submit()
        await asyncio.wait_for(slow.renewed.wait(), 20)
        await run.signal("go", "on")
        assert await run.result(20) == "on"
    assert len(await run.attempts()) == 1
    assert [one for one in log.messages if "lost its lease" in one or "not known" in one] == []


async def test_an_attempt_that_was_suspended_by_another_caller_ends(
    app: Fabric, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """A budget may suspend a run while its handler runs: the handler is cancelled a moment later."""
    monkeypatch.setattr(worker_page, "PARK_ANSWER_S", 0.1)
    begun, cancelled = asyncio.Event(), asyncio.Event()
    handles: list[Any] = []

    @app.task
    async def endless(ctx: Context) -> None:
        handles.append(ctx.handle)
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with running_worker(app, lease_ttl="600ms"):
        await endless.submit()
        await asyncio.wait_for(begun.wait(), 20)
        engine = await app.engine()
        await engine.open_gate(handles[0], GateArgs(name="mail#0", kind=GateKind.MAILBOX, mailbox="mail"))
        await engine.park(handles[0], ("mail#0",))
        await asyncio.wait_for(cancelled.wait(), 20)
    assert sum("lost its lease" in one for one in log.messages) == 1


@pytest.mark.parametrize("wraps", [False, True])
async def test_a_step_that_finds_its_lease_lost_is_no_failed_attempt(
    app: Fabric, log: pytest.LogCaptureFixture, wraps: bool
) -> None:
    attempts: list[int] = []

    @app.task(name="loses")
    async def loses(ctx: Context) -> int:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            await (await app.engine()).cancel_execution(ctx.run_id)
            try:
                await ctx.options(name="late").step(lambda: 1)
            except errors.FabricError as lost:
                if wraps:
                    raise ValueError("wrapped") from lost
                raise
        return ctx.attempt

    async with running_worker(app, lease_ttl="30s"):
        run = await loses.submit()
        # The step or the next renewal finds it first; either logs one line.
        await wait_until_true(lambda: any("is over:" in one or "lost its lease" in one for one in log.messages))
    assert await run.state() == "cancelled"
    assert not any("failed" in one for one in log.messages)
    assert not any(one.exc_info for one in log.records)


async def test_a_refusal_about_another_run_is_a_failure(app: Fabric, log: pytest.LogCaptureFixture) -> None:
    @app.task
    async def ends_other(ctx: Context, other: str) -> None:
        await (await app.engine()).cancel_execution(other)

    @app.task(lane="nobody")
    async def idle() -> None: ...

    other = await idle.submit()
    async with running_worker(app, lanes=["default"]):
        done = await ends_other.submit(other.id)
        await done.result(20)
        run = await ends_other.submit("{fp:1}:1a255fe9-f16a-4af0-8cb6-6085de2ea47d")
        with pytest.raises(Exception, match="not_found"):
            await run.result(20)
    assert any("failed" in one for one in log.messages)


async def test_a_worker_waits_for_a_store_that_starts_late(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    server = ServerThread(f"sqlite:///{tmp_path / 'app.db'}")
    app = Fabric(server.url)

    @app.task
    async def double(n: int) -> int:
        return n * 2

    worker = Worker(app)
    task = asyncio.create_task(worker.work())
    await wait_until_true(lambda: any("not started yet" in one for one in log.messages), 20)
    await asyncio.to_thread(server.start)
    try:
        assert await (await double.submit(4)).result(20) == 8
        worker.stop()
        await asyncio.wait_for(task, 20)
    finally:
        await app.close()
        await asyncio.to_thread(server.stop)


async def test_a_worker_whose_connection_breaks_during_its_start_retries(
    database: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    announce, calls = WorkerRegistrar.register, list[int]()

    async def broken(presence: WorkerRegistrar, engine: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise errors.StoreUnavailable("connection was closed in the middle of operation", source="transport")
        await announce(presence, engine)

    monkeypatch.setattr(WorkerRegistrar, "register", broken)
    app = Fabric(database)

    @app.task
    async def double(n: int) -> int:
        return n * 2

    async with app, running_worker(app):
        assert await (await double.submit(4)).result(20) == 8
    assert sum("not started yet" in one for one in log.messages) == 1


async def test_a_worker_that_is_stopped_before_its_store_is_available_stops(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flowfabric.client.lanes.CONNECT_RETRY_FOR_S", 0.05)
    app = Fabric(ServerThread("sqlite:///nowhere.db").url)

    @app.task
    async def nothing() -> None: ...

    worker = Worker(app)
    task = asyncio.create_task(worker.work())
    await wait_until_true(lambda: any("not started yet" in one for one in log.messages), 20)
    worker.stop()
    await asyncio.wait_for(task, 20)


async def test_a_worker_with_an_invalid_url_reports_it_and_exits() -> None:
    app = Fabric("postgresql://postgres@127.0.0.1:1/x?command_timeout=never")

    @app.task
    async def nothing() -> None: ...

    with pytest.raises(errors.InvalidInput, match="command_timeout"):
        await Worker(app).work()
