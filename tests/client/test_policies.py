"""A policy is taken and refused through a server as it is on a store, in whatever form it is given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from flowfabric import CreateExecution, errors
from flowfabric.client import RemoteEngine
from flowfabric.engine.engine import Engine
from flowfabric.server import create_app
from flowfabric.stores.memory.store import MemoryStore


@pytest.fixture(params=["on a store", "through a server"])
async def caller(request: pytest.FixtureRequest) -> AsyncIterator[Engine | RemoteEngine]:
    store = MemoryStore()
    await store.open(migrate=True)
    async with Engine(store) as engine:
        await engine.ensure_signing_key("00" * 32)
        if request.param == "on a store":
            yield engine
            return
        async with RemoteEngine("http://ff", transport=httpx2.ASGITransport(app=create_app(engine))) as remote:
            yield remote


def ask(engine: Engine, policy: Any) -> CreateExecution:
    return CreateExecution(
        execution_id=engine.new_execution_id(),
        partition=0,
        namespace="default",
        lane_id="default",
        execution_kind="task",
        policy=policy,
    )


@pytest.mark.parametrize("policy", ["", "{}", '{"max_replay_count": 1}', {"max_replay_count": 1}])
async def test_a_policy_may_be_a_text_or_a_document(caller: Engine, policy: Any) -> None:
    wanted = ask(caller, policy)

    created = await caller.create(wanted)

    assert created.execution_id == wanted.execution_id


@pytest.mark.parametrize(
    ("policy", "detail"),
    [("{", "malformed"), ("\ud800", "malformed"), ("[]", "not_object"), ("null", "not_object"), ("5", "not_object")],
)
async def test_what_is_no_policy_is_refused_by_the_same_name(caller: Engine, policy: str, detail: str) -> None:
    with pytest.raises(errors.InvalidPolicyJson) as caught:
        await caller.create(ask(caller, policy))

    assert caught.value.detail == detail
