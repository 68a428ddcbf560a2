"""The inbox of approvals: one read shows what is asked, who has answered, and until when."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.rules.durable.approval_views import Approver
from flowfabric.rules.durable.vote_schema import schema_tag
from tests.scenarios.durable_function import HOUR, DurableFunction, opened
from tests.scenarios.env import Env
from tests.scenarios.pages import all_pages
from tests.scenarios.waits import Waits

ASK = '{"type":"boolean"}'


async def test_an_open_approval_shows_its_question_and_its_votes(function: DurableFunction, env: Env) -> None:
    engine = env.engine
    tags = {"ff.show": '{"amount":3}', schema_tag("approve"): ASK}
    await engine.set_tags(function.claim.handle, tags)
    gate = opened(await function.approval("approval:approve#0", "approve.1", "approve.2", expires_in_ms=HOUR))
    await function.park("approval:approve#0")
    opened_at = env.now
    env.clock.advance_ms(7)
    await function.vote(gate, "approve.2", payload=b"true")

    reads = env.store.calls["scan"], env.store.calls["load"]
    page = await engine.list_approvals()

    assert (env.store.calls["scan"] - reads[0], env.store.calls["load"] - reads[1]) == (1, 1)
    [approval] = page.approvals
    assert (approval.execution_id, approval.execution_kind, approval.namespace) == (function.e, "task", "default")
    assert (approval.gate, approval.name, approval.need) == ("approval:approve#0", "approve", 2)
    assert (approval.opened_at, approval.expires_at) == (opened_at, opened_at + HOUR)
    assert (approval.shown, approval.schema) == ({"amount": 3}, {"type": "boolean"})
    first, second = (link.waitpoint_id for link in gate.links)
    assert approval.approvers == [Approver(first, "approve.1", False), Approver(second, "approve.2", True)]
    assert [(vote.waitpoint_id, vote.by, vote.at, vote.payload) for vote in approval.votes] == [
        (second, "approve.2", env.now, b"true")
    ]

    await function.vote(gate, "approve.1", payload=b"true")
    assert (await engine.list_approvals()).approvals == []


async def test_approvals_are_listed_by_timeout_in_pages_within_namespaces(env: Env, waits: Waits) -> None:
    asked = []
    for number, namespace in enumerate(("n1", "n2", "n1")):
        claim = await env.create_and_claim(namespace=namespace)
        function = DurableFunction(env, waits, claim.execution_id, claim)
        if number == 1:
            await function.timer("nap", HOUR)
            await function.park("nap")
            continue
        await function.approval("approve", "ana", expires_in_ms=HOUR * (3 - number))
        await function.park("approve")
        asked.append(function.e)

    pages = await all_pages(env.engine.list_approvals, limit=1)
    found = [one.execution_id for page in pages for one in page.approvals]

    assert found == asked[::-1]
    assert [one.execution_id for one in (await env.engine.list_approvals(namespace="n1")).approvals] == found
    assert (await env.engine.list_approvals(namespace="n2")).approvals == []
    assert (await env.engine.list_approvals(namespaces=["n2"])).approvals == []
    assert (await env.engine.list_approvals(namespaces=["n2"], namespace="n1")).approvals == []
    with pytest.raises(errors.InvalidInput):
        await env.engine.list_approvals(cursor="x")


async def test_the_approvals_of_one_execution_are_listed_by_its_id(function: DurableFunction, env: Env) -> None:
    engine = env.engine
    other = await env.create_and_claim(namespace="n1")
    assert (await engine.list_approvals(execution_id=function.e)).approvals == []
    gate = opened(await function.approval("approve", "ana", "bob"))
    await function.vote(gate, "bob")
    [approval] = (await engine.list_approvals(execution_id=function.e)).approvals
    assert (approval.execution_id, [vote.by for vote in approval.votes]) == (function.e, ["bob"])
    assert (await engine.list_approvals(execution_id=other.execution_id)).approvals == []
    assert (await engine.list_approvals(execution_id=function.e, namespaces=["n1"])).approvals == []
    with pytest.raises(errors.InvalidInput):
        await engine.list_approvals(execution_id="x")


async def test_an_approval_is_listed_while_another_branch_still_runs(function: DurableFunction, env: Env) -> None:
    gate = opened(await function.approval("approve", "ana", expires_in_ms=HOUR))
    [approval] = (await env.engine.list_approvals()).approvals
    assert (approval.execution_id, approval.gate) == (function.e, "approve")

    await function.timer("nap", HOUR)
    await function.park("nap")
    assert len((await env.engine.list_approvals()).approvals) == 1
    await function.vote(gate, "ana")
    assert (await env.engine.list_approvals()).approvals == []


async def test_a_function_that_has_ended_has_no_open_approval(function: DurableFunction, env: Env) -> None:
    await function.approval("approve", "ana")
    await env.engine.fail(function.claim.handle, reason="no", category="permanent")
    assert (await env.engine.list_approvals()).approvals == []

    await env.engine.replay_execution(function.e)
    assert [one.execution_id for one in (await env.engine.list_approvals()).approvals] == [function.e]


async def test_a_question_that_has_expired_is_not_listed_and_another_one_of_the_same_function_is(
    function: DurableFunction, env: Env
) -> None:
    await function.approval("soon", "ana", expires_in_ms=1000)
    await function.approval("later", "ana", expires_in_ms=HOUR)
    assert {one.gate for one in (await env.engine.list_approvals()).approvals} == {"soon", "later"}
    env.clock.advance_ms(1000)
    assert [one.gate for one in (await env.engine.list_approvals()).approvals] == ["later"]
