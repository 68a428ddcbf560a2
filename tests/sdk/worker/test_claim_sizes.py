"""How many runs a worker claims at once: where the store claims in parts, half of its slots while the others run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import Fabric
from flowfabric.engine.claiming.poller import LARGE_CLAIM
from flowfabric.stores.claims import ClaimedRows, ClaimRequest
from flowfabric.testing.world import World
from tests.conftest import STORES
from tests.sdk.conftest import running_worker, wait_until_true

on_stores = pytest.mark.parametrize("url", STORES, indirect=True)  # The store of a server is in another process.
SLOTS = 2 * LARGE_CLAIM


async def note_claims(app: Fabric, parts: int, events: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store claim in so many parts, and note how many rows each claim asks for."""
    engine: Any = await app.engine()
    claim_rows = engine.store.claim_rows

    async def claiming(request: ClaimRequest) -> ClaimedRows:
        events.append(len(request.lease_ids))
        claimed: ClaimedRows = await claim_rows(request)
        return claimed

    monkeypatch.setattr(engine.store, "claim_parts", parts)
    monkeypatch.setattr(engine.store, "claim_rows", claiming)


@on_stores
@pytest.mark.parametrize(
    ("slots", "parts", "first"),
    [(SLOTS, 2, SLOTS // 2), (SLOTS - 1, 2, SLOTS // 2), (SLOTS - 2, 2, SLOTS - 2), (SLOTS, 1, SLOTS)],
)
async def test_all_slots_are_filled_and_none_is_exceeded(
    app: Fabric, monkeypatch: pytest.MonkeyPatch, slots: int, parts: int, first: int
) -> None:
    running, most, may_end = 0, 0, asyncio.Event()

    @app.task
    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await may_end.wait()
        running -= 1
        return number

    asked: list[int] = []
    runs = await work.submit_many(range(3 * slots))
    await note_claims(app, parts, asked, monkeypatch)
    async with running_worker(app, slots=slots) as worker:
        await wait_until_true(lambda: running == slots)
        assert worker.running == slots
        assert asked[0] == first
        assert sum(asked) == slots, "nothing is claimed that has no slot"
        may_end.set()
        assert [await run.result(20) for run in runs] == [*range(len(runs))]
    assert most == slots
    assert max(asked) == first


@on_stores
async def test_the_other_half_is_claimed_before_the_handlers_of_the_first_one_run(
    app: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def work(number: int) -> int:
        events.append("run")
        return number

    events: list[Any] = []
    runs = await work.submit_many(range(4 * SLOTS))
    await note_claims(app, 2, events, monkeypatch)
    async with running_worker(app, slots=SLOTS):
        assert [await run.result(20) for run in runs] == [*range(len(runs))]
    half = SLOTS // 2
    assert events[:3] == [half, half, "run"]
    assert events.count("run") == len(runs)


async def test_runs_of_both_halves_continue_elsewhere_at_once_when_their_worker_is_stopped() -> None:
    app = Fabric()
    started: list[int] = []

    @app.task
    async def work(number: int) -> int:
        started.append(number)
        await asyncio.sleep(600)
        return number

    async with World(app, workers=0, slots=SLOTS) as world:
        world.store.claim_parts = 2
        runs = await work.submit_many(range(SLOTS))
        first = world.start_worker()
        await world.settle()
        assert first.running == len(started) == SLOTS
        second, before = world.start_worker(), world.now_ms()
        first.stop()
        first.stop()
        await world.settle()

        assert second.running == SLOTS
        assert sorted(started[SLOTS:]) == [*range(SLOTS)]
        assert world.now_ms() - before < 1000, "long before the leases of the first worker would have expired"
        assert [await run.result() for run in runs] == [*range(SLOTS)]
        await world.assert_invariants()
