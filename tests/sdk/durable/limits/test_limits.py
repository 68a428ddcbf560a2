"""Budgets and limits: declared by name, counted once, and independent of other tenants."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from flowfabric import Budget, BudgetExceeded, Context, Fabric, Limit, Retry, Run, RunFailed, errors
from flowfabric.model import obstacles
from flowfabric.model.states import PublicState
from flowfabric.testing.world import World
from tests.sdk.conftest import running_worker, wait_until

app = Fabric("sqlite:////nowhere/at/all.db")
llm = Budget("llm", limits={"usd": 5, "tokens": 1000}, soft=0.8, per="tenant", reset="1d")
patient = Budget("patient", limits={"tokens": 100}, reset="1d", on_hard="suspend")
shared = Budget("shared", limits={"calls": 3})
started: list[str] = []


@pytest.fixture(autouse=True)
def _clean() -> None:
    started.clear()


@dataclass
class Question:
    tenant: str
    tokens: int


@app.task(budgets=[llm], retry=Retry(max=2, base="1s", jitter=False))
async def ask(ctx: Context, question: Question, fails: int = 0) -> int:
    started.append(question.tenant)
    await ctx.spend(llm, tokens=question.tokens, usd=0.25)
    if ctx.attempt < fails:
        raise ValueError("after it was paid")
    return ctx.attempt


@app.task(budgets=[patient])
async def think(ctx: Context, tokens: int) -> str:
    started.append(f"think {tokens}")
    await ctx.spend(patient, tokens=tokens)
    return f"thought {tokens}"


@app.task
def count(ctx: Context, calls: int) -> None:
    ctx.sync.spend(shared, calls=calls)


@app.task(retry=Retry(max=1, base="1s", jitter=False))
async def careful(ctx: Context, used: int) -> dict[str, int]:
    async with ctx.reserve(shared, calls=3) as kept:
        during = await ctx.engine.get_budget_status(shared.id(app.namespace))
        await kept.spend(calls=used)
        if ctx.attempt < 1 and used == 2:
            raise ValueError("in the middle")
    return during.reserved


async def usage(world: World, budget: Budget, scope: str = "") -> dict[str, int]:
    return (await world.engine.get_budget_status(budget.id(app.namespace, scope))).usage


async def test_spending_is_counted_once_however_often_it_is_retried() -> None:
    async with World(app) as world:
        assert await (await ask.submit(Question("acme", 40), fails=2)).result() == 2
        assert await usage(world, llm, "acme") == {"tokens": 40, "usd_millionths": 250_000}
        await world.assert_invariants()


async def test_a_crash_between_spending_and_recording_counts_once() -> None:
    async with World(app) as world:
        world.crash_at("spend:llm", "after_effect")
        assert await (await ask.submit(Question("acme", 40))).result() == 1
        assert await usage(world, llm, "acme") == {"tokens": 40, "usd_millionths": 250_000}


async def test_each_tenant_has_its_own_budget() -> None:
    async with World(app) as world:
        with pytest.raises(RunFailed, match="budget llm: tokens is at 0 of 1000"):
            await (await ask.submit(Question("acme", 1001))).result()
        assert await (await ask.submit(Question("bolt", 1000))).result() == 0
        assert await usage(world, llm, "acme") == {}
        assert (await usage(world, llm, "bolt"))["tokens"] == 1000


async def test_an_exhausted_budget_blocks_new_work_of_its_tenant_until_its_reset() -> None:
    async with World(app) as world:
        await (await ask.submit(Question("acme", 1000))).result()
        run = await ask.submit(Question("acme", 10))
        await world.advance("1m")
        assert started == ["acme"], "it did not even start"
        obstacle = (await run.explain()).obstacle
        assert isinstance(obstacle, obstacles.BudgetExhausted)
        assert await (await ask.submit(Question("bolt", 10))).result() == 0
        await world.advance("1d")
        assert await run.result() == 0


async def test_on_hard_suspend_sleeps_until_there_is_capacity() -> None:
    async with World(app) as world:
        await (await think.submit(60)).result()
        run = await think.submit(50)
        await world.advance("1h")
        assert await run.state() is PublicState.SUSPENDED
        assert await usage(world, patient) == {"tokens": 60}
        await world.advance("1d")
        assert await run.result() == "thought 50"
        assert await usage(world, patient) == {"tokens": 50}
        assert len(await run.attempts()) == 1, "sleeping costs no attempt"


async def test_raised_limits_wake_sleeping_runs() -> None:
    async with World(app) as world:
        await (await think.submit(60)).result()
        run = await think.submit(50)
        await world.advance("1h")
        await world.engine.change_budget_limits(
            patient.id(app.namespace), dimensions=["tokens"], hard_limits=[500], soft_limits=[0]
        )
        assert await run.result() == "thought 50"
        assert await usage(world, patient) == {"tokens": 110}


async def test_a_request_above_the_whole_budget_fails_instead_of_sleeping_for_ever() -> None:
    async with World(app):
        with pytest.raises(RunFailed, match="more than its limit of"):
            await (await think.submit(101)).result()


async def test_a_plain_handler_spends_and_fails_beyond_the_limit() -> None:
    async with World(app) as world:
        await (await count.submit(3)).result()
        with pytest.raises(RunFailed, match=f"{BudgetExceeded.__name__}: budget shared: calls is at 3 of 3"):
            await (await count.submit(1)).result()
        assert await usage(world, shared) == {"calls": 3}


async def test_a_reservation_holds_capacity_and_returns_the_rest() -> None:
    async with World(app) as world:
        assert await (await careful.submit(1)).result() == {"calls": 3}
        status = await world.engine.get_budget_status(shared.id(app.namespace))
        assert (status.usage, status.reserved.get("calls", 0)) == ({"calls": 1}, 0)


async def test_usage_of_a_failed_attempts_reservation_counts_once_and_the_retry_reserves_the_rest() -> None:
    async with World(app) as world:
        assert await (await careful.submit(2)).result() == {"calls": 1}
        status = await world.engine.get_budget_status(shared.id(app.namespace))
        assert (status.usage, status.reserved.get("calls", 0)) == ({"calls": 2}, 0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Budget("", limits={"usd": 1}), "a name and at least one limit"),
        (lambda: Budget("x", limits={}), "a name and at least one limit"),
        (lambda: Budget("x", limits={"usd": 1}, soft=2), "soft is a part"),
        (lambda: Budget("x", limits={"usd": 1}, on_hard="explode"), "on_hard"),  # type: ignore[arg-type]
        (lambda: Budget("x", limits={"tokens": -1}).amounts({"tokens": -1}), "is no amount"),
        (lambda: Budget("x", limits={"tokens": 1}).amounts({"tokens": 0.5}), "is not whole"),
        (lambda: Limit(), "how many at once"),
        (lambda: Limit(rate="fast"), "is no rate"),
        (lambda: Limit(rate="5/10ms"), "whole seconds"),
    ],
)
def test_an_invalid_declaration_is_explained(wrong: object, words: str) -> None:
    with pytest.raises(errors.InvalidInput, match=words):
        wrong()  # type: ignore[operator]


async def test_a_call_without_the_scope_of_its_budget_fails_at_submit() -> None:
    @app.task(name="lost", budgets=[llm])
    async def lost(n: int) -> None: ...

    async with World(app) as world:
        with pytest.raises(errors.InvalidInput, match="which tenant it is for"):
            await lost.submit(1)
        assert (await world.engine.search_executions()).executions == []
        await lost.options(tags={"app.tenant": "acme"}).submit(1)


async def test_no_more_run_at_once_than_a_limit_allows(app: Fabric) -> None:
    now, most = {"a": 0, "b": 0}, {"a": 0, "b": 0}

    @app.task(limits=[Limit(concurrency=2, key=lambda tenant: tenant)])
    async def busy(tenant: str) -> None:
        now[tenant] += 1
        most[tenant] = max(most[tenant], now[tenant])
        await asyncio.sleep(0.01)
        now[tenant] -= 1

    runs = [await busy.submit("ab"[n % 2]) for n in range(12)]
    async with running_worker(app, slots=10):
        await asyncio.gather(*(run.result(30) for run in runs))
    assert most == {"a": 2, "b": 2}


async def test_a_rate_holds(app: Fabric) -> None:
    @app.task(limits=[Limit(rate="3/1h")])
    async def call() -> None:
        started.append("call")

    runs = [await call.submit() for _ in range(5)]
    async with running_worker(app, slots=10):
        await wait_until(lambda: _ended(runs, 3))
        waiting = [run for run in runs if await run.state() is not PublicState.COMPLETED]
        assert {await run.state() for run in waiting} <= {PublicState.RATE_LIMITED, PublicState.WAITING}
    assert len(started) == 3


async def _ended(runs: list[Run[None]], count: int) -> bool:
    return sum([await run.state() is PublicState.COMPLETED for run in runs]) >= count


async def test_limits_that_a_deploy_changed_take_effect(app: Fabric) -> None:
    engine = await app.engine()
    before, after = Budget("b", limits={"calls": 3}), Budget("b", limits={"calls": 5})
    budget_id = await app.declare_budget(engine, before)
    await after.declare(engine, budget_id, namespace="default")
    assert (await engine.get_budget_status(budget_id)).hard_limits == {"calls": 5}


async def test_a_limit_set_by_an_operator_stays_until_the_declaration_changes(app: Fabric) -> None:
    engine = await app.engine()
    declared = Budget("b", limits={"calls": 3})
    budget_id = await app.declare_budget(engine, declared)
    await engine.change_budget_limits(budget_id, dimensions=["calls"], hard_limits=[10], soft_limits=[0])

    await Budget("b", limits={"calls": 3}).declare(engine, budget_id, namespace="default")  # another process
    assert (await engine.get_budget_status(budget_id)).hard_limits == {"calls": 10}

    await Budget("b", limits={"calls": 4}).declare(engine, budget_id, namespace="default")
    assert (await engine.get_budget_status(budget_id)).hard_limits == {"calls": 4}
    await declared.declare(engine, budget_id, namespace="default")  # a rollback
    assert (await engine.get_budget_status(budget_id)).hard_limits == {"calls": 3}


async def test_a_tenant_with_a_long_backlog_does_not_delay_others() -> None:
    order: list[str] = []
    fair_app = Fabric("sqlite:////nowhere/at/all.db")

    @fair_app.task(fair="tenant")
    async def work(tenant: str) -> None:
        order.append(tenant)

    async with World(fair_app, workers=0, slots=1) as world:
        for _ in range(6):
            await work.submit("big")
        last = await work.submit("small")
        world.start_worker()
        await last.result()
        assert order.index("small") <= 2
