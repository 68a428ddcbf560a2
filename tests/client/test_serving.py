"""Apps and workers on a real server: tokens, scopes, restarts, stops."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfabric import Budget, Context, Fabric, Limit, errors
from flowfabric.connector import open_engine
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.states import PublicState
from flowfabric.sdk.run import OutputFrame
from flowfabric.sdk.worker.worker import Worker
from flowfabric.server import ServerSettings
from flowfabric.settings import Secret
from tests.client.server_thread import ServerThread, run_server
from tests.sdk.conftest import running_worker

ROOT = "a-long-secret-that-nobody-guesses"
APP = (ApiScope.READ, ApiScope.SUBMIT, ApiScope.WORK)


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'app.db'}"


@pytest.fixture
def server(store_url: str) -> Iterator[ServerThread]:
    with run_server(store_url) as server:
        yield server


@pytest.fixture
def guarded(store_url: str) -> Iterator[ServerThread]:
    """A server that requires tokens."""
    with run_server(store_url, ServerSettings(api_token=Secret(ROOT))) as server:
        yield server


async def create_token(server: ServerThread, *scopes: ApiScope, namespaces: list[str] | None = None) -> str:
    async with await open_engine(server.store_url) as engine:
        return (await engine.make_api_token("app", scopes, namespaces=namespaces)).token


def define_double(app: Fabric) -> Fabric:
    @app.task(name="double")
    async def double(ctx: Context, n: int) -> int:
        await ctx.stream("out").write(str(n))
        return await ctx.options(name="twice").step(lambda: n * 2)

    return app


# -- tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_a_missing_or_wrong_token_is_refused_when_connecting(guarded: ServerThread, token: str | None) -> None:
    app = Fabric(guarded.url, token=token)
    with pytest.raises(errors.Unauthorized, match="Authorization"):
        await app.engine()


@pytest.mark.parametrize("variable", ["FLOWFABRIC_TOKEN", "FF_API_TOKEN"])
async def test_a_token_is_read_from_the_environment(
    guarded: ServerThread, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, ROOT)
    async with define_double(Fabric(guarded.url)) as app, running_worker(app):
        assert await (await app.tasks["double"].submit(4)).result(20) == 8


async def test_an_app_works_with_the_scopes_read_submit_and_work(
    guarded: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    token = await create_token(guarded, *APP)
    with caplog.at_level(logging.DEBUG):
        async with define_double(Fabric(guarded.url, token=token)) as app, running_worker(app):
            run = await app.tasks["double"].submit(4)
            assert await run.result(20) == 8
            assert [piece.text async for piece in run.stream("out") if isinstance(piece, OutputFrame)] == ["4"]
            with pytest.raises(errors.Unauthorized, match="token lacks scope: operate"):
                await run.cancel()
    assert token not in caplog.text
    assert "could not be deregistered" not in caplog.text, "a worker may deregister"


async def test_a_token_with_the_submit_scope_can_only_submit(guarded: ServerThread) -> None:
    token = await create_token(guarded, ApiScope.SUBMIT)
    async with define_double(Fabric(guarded.url, token=token)) as app:
        run = await app.tasks["double"].submit(1)
        with pytest.raises(errors.Unauthorized, match="token lacks scope: read"):
            await run.state()
        with pytest.raises(errors.Unauthorized, match="token lacks scope: work"):
            await Worker(app).work()


async def test_a_token_of_a_namespace_sees_no_other_namespace(guarded: ServerThread) -> None:
    token = await create_token(guarded, *APP, namespaces=["mine"])
    async with define_double(Fabric(guarded.url, token=ROOT)) as others:
        foreign = await others.tasks["double"].submit(1)
    async with define_double(Fabric(guarded.url, token=token, namespace="mine")) as app:
        await app.tasks["double"].submit(1)
        with pytest.raises(errors.NotFound):
            await app.find(foreign.id).state()
    async with define_double(Fabric(guarded.url, token=token, namespace="theirs")) as app:
        with pytest.raises(errors.Unauthorized, match="namespace theirs"):
            await app.tasks["double"].submit(1)


async def test_workers_of_two_namespaces_share_a_lane_and_claim_only_their_own_work(guarded: ServerThread) -> None:
    ours, theirs = [await create_token(guarded, *APP, namespaces=[name]) for name in ("ours", "theirs")]
    async with (
        define_double(Fabric(guarded.url, token=ours, namespace="ours")) as app,
        define_double(Fabric(guarded.url, token=theirs, namespace="theirs")) as other,
    ):
        foreign = await other.tasks["double"].submit(2)
        async with running_worker(app):
            assert await (await app.tasks["double"].submit(1)).result(20) == 2
            assert await foreign.state() is PublicState.WAITING
        async with running_worker(other):
            assert await foreign.result(20) == 4


async def test_a_run_can_cancel_its_children_without_the_operate_scope(guarded: ServerThread) -> None:
    token = await create_token(guarded, *APP)
    app = Fabric(guarded.url, token=token)
    found: dict[str, str] = {}

    @app.task
    async def wait(ctx: Context, seconds: float) -> float:
        await ctx.sleep(seconds)
        return seconds

    @app.task
    async def parent(ctx: Context, stranger: str) -> float:
        first = await ctx.race(wait.s(0.01), wait.s(3600), wait.s(3600))
        child = await ctx.spawn(wait, 3600)
        await child.cancel("not needed")
        found["state"] = await child.state()
        with pytest.raises(errors.Unauthorized, match="token lacks scope: operate"):
            await ctx.app.find(stranger).cancel()
        return first

    async with app, running_worker(app):
        stranger = await wait.submit(3600)
        run = await parent.submit(stranger.id)
        assert await run.result(20) == 0.01
        runs = (await (await app.engine()).search_executions()).executions
        states = sorted(one.public_state.value for one in runs if one.execution_id not in (stranger.id, run.id))
    assert states == ["cancelled", "cancelled", "cancelled", "completed"]
    assert found["state"] == PublicState.CANCELLED


async def test_budgets_and_limits_are_declared_by_an_operator_and_used_by_others(guarded: ServerThread) -> None:
    def declaring(token: str, calls: int = 5) -> Fabric:
        app, budget = Fabric(guarded.url, token=token), Budget("calls", {"calls": calls})

        @app.task(name="spend", budgets=[budget], limits=[Limit(concurrency=2)])
        async def spend(ctx: Context) -> None:
            await ctx.spend(budget, calls=1)
            async with ctx.reserve(budget, calls=2) as reserved:
                await reserved.spend(calls=1)

        return app

    lesser = await create_token(guarded, *APP)
    async with declaring(lesser) as app:
        with pytest.raises(errors.Unauthorized, match="token lacks scope: operate"):
            await app.tasks["spend"].submit()
    async with declaring(ROOT) as app:
        await app.declare(await app.engine())
    async with declaring(lesser) as app, running_worker(app):
        await (await app.tasks["spend"].submit()).result(20)
        status = await (await app.engine()).get_budget_status(Budget("calls", {"calls": 5}).id(app.namespace))
        assert (status.usage, status.reserved) == ({"calls": 2}, {})
    async with declaring(lesser, calls=500) as app:
        await app.tasks["spend"].submit()
        status = await (await app.engine()).get_budget_status(Budget("calls", {"calls": 500}).id(app.namespace))
        assert status.hard_limits == {"calls": 5}, "the declaration of an operator is kept"


# -- restarts -----------------------------------------------------------------------------------------------------


async def test_a_refused_connection_is_reported_soon(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.client.lanes.CONNECT_RETRY_FOR_S", 0.1)
    with pytest.raises(errors.StoreUnavailable, match="server: "):
        await Fabric(ServerThread(store_url).url).engine()


async def test_a_run_continues_over_a_restart_of_the_server(server: ServerThread) -> None:
    app = Fabric(server.url)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def long(ctx: Context) -> list[str]:
        steps = [await ctx.options(name="before").step(lambda: "before")]
        begun.set()
        await go_on.wait()
        await ctx.stream("out").write("after")
        return [*steps, await ctx.options(name="after").step(lambda: "after"), str(ctx.attempt)]

    async with app, running_worker(app, lease_ttl="20s"):
        run = await long.submit()
        waiting = asyncio.create_task(run.result(60))
        await asyncio.wait_for(begun.wait(), 20)
        await asyncio.to_thread(server.stop)
        go_on.set()  # its next writes are refused connections
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.start)
        assert await waiting == ["before", "after", "0"]
        assert len(await run.attempts()) == 1
        assert await (await long.submit()).result(20) == ["before", "after", "0"], "and the worker claims again"


async def test_an_idle_worker_stops_at_once(server: ServerThread) -> None:
    async with define_double(Fabric(server.url)) as app:
        for pause_s in (0.0, 0.02, 0.3):  # before, while and after its claim reaches the server
            began = time.monotonic()
            async with running_worker(app):
                await asyncio.sleep(pause_s)
            assert time.monotonic() - began < 5, "a claim waits for 10 s"
        assert server.app is not None
        assert server.app.waiting_claims == {}


async def test_a_server_with_waiting_clients_stops_at_once(server: ServerThread) -> None:
    async with define_double(Fabric(server.url)) as app, running_worker(app):
        run = await app.tasks["double"].options(delay="1h").submit(1)
        waiting = asyncio.create_task(run.result(20))
        while server.app is None or not server.app.waiting_claims:  # noqa: ASYNC110 - the server is in another thread
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await asyncio.to_thread(server.restart)
        assert time.monotonic() - began < 8
        assert await run.state() is PublicState.DELAYED
        waiting.cancel()


async def test_two_hundred_results_are_awaited_with_few_connections(server: ServerThread) -> None:
    app = Fabric(server.url)

    @app.task
    async def number(n: int) -> int:
        return n

    async with app:
        runs = await number.submit_many(range(200))
        waiting = [asyncio.create_task(run.result(60)) for run in runs]
        with pytest.raises(TimeoutError):
            await runs[0].result(0.05)
        with pytest.raises(errors.NotFound):
            await app.find(runs[0].id[:-4] + "ffff").result(20)
        async with running_worker(app, slots=50):
            assert await asyncio.gather(*waiting) == list(range(200))


async def test_an_input_above_the_json_limit_is_sent_as_octets(server: ServerThread) -> None:
    app = Fabric(server.url)

    @app.task
    async def length(text: str) -> int:
        return len(text)

    async with app, running_worker(app):
        assert await (await length.submit("x" * 2_000_000)).result(20) == 2_000_000
        with pytest.raises(errors.PayloadTooLarge):
            await length.submit("x" * 20_000_000)
