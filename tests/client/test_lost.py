"""Lost replies, broken connections and restarted servers: nothing is done twice, nothing is lost."""

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
from flowfabric.engine.types import (
    BATCH_MAILBOX,
    GateArgs,
    KeyMode,
    KeyPolicy,
    KeyUntil,
    MessageArgs,
)
from flowfabric.model.answers.execution import Claimed, Created, Duplicate, RetryScheduled
from flowfabric.model.gate import GateKind
from flowfabric.server import App, ServerSettings, create_app
from tests.executions import create_request, new_execution
from tests.stores.unavailable import unavailable

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w:1"}
RETRY = '{"retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 60000}}}'


class LossyTransport(httpx2.AsyncBaseTransport):
    """A network that loses replies, or refuses connections."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.lost: dict[str, int] = {}  # how many replies are lost, by the suffix of the path
        self.refused = 0  # connections that are refused
        self.received: list[str] = []
        self.restarts = False  # True if the server is restarted when a reply is lost

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.refused:
            self.refused -= 1
            raise httpx2.ConnectError("nobody listens")
        response = await httpx2.ASGITransport(app=self.app).handle_async_request(request)
        path = request.url.path
        self.received.append(path)
        for suffix, count in self.lost.items():
            if count and path.endswith(suffix):
                self.lost[suffix] -= 1
                if self.restarts:
                    self.app = create_app(self.app.engine, self.app.settings)
                raise httpx2.ReadError("the connection broke")
        return response


@pytest.fixture
def wire(engine: Engine) -> LossyTransport:
    return LossyTransport(create_app(engine))


@pytest.fixture
async def remote(wire: LossyTransport) -> AsyncIterator[RemoteEngine]:
    async with RemoteEngine("http://ff", transport=wire, retry_for_s=5) as remote:
        yield remote


async def claimed(remote: RemoteEngine, **fields: Any) -> Claimed:
    await remote.create(create_request(remote.new_execution_id(), **fields))
    [work] = await remote.claim_from_lanes(["default"], 1, **WORKER)
    return work


async def count(engine: Engine) -> int:
    return len((await engine.search_executions()).executions)


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_create_whose_reply_is_lost_creates_once(
    remote: RemoteEngine, wire: LossyTransport, engine: Engine, restarts: bool
) -> None:
    wire.lost, wire.restarts = {"/executions": 2, "/bulk": 1}, restarts

    answer = await remote.create(create_request(remote.new_execution_id()))
    many = await remote.create_executions([create_request(remote.new_execution_id()) for _ in range(3)])

    assert wire.received.count("/v1/executions") == 3
    assert isinstance(answer, Duplicate if restarts else Created)
    assert [type(one) for one in many] == [type(answer)] * 3
    assert await count(engine) == 4


async def test_a_claim_whose_reply_is_lost_is_returned_to_the_retry(
    remote: RemoteEngine, wire: LossyTransport, engine: Engine
) -> None:
    run = create_request(remote.new_execution_id())
    await remote.create(run)
    wire.lost = {"/claims": 1}

    with unavailable(in_doubt=True):
        await remote.claim_from_lanes(["default"], 1, **WORKER)
    [work] = await remote.claim_from_lanes(["default"], 1, **WORKER)

    assert work.execution_id == run.execution_id
    assert (work.lease_epoch, await engine.read_total_attempt_count(run.execution_id)) == (1, 1)
    assert await remote.claim_from_lanes(["default"], 1, **WORKER) == [], "the next claim has a new key"
    await remote.complete(work.handle, result=b"1")


async def test_a_claim_that_a_restarted_server_forgot_expires(
    remote: RemoteEngine, wire: LossyTransport, engine: Engine
) -> None:
    run = create_request(remote.new_execution_id())
    await remote.create(run)
    wire.lost, wire.restarts = {"/claims": 1}, True

    with pytest.raises(errors.StoreUnavailable):
        await remote.claim_from_lanes(["default"], 1, **WORKER, lease_ttl_ms=20)
    async with asyncio.timeout(10):
        while not (work := await remote.claim_from_lanes(["default"], 1, **WORKER, max_wait_ms=50)):
            await engine.sweep_once("lease_expiry")

    assert [one.execution_id for one in work] == [run.execution_id]


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_completion_whose_reply_is_lost_succeeds(
    remote: RemoteEngine, wire: LossyTransport, restarts: bool
) -> None:
    work = await claimed(remote)
    wire.lost, wire.restarts = {"/complete": 1}, restarts

    await remote.complete(work.handle, result=b"7", encoding="json")

    ended = await remote.await_end(work.execution_id, max_wait_ms=1000)
    assert ended is not None
    assert ended.result == b"7"


async def test_a_failure_whose_reply_is_lost_counts_once(
    remote: RemoteEngine, wire: LossyTransport, engine: Engine
) -> None:
    work = await claimed(remote, policy=RETRY)
    wire.lost = {"/fail": 2}

    answer = await remote.fail(work.handle, reason="no")

    assert isinstance(answer, RetryScheduled)
    assert answer.next_attempt_index == 1
    assert wire.received.count("/v1/leases/fail") == 3
    assert len(await engine.attempt_history(work.execution_id)) == 1


async def test_frames_whose_reply_is_lost_are_stored_once_and_in_order(
    remote: RemoteEngine, wire: LossyTransport
) -> None:
    work = await claimed(remote)
    wire.lost = {"/frames": 2}

    await asyncio.gather(*(remote.append_frame(work.handle, b"%d" % number) for number in range(200)))

    page = await remote.tail_stream(work.execution_id, 0, count_limit=1000)
    assert [frame.fields["payload"] for frame in page.frames] == [str(number) for number in range(200)]
    assert wire.received.count("/v1/leases/frames") < 10, "the frames were batched"


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_park_whose_reply_is_lost_parks_once(
    remote: RemoteEngine, wire: LossyTransport, engine: Engine, restarts: bool
) -> None:
    work = await claimed(remote)
    gate = GateArgs(name="mail#0", kind=GateKind.MAILBOX, mailbox="mail")
    wire.lost, wire.restarts = {"/gates": 1, "/park": 1, "/messages": 1}, restarts

    assert isinstance(await remote.open_gate(work.handle, gate), OpenedGate)
    assert isinstance(await remote.park(work.handle, ("mail#0",)), ParkResult)
    assert await engine.read_execution_state(work.execution_id) == "suspended"
    mail = MessageArgs(execution_id=work.execution_id, mailbox="mail", message_id=remote.minter.uuid(), payload=b"1")
    await remote.send_message(mail)

    [again] = await remote.claim_from_lanes(["default"], 1, **WORKER, max_wait_ms=1000)
    waits = await remote.read_waits(again.execution_id)
    assert (again.attempt_index, waits.memos["mail#0"].payload, waits.open) == (0, b"1", {})


async def test_asks_and_messages_with_a_key_are_sent_once_although_the_server_forgot(
    remote: RemoteEngine, wire: LossyTransport, engine: Engine
) -> None:
    work = await claimed(remote)
    wire.lost, wire.restarts = {"/asks": 1, "/messages": 1}, True

    def message(**fields: Any) -> MessageArgs:
        return MessageArgs(
            execution_id=work.execution_id, mailbox="mail", message_id=remote.minter.uuid(), payload=b"1", **fields
        )

    asked = await remote.ask(message())
    await remote.send_message(message(idempotency_key="k"))

    assert (await engine.read_reply(work.execution_id, asked.message_id)).state == "open"
    described = await engine.describe_execution(work.execution_id)
    assert described is not None
    assert described.unread == {"mail": 2}


async def test_the_first_input_of_a_batch_keeps_its_place_although_the_server_forgot(
    remote: RemoteEngine, wire: LossyTransport, engine: Engine
) -> None:
    wire.lost, wire.restarts = {"/k": 1}, True
    policy = KeyPolicy(mode=KeyMode.BATCH, until=KeyUntil.STARTED, wait_ms=60_000, most=3)
    item = MessageArgs(execution_id="", mailbox=BATCH_MAILBOX, message_id=remote.minter.uuid(), payload=b"1")

    submitted = await remote.start_by_key(
        create_request(remote.new_execution_id(), execution_kind="t", idempotency_key="t|k"), policy, message=item
    )

    assert submitted.item == 0
    assert await count(engine) == 1


async def test_a_park_that_is_refused_at_the_first_request_is_an_error(remote: RemoteEngine, engine: Engine) -> None:
    work = await claimed(remote)
    await remote.open_gate(work.handle, GateArgs(name="mail#0", kind=GateKind.MAILBOX, mailbox="mail"))
    await engine.revoke_lease(work.execution_id)

    with pytest.raises(errors.FabricError) as refused:
        await remote.park(work.handle, ("mail#0",))
    assert refused.value.kind == "lease_revoked"


async def test_failed_connections_are_retried_until_the_deadline(
    remote: RemoteEngine, wire: LossyTransport, engine: Engine
) -> None:
    wire.refused = 3
    await remote.create(create_request(remote.new_execution_id()))

    wire.refused = 1000
    remote.transport.retry_for_s = 0.2
    with pytest.raises(errors.StoreUnavailable, match="nobody listens") as error:
        await remote.create(create_request(remote.new_execution_id()))

    assert (error.value.in_doubt, error.value.retryable) == (False, True)
    assert await count(engine) == 1
    assert len(wire.received) == 1


async def test_a_write_that_may_have_arrived_has_an_unknown_outcome(remote: RemoteEngine, wire: LossyTransport) -> None:
    remote.transport.retry_for_s = 0.2
    wire.lost = {"/executions": 1000}

    with unavailable(in_doubt=True):
        await remote.create(create_request(remote.new_execution_id()))


async def test_a_rate_limited_request_is_retried_after_the_delay_of_the_server(engine: Engine) -> None:
    wire = LossyTransport(create_app(engine, ServerSettings(rate_limit=2.0)))
    async with RemoteEngine("http://ff", transport=wire, retry_for_s=10) as remote:
        for _ in range(3):
            await remote.create(create_request(remote.new_execution_id()))
    assert await count(engine) == 3
    assert len(wire.received) > 3


async def test_a_stored_response_is_replayed_only_to_the_same_caller(engine: Engine) -> None:
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


async def test_a_repeated_request_waits_for_the_first_and_an_error_is_not_stored(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, calls, go_on = create_app(engine), list[str](), asyncio.Event()
    known = engine.cancel_execution

    async def slow(execution_id: str, **fields: Any) -> Any:
        calls.append(execution_id)
        await go_on.wait()
        if len(calls) == 1:
            raise errors.StoreUnavailable("gone", source="transport")
        return await known(execution_id, **fields)

    monkeypatch.setattr(engine, "cancel_execution", slow)
    run = await new_execution(engine)
    async with RemoteEngine("http://ff", transport=LossyTransport(app)) as remote:
        path, body = f"/v1/executions/{run}/cancel", {"execution_id": run, "reason": ""}
        requests = [
            asyncio.create_task(remote.transport.request("POST", path, body, idempotency_key="k")) for _ in range(3)
        ]
        await asyncio.sleep(0.05)
        assert len(calls) == 1
        go_on.set()
        answers = await asyncio.gather(*requests, return_exceptions=True)

    assert [type(one).__name__ for one in answers] == ["StoreUnavailable", "HttpResponse", "HttpResponse"]
    assert len(calls) == 2


async def test_a_waiter_that_arrives_when_the_last_poll_ends_is_polled(
    remote: RemoteEngine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would wait until the poll for other executions returns, up to half a minute later."""
    monkeypatch.setattr(results, "MAX_CONCURRENT_POLLS", 1)
    moment, sleep = asyncio.Event(), asyncio.sleep

    async def sleep_until_moment(seconds: float) -> None:
        await (moment.wait() if seconds == results.OVERFLOW_POLL_S else sleep(seconds))

    async def wait_later(execution_id: str) -> Any:
        await moment.wait()
        return await remote.await_end(execution_id, max_wait_ms=20_000)

    monkeypatch.setattr(asyncio, "sleep", sleep_until_moment)
    long, short = await claimed(remote), await claimed(remote)
    await engine.complete(short.handle)
    waiting = asyncio.create_task(remote.await_end(long.execution_id, max_wait_ms=20_000))
    await sleep(0.01)
    assert await remote.await_end(long.execution_id[:-1] + "0", max_wait_ms=1) is None  # starts a poll, and times out
    late = asyncio.create_task(wait_later(short.execution_id))
    await sleep(0.01)
    moment.set()  # the poll finds no waiter and ends; the new waiter arrives in the same iteration of the loop

    async with asyncio.timeout(5):
        assert (await late).execution_id == short.execution_id
    assert not waiting.done()
    await engine.complete(long.handle)
    async with asyncio.timeout(5):
        ended = await waiting
    assert ended is not None
    assert ended.execution_id == long.execution_id


async def test_waiting_for_an_end_is_cancelled_when_the_engine_is_closed(remote: RemoteEngine) -> None:
    work = await claimed(remote)
    waiting = asyncio.create_task(remote.await_end(work.execution_id, max_wait_ms=20_000))
    await asyncio.sleep(0)  # no request was sent yet
    await remote.close()

    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_claim_whose_reply_is_lost_is_returned_to_a_claim_with_other_arguments(
    remote: RemoteEngine, wire: LossyTransport, engine: Engine
) -> None:
    for _ in range(3):
        await remote.create(create_request(remote.new_execution_id()))
    wire.lost = {"/claims": 1}
    with pytest.raises(errors.StoreUnavailable):
        await remote.claim_from_lanes(["default"], 2, **WORKER)
    first = await remote.claim_from_lanes(["default"], 5, max_wait_ms=1000, **WORKER)
    second = await remote.claim_from_lanes(["default"], 5, **WORKER)

    assert (len(first), len(second)) == (2, 1), "the lost claim first, with its own key and arguments"
    assert len({one.execution_id for one in (*first, *second)}) == 3
