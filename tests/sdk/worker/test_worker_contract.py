"""The code of sdk.md, block by block: names, shapes and behaviour as documented."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from flowfabric import (
    AllOf,
    Budget,
    Context,
    Fabric,
    Fatal,
    Limit,
    Quorum,
    Reset,
    Retry,
    RetryAfter,
    RunExpired,
    RunFailed,
    current,
)
from flowfabric.errors import InvalidInput, InvalidToken
from flowfabric.model.states import PublicState
from flowfabric.testing import World

app = Fabric("sqlite:////nowhere/at/all.db")
llm = Budget("llm", limits={"usd": 5, "tokens": 200_000}, soft=0.8, per="tenant", reset="1d", on_hard="fail")
replies: list[tuple[int, str]] = []
keys: list[str] = []
mailed: list[list[str]] = []
applied: list[str] = []


@pytest.fixture(autouse=True)
def _clean() -> None:
    for kept in (replies, keys, mailed, applied):
        kept.clear()


# -- a task -------------------------------------------------------------------------------------------------------


@dataclass
class Mail:
    to: str
    tenant: str = "acme"


@dataclass
class Receipt:
    id: str


@app.task(
    lane="mail",
    retry=Retry(max=5, base="1s", factor=2, cap="60s", jitter=True),
    timeout="30s",
    needs={"smtp"},
    priority=5,
    limits=[Limit(concurrency=10), Limit(rate="100/1m", key=lambda mail: mail.tenant)],
)
async def send(ctx: Context, mail: Mail) -> Receipt:
    keys.append(ctx.key("smtp"))
    status, text = replies.pop(0)
    if status == 429:
        raise RetryAfter(float(text))
    if status == 400:
        raise Fatal("bad address")
    if status == 500:
        raise OSError("the server is upset")
    if status == 504:
        await asyncio.sleep(3600)
    return Receipt(id=text)


@pytest.fixture
async def mailing() -> AsyncIterator[World]:
    """A world whose worker offers smtp."""
    from flowfabric.sdk.worker.worker import Worker

    async with World(app, workers=0) as world:
        worker = Worker(app, lanes=["mail", "bulk", "default"], capabilities={"smtp"}, presence_ttl="900d")
        task = asyncio.create_task(worker.work())
        yield world
        worker.stop()
        await task


async def test_a_submitted_mail_is_sent(mailing: World) -> None:
    replies[:] = [(200, "r1")]
    run = await send.submit(Mail(to="a@b.c"))
    assert await run.result(timeout=10) == Receipt(id="r1")
    replies[:] = [(200, "r2")]


async def test_a_plain_call_needs_no_engine() -> None:
    replies[:] = [(200, "r1"), (400, "")]
    assert await send(Mail(to="a@b.c")) == Receipt(id="r1")
    with pytest.raises(Fatal):
        await send(mail=Mail(to="nobody"))
    assert await child(4) == 8
    assert await ask(Question("acme")) == "fortytwo"
    assert plainly(3) == ([0, 2, 4], 6, True)
    with pytest.raises(RuntimeError, match="test this function in a World"):
        await deploy(request_)


async def test_retry_after_costs_no_retry_and_the_key_stays(mailing: World) -> None:
    replies[:] = [(429, "20"), (500, ""), (200, "r1")]
    began = mailing.now_ms()
    run = await send.submit(Mail(to="a@b.c"))
    assert (await run.result()).id == "r1"
    assert mailing.now_ms() - began >= 20_000
    assert len(await run.attempts()) == 2, "one for the error of the server, none for the request to wait"
    assert len(set(keys)) == 1


async def test_fatal_fails_now(mailing: World) -> None:
    replies[:] = [(400, "")]
    run = await send.submit(Mail(to="nobody"))
    with pytest.raises(RunFailed, match="bad address"):
        await run.result()
    assert len(await run.attempts()) == 1


async def test_a_timeout_stops_the_handler_and_is_retried(mailing: World) -> None:
    replies[:] = [(504, ""), (200, "r1")]
    run = await send.submit(Mail(to="a@b.c"))
    assert (await run.result()).id == "r1"
    assert [attempt.failure_category for attempt in await run.attempts()] == ["timeout", None]


async def test_options_of_a_submit(mailing: World) -> None:
    replies[:] = [(200, "r1")]
    options = send.options(delay="1h", key="order-7", tags={"app.order": "7"}, priority=9, lane="bulk")
    run, again = await options.submit(Mail("a")), await options.submit(Mail("a"))
    assert again.id == run.id
    snapshot = await run.describe()
    info = await mailing.engine.read_execution_info(run.id)
    assert (snapshot.lane_id, info.priority if info else None) == ("bulk", 9)
    assert await mailing.engine.get_execution_tag(run.id, "app.order") == "7"
    began = mailing.now_ms()
    await run.result()
    assert mailing.now_ms() - began >= 3_600_000
    past = datetime.fromtimestamp(mailing.now_ms() / 1000, UTC) + timedelta(seconds=5)
    late = await send.options(delay="1h", deadline=past).submit(Mail("a"))
    with pytest.raises(RunExpired):
        await late.result()


async def test_a_run_exposes_its_state_and_history(mailing: World) -> None:
    replies[:] = [(200, "r1")]
    run = await send.options(delay="1h").submit(Mail("a"))
    assert await run.state() is PublicState.DELAYED
    assert type((await run.explain()).obstacle).__name__ == "DelayedObstacle"
    assert await run.attempts() == []
    assert await run.progress() == {}
    await run.cancel("never mind")
    assert (await run.describe()).public_state is PublicState.CANCELLED
    await run.replay()
    assert (await run.result()).id == "r1"


# -- a durable workflow --------------------------------------------------------------------------------------------


@dataclass
class Request:
    version: str


@dataclass
class Plan:
    version: str
    diff: str


@dataclass
class Decision:
    ok: bool


async def make_plan(request: Request) -> Plan:
    return Plan(request.version, f"+{request.version}")


async def notify(links: list[str]) -> None:
    mailed.append(links)


async def apply(plan: Plan) -> str:
    applied.append(plan.version)
    return "applied"


@app.task
async def deploy(ctx: Context, req: Request) -> str:
    plan = await ctx.step(make_plan, req)
    gate = await ctx.approval("approve", Decision, need=2, distinct=True, expires="3d", show={"diff": plan.diff})
    await ctx.step(notify, gate.links)
    votes = await gate
    if votes.expired or not all(v.value.ok for v in votes):
        return "rejected"
    return await ctx.step(apply, plan)


request_ = Request("v2")


async def test_an_approved_deploy_survives_a_crash() -> None:
    async with World(app, seed=7) as world:
        run = await deploy.submit(request_)
        world.crash_at("step:apply", "after_effect")
        gate = await world.approval(run, "approve")
        await gate.approve_as("ana")
        await gate.approve_as("bo")
        assert await run.result() == "applied"
        world.assert_invariants()
    assert len(mailed) == 1
    assert applied == ["v2", "v2"], "its memo was lost with the process, so it ran again"


async def test_an_approval_of_the_contract_without_an_answer_is_denied(world: World) -> None:
    run = await deploy.submit(request_)
    await world.advance("3d")
    assert await run.result() == "rejected"


async def test_a_denied_approval_is_reported(world: World) -> None:
    run = await deploy.submit(request_)
    gate = await world.approval(run, "approve")
    await gate.approve_as("ana")
    await gate.reject_as("bo")
    assert await run.result() == "rejected"
    assert applied == []


@pytest.mark.serial
async def test_three_days_of_approval_cost_less_than_fifty_milliseconds_of_work() -> None:
    async def one() -> float:
        began = time.process_time()
        async with World(app) as world:
            run = await deploy.submit(request_)
            await world.advance("3d")
            assert await run.result() == "rejected"
        return time.process_time() - began

    await one()  # what is imported and compiled once
    assert min([await one() for _ in range(5)]) < 0.05


@app.task
async def child(n: int) -> int:
    return n * 2


@app.task
async def parent(ctx: Context) -> dict[str, object]:
    spawned = await ctx.spawn(child, 1)
    gathered = await ctx.gather([child.s(n) for n in range(3)], join=AllOf())
    enough = await ctx.gather([child.s(n) for n in range(10)], join=Quorum(8, cancel_rest=True))
    first = await ctx.race(child.s(21), child.s(21))
    assert current() is ctx
    assert not ctx.cancelled
    assert ctx.lease_seconds_left > 0
    steer = await ctx.receive("steer", int, timeout="5m")
    return {
        "spawned": await spawned.result(),
        "gathered": gathered,
        "enough": sum(one is not None for one in enough),
        "first": first,
        "steer": steer,
        "attempt": ctx.attempt,
    }


@app.task
def plainly(ctx: Context, n: int) -> tuple[list[int | None], int, bool]:
    assert current() is ctx
    ctx.sync.sleep("7d")
    ctx.sync.progress("half way", pct=50)
    ctx.sync.stream("answer").write("text")
    doubled = ctx.sync.step(child, n)
    with ctx.sync.reserve(llm, tokens=1) as kept:
        kept.spend(tokens=1)
    return ctx.sync.gather([child.s(number) for number in range(n)]), doubled, ctx.sync.now() > 0


async def test_children_joins_and_the_context(world: World) -> None:
    run = await parent.submit()
    await world.advance("1s")
    await run.signal("steer", 5)
    answer = await run.result()
    assert answer.pop("enough") in (8, 9, 10)
    assert answer == {"spawned": 2, "gathered": [0, 2, 4], "first": 42, "steer": 5, "attempt": 0}


async def test_a_token_answers_an_approval(world: World) -> None:
    run = await deploy.submit(request_)
    await world.approval(run, "approve")
    tokens = [link.rpartition("token=")[2] for link in mailed[0]]
    for token in ("k1:00", "nonsense", ""):
        with pytest.raises(InvalidInput, match="no open approval 'approve' of this run has it"):
            await run.signal("approve", Decision(True), token=token)
    with pytest.raises(InvalidToken):
        await run.signal("approve", Decision(True), token=f"{tokens[1][:-1]}{'1' if tokens[1][-1] == '0' else '0'}")
    for token in reversed(tokens):
        assert await run.signal("approve", Decision(True), token=token) is True
    assert await run.result() == "applied"


# -- streams, progress, budgets ------------------------------------------------------------------------------------


@dataclass
class Question:
    tenant: str
    fails: bool = False


@app.task(budgets=[llm], retry=Retry(max=1, base="1s"))
async def ask(ctx: Context, q: Question) -> str:
    out = ctx.stream("answer")
    for token in ("for", "ty", "two"):
        await out.write(token)
        if q.fails and ctx.attempt == 0 and token == "ty":
            raise OSError("the provider hung up")
    await ctx.spend(llm, tokens=3, usd=0.002)
    await ctx.progress({"phase": "done", "pct": 100})
    return out.text()


async def test_a_retry_never_doubles_the_text_and_late_readers_see_everything(world: World) -> None:
    run = await ask.submit(Question("acme", fails=True))
    assert await run.result() == "fortytwo"
    frames = [frame async for frame in run.stream("answer")]
    assert Reset(attempt=1) in frames
    after = frames[frames.index(Reset(attempt=1)) + 1 :]
    assert [frame.text for frame in after if not isinstance(frame, Reset)] == ["for", "ty", "two"]
    first = after[0]
    assert not isinstance(first, Reset)
    rest = [frame async for frame in run.stream("answer", after=first.cursor)]
    assert [frame.text for frame in rest if not isinstance(frame, Reset)] == ["ty", "two"]
    assert await run.progress() == {"phase": "done", "pct": 100}
    usage = (await world.engine.get_budget_status(llm.id(app.namespace, "acme"))).usage
    assert usage == {"tokens": 3, "usd_millionths": 2000}
