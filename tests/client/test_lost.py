"""Answers that never arrive, connections that break, a server that forgot: nothing is done twice, nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from flowfabric import errors
from flowfabric.client import RemoteEngine, results
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.durable import OpenedGate, ParkResult
from flowfabric.engine.types import CreateExecution, GateArgs, MessageArgs
from flowfabric.model.answers.execution import Claimed, Created, Duplicate, RetryScheduled
from flowfabric.model.gate import GateKind
from flowfabric.server import App, ServerSettings, create_app

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w:1"}
RETRY = '{"retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 60000}}}'


class Losing(httpx2.AsyncBaseTransport):
    """A network that loses the next answers of some requests, or does not let them through at all."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.lost: dict[str, int] = {}  # by the end of a path: how many answers
        self.refused = 0  # connections
        self.heard: list[str] = []
        self.forgetful = False  # whether the server is another process afterwards

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.refused:
            self.refused -= 1
            raise httpx2.ConnectError("nobody listens")
        response = await httpx2.ASGITransport(app=self.app).handle_async_request(request)
        path = request.url.path
        self.heard.append(path)
        for end, count in self.lost.items():
            if count and path.endswith(end):
                self.lost[end] -= 1
                if self.forgetful:
                    self.app = create_app(self.app.engine, self.app.settings)
                raise httpx2.ReadError("the connection broke")
        return response


@pytest.fixture
def wire(engine: Engine) -> Losing:
    return Losing(create_app(engine))


@pytest.fixture
async def remote(wire: Losing) -> AsyncIterator[RemoteEngine]:
    async with RemoteEngine("http://ff", transport=wire, retry_for_s=5) as remote:
        yield remote


def ask(engine: RemoteEngine, **given: Any) -> CreateExecution:
    return CreateExecution(
        execution_id=engine.new_execution_id(),
        partition=0,
        namespace="default",
        lane_id="default",
        execution_kind="t",
        **given,
    )


async def claimed(remote: RemoteEngine, **given: Any) -> Claimed:
    await remote.create(ask(remote, **given))
    [work] = await remote.claim_from_lanes(["default"], 1, **WORKER)
    return work


async def count(engine: Engine) -> int:
    return len((await engine.search_executions()).executions)


@pytest.mark.parametrize("forgetful", [False, True])
async def test_a_create_whose_answer_is_lost_creates_once(
    remote: RemoteEngine, wire: Losing, engine: Engine, forgetful: bool
) -> None:
    wire.lost, wire.forgetful = {"/executions": 2, "/bulk": 1}, forgetful

    answer = await remote.create(ask(remote))
    many = await remote.create_executions([ask(remote) for _ in range(3)])

    assert wire.heard.count("/v1/executions") == 3
    assert isinstance(answer, Duplicate if forgetful else Created)
    assert [type(one) for one in many] == [type(answer)] * 3
    assert await count(engine) == 4


async def test_a_claim_whose_answer_is_lost_is_told_again(remote: RemoteEngine, wire: Losing, engine: Engine) -> None:
    run = ask(remote)
    await remote.create(run)
    wire.lost = {"/claims": 1}

    with pytest.raises(errors.StoreUnavailable) as lost:
        await remote.claim_from_lanes(["default"], 1, **WORKER)
    assert lost.value.in_doubt
    [work] = await remote.claim_from_lanes(["default"], 1, **WORKER)

    assert work.execution_id == run.execution_id
    assert (work.lease_epoch, await engine.read_total_attempt_count(run.execution_id)) == (1, 1)
    assert await remote.claim_from_lanes(["default"], 1, **WORKER) == [], "the next claim is another one"
    await remote.complete(work.handle, result=b"1")


async def test_a_claim_that_a_server_forgot_is_left_to_lapse(
    remote: RemoteEngine, wire: Losing, engine: Engine
) -> None:
    run = ask(remote)
    await remote.create(run)
    wire.lost, wire.forgetful = {"/claims": 1}, True

    with pytest.raises(errors.StoreUnavailable):
        await remote.claim_from_lanes(["default"], 1, **WORKER, lease_ttl_ms=20)
    async with asyncio.timeout(10):
        while not (work := await remote.claim_from_lanes(["default"], 1, **WORKER, max_wait_ms=50)):
            await engine.sweep_once("lease_expiry")

    assert [one.execution_id for one in work] == [run.execution_id]


@pytest.mark.parametrize("forgetful", [False, True])
async def test_a_completion_whose_answer_is_lost_is_success(
    remote: RemoteEngine, wire: Losing, forgetful: bool
) -> None:
    work = await claimed(remote)
    wire.lost, wire.forgetful = {"/complete": 1}, forgetful

    await remote.complete(work.handle, result=b"7", encoding="json")

    ended = await remote.await_end(work.execution_id, max_wait_ms=1000)
    assert ended is not None
    assert ended.result == b"7"


async def test_a_failure_whose_answer_is_lost_counts_once(remote: RemoteEngine, wire: Losing, engine: Engine) -> None:
    work = await claimed(remote, policy=RETRY)
    wire.lost = {"/fail": 2}

    answer = await remote.fail(work.handle, reason="no")

    assert isinstance(answer, RetryScheduled)
    assert answer.next_attempt_index == 1
    assert wire.heard.count("/v1/leases/fail") == 3
    assert len(await engine.attempt_history(work.execution_id)) == 1


async def test_frames_whose_answer_is_lost_stand_once_and_in_order(remote: RemoteEngine, wire: Losing) -> None:
    work = await claimed(remote)
    wire.lost = {"/frames": 2}

    await asyncio.gather(*(remote.append_frame(work.handle, b"%d" % number) for number in range(200)))

    page = await remote.tail_stream(work.execution_id, 0, count_limit=1000)
    assert [frame.fields["payload"] for frame in page.frames] == [str(number) for number in range(200)]
    assert wire.heard.count("/v1/leases/frames") < 10, "they travelled together"


@pytest.mark.parametrize("forgetful", [False, True])
async def test_a_park_whose_answer_is_lost_is_parked(
    remote: RemoteEngine, wire: Losing, engine: Engine, forgetful: bool
) -> None:
    work = await claimed(remote)
    gate = GateArgs(name="mail#0", kind=GateKind.MAILBOX, mailbox="mail")
    wire.lost, wire.forgetful = {"/gates": 1, "/park": 1, "/messages": 1}, forgetful

    assert isinstance(await remote.open_gate(work.handle, gate), OpenedGate)
    assert isinstance(await remote.park(work.handle, ("mail#0",)), ParkResult)
    assert await engine.read_execution_state(work.execution_id) == "suspended"
    mail = MessageArgs(execution_id=work.execution_id, mailbox="mail", message_id=remote.minter.uuid(), payload=b"1")
    await remote.send_message(mail)

    [again] = await remote.claim_from_lanes(["default"], 1, **WORKER, max_wait_ms=1000)
    waits = await remote.read_waits(again.execution_id)
    assert (again.attempt_index, waits.memos["mail#0"].payload, waits.open) == (0, b"1", {})


async def test_a_park_that_is_refused_at_once_is_an_error(remote: RemoteEngine, engine: Engine) -> None:
    work = await claimed(remote)
    await remote.open_gate(work.handle, GateArgs(name="mail#0", kind=GateKind.MAILBOX, mailbox="mail"))
    await engine.revoke_lease(work.execution_id)

    with pytest.raises(errors.FabricError) as refused:
        await remote.park(work.handle, ("mail#0",))
    assert refused.value.kind == "lease_revoked"


async def test_connections_that_fail_are_tried_again_until_patience_is_over(
    remote: RemoteEngine, wire: Losing, engine: Engine
) -> None:
    wire.refused = 3
    await remote.create(ask(remote))

    wire.refused = 1000
    remote.transport.retry_for_s = 0.2
    with pytest.raises(errors.StoreUnavailable, match="nobody listens") as away:
        await remote.create(ask(remote))

    assert (away.value.in_doubt, away.value.retryable) == (False, True)
    assert await count(engine) == 1
    assert len(wire.heard) == 1


async def test_a_write_that_may_have_been_heard_leaves_doubt(remote: RemoteEngine, wire: Losing) -> None:
    remote.transport.retry_for_s = 0.2
    wire.lost = {"/executions": 1000}

    with pytest.raises(errors.StoreUnavailable) as away:
        await remote.create(ask(remote))
    assert away.value.in_doubt


async def test_too_many_requests_are_asked_again_when_the_server_says_so(engine: Engine) -> None:
    wire = Losing(create_app(engine, ServerSettings(rate_limit=2.0)))
    async with RemoteEngine("http://ff", transport=wire, retry_for_s=10) as remote:
        for _ in range(3):
            await remote.create(ask(remote))
    assert await count(engine) == 3
    assert len(wire.heard) > 3


async def test_an_answer_is_told_again_only_to_whoever_asked(engine: Engine) -> None:
    app = create_app(engine)
    heads = {"idempotency-key": "k", "content-type": "application/json"}
    body = {"worker_instance_id": "w:1", "lanes": ["default"]}
    await engine.create_execution(execution_id=engine.new_execution_id())
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://ff") as client:
        first = await client.post("/v1/workers/w/claims", json=body, headers=heads)
        again = await client.post("/v1/workers/w/claims", json=body, headers=heads)
        other = await client.post("/v1/workers/w/claims", json=body, headers=heads | {"authorization": "Bearer x"})

    assert len(first.json()["claimed"]) == 1
    assert again.json() == first.json()
    assert other.json() == {"claimed": []}


async def test_a_repetition_waits_for_the_first_and_a_fault_is_not_remembered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, calls, go_on = create_app(engine), list[str](), asyncio.Event()
    known = engine.cancel_execution

    async def slow(execution_id: str, **given: Any) -> Any:
        calls.append(execution_id)
        await go_on.wait()
        if len(calls) == 1:
            raise errors.StoreUnavailable("gone", source="transport")
        return await known(execution_id, **given)

    monkeypatch.setattr(engine, "cancel_execution", slow)
    run = engine.new_execution_id()
    await engine.create_execution(execution_id=run)
    async with RemoteEngine("http://ff", transport=Losing(app)) as remote:
        path, body = f"/v1/executions/{run}/cancel", {"execution_id": run, "reason": ""}
        asks = [
            asyncio.create_task(remote.transport.request("POST", path, body, idempotency_key="k")) for _ in range(3)
        ]
        await asyncio.sleep(0.05)
        assert len(calls) == 1
        go_on.set()
        answers = await asyncio.gather(*asks, return_exceptions=True)

    assert [type(one).__name__ for one in answers] == ["StoreUnavailable", "HttpResponse", "HttpResponse"]
    assert len(calls) == 2


async def test_a_newcomer_is_seen_to_although_the_last_looker_leaves_that_very_moment(
    remote: RemoteEngine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be looked at when a request for others has heard something: up to half a minute later."""
    monkeypatch.setattr(results, "MAX_CONCURRENT_POLLS", 1)
    moment, sleep = asyncio.Event(), asyncio.sleep

    async def until_the_moment(seconds: float) -> None:
        await (moment.wait() if seconds == results.OVERFLOW_POLL_S else sleep(seconds))

    async def newcomer(execution_id: str) -> Any:
        await moment.wait()
        return await remote.await_end(execution_id, max_wait_ms=20_000)

    monkeypatch.setattr(asyncio, "sleep", until_the_moment)
    long, short = await claimed(remote), await claimed(remote)
    await engine.complete(short.handle)
    waiting = asyncio.create_task(remote.await_end(long.execution_id, max_wait_ms=20_000))
    await sleep(0.01)
    assert await remote.await_end(long.execution_id[:-1] + "0", max_wait_ms=1) is None  # brings a looker, and is gone
    late = asyncio.create_task(newcomer(short.execution_id))
    await sleep(0.01)
    moment.set()  # the looker finds nobody and leaves; the newcomer comes in the same turn of the loop

    async with asyncio.timeout(5):
        assert (await late).execution_id == short.execution_id
    assert not waiting.done()
    await engine.complete(long.handle)
    async with asyncio.timeout(5):
        ended = await waiting
    assert ended is not None
    assert ended.execution_id == long.execution_id


async def test_whoever_waits_for_an_end_hears_that_the_engine_is_closed(remote: RemoteEngine) -> None:
    work = await claimed(remote)
    waiting = asyncio.create_task(remote.await_end(work.execution_id, max_wait_ms=20_000))
    await asyncio.sleep(0)  # nobody has asked for it yet
    await remote.close()

    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_claim_whose_answer_is_lost_is_told_to_one_that_asks_for_something_else(
    remote: RemoteEngine, wire: Losing, engine: Engine
) -> None:
    for _ in range(3):
        await remote.create(ask(remote))
    wire.lost = {"/claims": 1}
    with pytest.raises(errors.StoreUnavailable):
        await remote.claim_from_lanes(["default"], 2, **WORKER)
    first = await remote.claim_from_lanes(["default"], 5, max_wait_ms=1000, **WORKER)
    second = await remote.claim_from_lanes(["default"], 5, **WORKER)

    assert (len(first), len(second)) == (2, 1), "the lost claim first, under its own key and words"
    assert len({one.execution_id for one in (*first, *second)}) == 3
