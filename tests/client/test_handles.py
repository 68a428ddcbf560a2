"""Handles and reserved tags through a server: clients carry a signature that they cannot make."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest

from flowfabric import Context, Fabric, connect, errors
from flowfabric.client import RemoteEngine
from flowfabric.engine.engine import Engine
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.api_token import ApiScope
from flowfabric.model.states import PublicState
from flowfabric.rules.durable.vote_schema import schema_tag
from flowfabric.server import ServerSettings, create_app
from flowfabric.settings import Secret
from tests.client.serving import Serving, serving
from tests.client.test_serving import ROOT, token, working
from tests.sdk import service
from tests.sdk.conftest import wait_until


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[RemoteEngine]:
    wire = httpx2.ASGITransport(app=create_app(engine))
    async with await RemoteEngine.connect("http://ff", transport=wire) as client:
        yield client


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Serving]:
    with serving(f"sqlite:///{tmp_path / 'app.db'}", ServerSettings(api_token=Secret(ROOT))) as server:
        yield server


async def claimed(client: RemoteEngine) -> Claimed:
    await client.create_execution(execution_id=client.new_execution_id())
    [held] = await client.claim_from_lanes(["default"], 1, worker_id="w", worker_instance_id="i")
    return held


async def test_a_client_carries_the_signature_and_reads_the_rest(client: RemoteEngine) -> None:
    held = await claimed(client)

    assert len(held.handle.signature) == 32
    assert held.handle.fields.lease_id == held.lease_id
    again = pickle.loads(pickle.dumps(held.handle))
    await client.complete(again)


async def test_the_handle_of_an_engine_is_worth_nothing_to_a_server(engine: Engine, client: RemoteEngine) -> None:
    await engine.create_execution(execution_id=engine.new_execution_id())
    held = await engine.claim("default", worker_id="w", worker_instance_id="i")
    assert held is not None

    assert held.handle.signature == b""
    with pytest.raises(errors.Corruption, match="not one of ours"):
        await client.complete(held.handle)
    await engine.complete(held.handle)


def asking(app: Fabric) -> Fabric:
    @app.task(name="ask")
    async def ask(ctx: Context) -> bool:
        votes = await (await ctx.approval("ship", bool, show={"what": 3}))
        return all(vote.value for vote in votes)

    return app


async def test_a_worker_asks_its_question_with_a_token_to_work(guarded: Serving) -> None:
    caller = asking(Fabric(guarded.url, token=ROOT))
    worker = asking(Fabric(guarded.url, token=await token(guarded, ApiScope.READ, ApiScope.WORK)))
    async with caller, worker, working(worker):
        run = await caller.tasks["ask"].submit()

        async def asked() -> bool:
            return await run.state() is PublicState.SUSPENDED

        await wait_until(asked)
        async with await connect(guarded.store_url) as engine:
            snapshot = await engine.describe_execution(run.id)
    assert snapshot is not None
    assert snapshot.tags["ff.show"] == '{"what":3}'
    assert schema_tag("ship") in snapshot.tags


async def test_a_submit_through_a_server_sets_no_reserved_tag(guarded: Serving) -> None:
    async with await RemoteEngine.connect(guarded.url, token=Secret(ROOT)) as client:
        e = client.new_execution_id()
        for given in ({"ff.show": "x"}, {"ff.traceparent": "x"}):
            with pytest.raises(errors.InvalidTagKey):
                await client.create_execution(execution_id=e, tags=given)
        await client.create_execution(execution_id=e)
        with pytest.raises(errors.InvalidTagKey):
            await client.set_execution_tags(e, {"ff.show": "x"})


async def test_a_handler_in_a_process_of_its_own_uses_the_handle(
    guarded: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWFABRIC_TOKEN", ROOT)
    monkeypatch.setattr(service.app, "url", guarded.url)
    async with service.app as app, working(app, slots=1):
        total, _ = await (await service.squares.submit(10)).result(30)

    assert total == 2 * sum(n * n for n in range(10))
