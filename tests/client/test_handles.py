"""Handles and reserved tags through a server: clients pass on a signature that they cannot create."""

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
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.states import PublicState
from flowfabric.rules.durable.vote_schema import schema_tag
from flowfabric.server import ServerSettings, create_app
from flowfabric.settings import Secret
from tests.client.server_thread import ServerThread, run_server
from tests.client.test_serving import ROOT, create_token
from tests.executions import claim_one
from tests.sdk import service
from tests.sdk.conftest import running_worker, wait_until


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[RemoteEngine]:
    wire = httpx2.ASGITransport(app=create_app(engine))
    async with await RemoteEngine.connect("http://ff", transport=wire) as client:
        yield client


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ServerThread]:
    with run_server(f"sqlite:///{tmp_path / 'app.db'}", ServerSettings(api_token=Secret(ROOT))) as server:
        yield server


async def claimed(client: RemoteEngine) -> Claimed:
    await client.create_execution(execution_id=client.new_execution_id())
    [held] = await client.claim_from_lanes(["default"], 1, worker_id="w", worker_instance_id="i")
    return held


async def test_a_client_passes_the_signature_of_a_handle_back(client: RemoteEngine) -> None:
    held = await claimed(client)

    assert len(held.handle.signature) == 32
    assert held.handle.fields.lease_id == held.lease_id
    again = pickle.loads(pickle.dumps(held.handle))
    await client.complete(again)


async def test_a_server_refuses_the_unsigned_handle_of_an_engine(engine: Engine, client: RemoteEngine) -> None:
    await engine.create_execution(execution_id=engine.new_execution_id())
    held = await claim_one(engine, worker_instance_id="i")

    assert held.handle.signature == b""
    with pytest.raises(errors.Corruption, match="not a handle of this system"):
        await client.complete(held.handle)
    await engine.complete(held.handle)


def define_ask(app: Fabric) -> Fabric:
    @app.task(name="ask")
    async def ask(ctx: Context) -> bool:
        votes = await (await ctx.approval("ship", bool, show={"what": 3}))
        return all(vote.value for vote in votes)

    return app


async def test_a_worker_opens_an_approval_with_the_work_scope(guarded: ServerThread) -> None:
    caller = define_ask(Fabric(guarded.url, token=ROOT))
    worker = define_ask(Fabric(guarded.url, token=await create_token(guarded, ApiScope.READ, ApiScope.WORK)))
    async with caller, worker, running_worker(worker):
        run = await caller.tasks["ask"].submit()

        async def asked() -> bool:
            return await run.state() is PublicState.SUSPENDED

        await wait_until(asked)
        async with await connect(guarded.store_url) as engine:
            snapshot = await engine.describe_execution(run.id)
    assert snapshot is not None
    assert snapshot.tags["ff.show"] == '{"what":3}'
    assert schema_tag("ship") in snapshot.tags


async def test_a_submit_through_a_server_cannot_set_a_reserved_tag(guarded: ServerThread) -> None:
    async with await RemoteEngine.connect(guarded.url, token=Secret(ROOT)) as client:
        e = client.new_execution_id()
        for tags in ({"ff.show": "x"}, {"ff.traceparent": "x"}):
            with pytest.raises(errors.InvalidTagKey):
                await client.create_execution(execution_id=e, tags=tags)
        await client.create_execution(execution_id=e)
        with pytest.raises(errors.InvalidTagKey):
            await client.set_execution_tags(e, {"ff.show": "x"})


async def test_a_handler_in_a_separate_process_uses_the_handle(
    guarded: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWFABRIC_TOKEN", ROOT)
    monkeypatch.setattr(service.app, "url", guarded.url)
    async with service.app as app, running_worker(app, slots=1):
        total, _ = await (await service.squares.submit(10)).result(30)

    assert total == 2 * sum(n * n for n in range(10))
