"""Reads across executions: levels of lanes, what workers hold, quotas, spending, flows and past events."""

from __future__ import annotations

import pytest

from flowfabric.engine.metrics import queue_depth
from flowfabric.engine.operations import overview
from flowfabric.model.event import Topic
from tests.scenarios.env import Env
from tests.scenarios.pages import all_pages

BUDGET = "11111111-1111-4111-8111-111111111111"
QUOTA = "22222222-2222-4222-8222-222222222222"


async def test_levels_count_unfinished_executions_and_workers_by_lane(env: Env) -> None:
    waiting = await env.create(lane="mail")
    since = env.now
    env.clock.advance_ms(5)
    await env.create(lane="mail")
    held = await env.create_and_claim(lane="print")
    done = await env.create_and_claim(lane="print")
    await env.engine.complete(done.handle)
    await env.engine.register_worker(
        namespace="default", worker_instance_id="w-1", worker_id="w", lanes=["mail"], liveness_ttl_ms=1000
    )

    levels = await env.engine.read_levels()

    assert levels.at == env.now
    mail, printing = levels.lanes
    assert (mail.lane_id, mail.states, mail.workers, mail.waiting_since) == ("mail", {"waiting": 2}, 1, since)
    assert (printing.lane_id, printing.states, printing.workers) == ("print", {"active": 1}, 0)
    assert printing.waiting_since is None
    assert waiting != held.execution_id


async def test_counts_of_levels_are_bounded_and_say_so(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_depth, "MIN_COUNTED_PER_QUEUE", 3)
    monkeypatch.setattr(overview, "MAX_SHOWN", 3)
    for number in range(5):
        await env.create(lane="mail")
        await env.create(lane="later", delay_until=env.now + 60_000 + number)
    await env.create(lane="print")
    await env.create_and_claim(lane="print")

    later, mail, printing = (await env.engine.read_levels()).lanes

    assert (mail.states, mail.at_least) == ({"waiting": 3}, ["waiting"])
    assert (later.states, later.at_least) == ({"delayed": 3}, ["delayed"])
    assert (printing.states, printing.at_least) == ({"waiting": 1, "active": 1}, [])


async def test_a_worker_shows_what_it_holds_and_workers_of_all_namespaces_are_listed(env: Env) -> None:
    first = await env.create_and_claim(namespace="n1", execution_kind="mail")
    await env.create_and_claim(namespace="n2")
    done = await env.create_and_claim()
    await env.engine.complete(done.handle)
    for namespace, instance in (("n2", "b"), ("n1", "c"), ("n1", "a")):
        await env.engine.register_worker(
            namespace=namespace, worker_instance_id=instance, worker_id="w", lanes=["x"], liveness_ttl_ms=1000
        )

    held = await env.engine.list_worker_executions("wa-1")
    own = await env.engine.list_worker_executions("wa-1", namespaces=["n1"])
    page = await env.engine.list_workers(limit=2, all_namespaces=True)
    rest = await env.engine.list_workers(limit=2, after=page.cursor, all_namespaces=True)

    assert len(held.executions) == 2
    assert [(one.execution_id, one.execution_kind) for one in own.executions] == [(first.execution_id, "mail")]
    assert (await env.engine.list_worker_executions("wa-2")).executions == []
    listed = [(one.namespace, one.worker_instance_id) for one in (*page.entries, *rest.entries)]
    assert listed == [("n1", "a"), ("n1", "c"), ("n2", "b")]
    assert rest.cursor is None
    env.clock.advance_ms(1000)
    assert (await env.engine.list_workers(all_namespaces=True)).entries == []


async def test_spending_is_shown_by_execution_and_by_budget(env: Env) -> None:
    engine = env.engine
    await engine.create_budget(BUDGET, dimensions=["usd", "tokens"], hard_limits=[99, 99], soft_limits=[0, 0])
    one, two = await env.create(), await env.create()
    await engine.record_spend(BUDGET, one, {"usd": 3, "tokens": 4})
    await engine.record_spend(BUDGET, one, {"usd": 2})
    await engine.record_spend(BUDGET, two, {"usd": 7})
    await engine.reserve_budget(BUDGET, one, {"usd": 11}, ttl_ms=1000)

    spending = await engine.read_spending(one)

    assert [(each.dimension, each.amount, each.reserved) for each in spending] == [("tokens", 4, 0), ("usd", 5, 11)]
    page = await engine.list_spenders(BUDGET, limit=2)
    rest = await engine.list_spenders(BUDGET, limit=2, cursor=page.next_cursor)
    amounts = {(each.execution_id, each.dimension): each.amount for each in (*page.spending, *rest.spending)}
    assert amounts == {(one, "usd"): 5, (one, "tokens"): 4, (two, "usd"): 7}
    assert rest.next_cursor is None
    assert await engine.read_spending(env.engine.new_execution_id()) == []


async def test_quotas_show_their_window_and_holders(env: Env) -> None:
    engine = env.engine
    await engine.create_quota_policy(QUOTA, window_seconds=10, max_requests_per_window=5, max_concurrent=2)
    e = await env.create()
    await engine.check_admission(QUOTA, e, window_seconds=10, rate_limit=5, concurrency_cap=2)

    [status] = (await engine.list_quotas()).quotas

    assert (status.quota_policy_id, status.max_requests_per_window, status.active_concurrency_cap) == (QUOTA, 5, 2)
    assert (status.window_used, status.window_frees_at) == (1, env.now + 10_000)
    assert (status.active, status.holders) == (1, [e])
    assert (await engine.list_quotas(cursor=QUOTA)).quotas == []
    assert (await engine.list_quotas(namespace="other")).quotas == []


async def test_flows_are_listed_newest_first_over_all_partitions(env: Env) -> None:
    made = []
    for number in range(7):
        env.clock.advance_ms(number % 2)
        flow = env.engine.minter.uuid()
        await env.engine.create_flow(flow, namespace="n1" if number % 3 else "n2")
        made.append((env.now, flow, number))

    pages = await all_pages(env.engine.search_flows, limit=3)
    listed = [one.flow_id for page in pages for one in page.flows]

    assert listed == [flow for _, flow, _ in sorted(made, reverse=True)]
    own = await env.engine.search_flows(namespace="n2", limit=2)
    assert [one.flow_id for one in own.flows] == [name for name in listed if name in dict_of(made)][:2]
    rest = await env.engine.search_flows(namespace="n2", limit=2, cursor=own.next_cursor)
    assert len(rest.flows) == 1
    assert rest.next_cursor is None


def dict_of(made: list[tuple[int, str, int]]) -> dict[str, int]:
    """Return the flows of namespace `n2`."""
    return {flow: number for _, flow, number in made if number % 3 == 0}


async def test_past_events_are_read_backwards_in_pages(env: Env) -> None:
    made = []
    for number in range(5):
        claim = await env.create_and_claim(namespace="n1" if number % 2 else "n2")
        await env.engine.renew(claim.handle)
        await env.engine.complete(claim.handle)
        made.append(claim.execution_id)

    ends: list[str] = []
    before = None
    while True:
        page = await env.engine.list_events(topics=[Topic.COMPLETION], before=before, limit=2)
        ends += [one.event.execution_id for one in page.events]
        before = page.next_before
        if before is None:
            break

    assert ends == made[::-1]
    everything = await env.engine.list_events(limit=100)
    positions = [one.position for one in everything.events]
    assert positions == sorted(positions, reverse=True)
    assert len(set(positions)) == len(positions)
    assert {one.event.lease for one in everything.events} >= {"acquired", "released"}
    assert "renewed" not in {one.event.lease for one in everything.events}
    own = await env.engine.list_events(topics=["completion"], namespaces=["n1"])
    assert [one.event.execution_id for one in own.events] == [made[3], made[1]]


async def test_past_events_are_found_after_a_pause_and_in_a_crowd(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "FEED_STEP", 4)  # events of one read
    made = []
    for pause in (0, 0, 0, 0, 0, 0, 0, 86_400_000, 10_000, 0, 0):
        env.clock.advance_ms(pause)
        claim = await env.create_and_claim()
        await env.engine.complete(claim.handle)
        made.append(claim.execution_id)
    env.clock.advance_ms(3_600_000)
    await env.create()

    newest = await env.engine.list_events(topics=["completion"], limit=3)
    rest = await env.engine.list_events(topics=["completion"], limit=50, before=newest.next_before)

    assert [one.event.execution_id for one in (*newest.events, *rest.events)] == made[::-1]
    assert rest.next_before is None
