"""Many concurrent signals to one waitpoint: each is decided as if alone, and few changes are written."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.runtime.decision_queue import PendingRows
from flowfabric.model.change import Change, Guard, Patch, Upsert
from flowfabric.model.condition import Count, CountKind, OperatorOnly
from flowfabric.model.execution import Execution
from flowfabric.model.instant import FromNow
from flowfabric.model.suspension import Suspension
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read
from flowfabric.testing import FlakyStore, Loss, check_invariants
from tests.scenarios.env import RESUMABLE, Env
from tests.scenarios.waits import APPENDED, NO_OP, SATISFIED, Waits

SIGNALS = 120


@pytest.fixture
async def flaky(store: Store) -> FlakyStore:
    return FlakyStore(store)


@pytest.fixture
async def waits(flaky: FlakyStore, clock: ManualClock) -> Waits:
    engine = Engine(flaky)
    await engine.seed_waitpoint_hmac_secret("k1", "00" * 32)
    return Waits(Env(engine, clock))


async def gather_results(calls: list[Any]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_every_one_of_many_concurrent_signals_counts_once(waits: Waits, flaky: FlakyStore) -> None:
    claim, p = await waits.create_suspended(Count(SIGNALS, CountKind.DISTINCT_SOURCES, ("k",)))
    e = claim.execution_id

    effects = await gather_results([waits.effect(e, "ok", p, source=f"s{n}") for n in range(SIGNALS)])

    assert effects.count(APPENDED) == SIGNALS - 1
    assert effects.count(SATISFIED) == 1
    assert await waits.env.vector(e) == RESUMABLE
    assert (await waits.record(e, p.waitpoint_id)).signal_count == SIGNALS
    again = await waits.env.grant_and_resume(e)
    assert len(await waits.engine.observe_signals(again.handle)) == SIGNALS
    assert len(await waits.signal_events(e)) == SIGNALS
    await check_invariants(waits.engine)


async def test_concurrent_signals_after_the_resuming_one_are_refused(waits: Waits) -> None:
    claim, p = await waits.create_suspended()

    results = await gather_results([waits.effect(claim.execution_id, "go", p) for _ in range(30)])

    assert results.count(SATISFIED) == 1
    refused = [one for one in results if one != SATISFIED]
    assert {type(one) for one in refused} == {errors.TargetNotSignalable}


async def test_concurrent_signals_with_one_key_count_once(waits: Waits) -> None:
    claim, p = await waits.create_suspended(OperatorOnly())

    results = await gather_results([waits.send(claim.execution_id, "go", p, idempotency_key="i") for _ in range(30)])

    [first] = [one for one in results if isinstance(one, Accepted)]
    assert [one for one in results if one != first] == [DuplicateDelivery(first.signal_id)] * 29
    assert (await waits.record(claim.execution_id, p.waitpoint_id)).signal_count == 1


async def test_forged_tokens_among_concurrent_signals_do_not_affect_the_others(waits: Waits) -> None:
    claim, p = await waits.create_suspended(OperatorOnly())
    calls = []
    for number in range(40):
        token = p.waitpoint_token if number % 2 else "k1:" + "0" * 64
        calls.append(waits.engine.deliver_signal(waits.signal_args(claim.execution_id, "go", p.waitpoint_id, token)))

    results = await gather_results(calls)

    assert [type(one) for one in results] == [errors.InvalidToken, Accepted] * 20
    assert await waits.token_refused_at(claim.execution_id) == waits.env.now


async def test_the_signal_limit_holds_under_concurrency(waits: Waits) -> None:
    claim, p = await waits.create_suspended(OperatorOnly())

    results = await gather_results(
        [waits.effect(claim.execution_id, "go", p, max_signals_per_execution=7) for _ in range(20)]
    )

    assert results.count(NO_OP) == 7
    assert sum(isinstance(one, errors.SignalLimitExceeded) for one in results) == 13


@pytest.mark.parametrize("loss", Loss)
async def test_concurrent_signals_with_a_lost_message_count_once(waits: Waits, flaky: FlakyStore, loss: Loss) -> None:
    claim, p = await waits.create_suspended(OperatorOnly())
    flaky.lose("commit", loss)

    results = await gather_results([waits.effect(claim.execution_id, "go", p) for _ in range(20)])

    assert results == [NO_OP] * 20
    assert len(flaky.losses) == 1
    assert (await waits.record(claim.execution_id, p.waitpoint_id)).signal_count == 20


async def test_two_processes_signal_one_waitpoint_concurrently(store: Store, waits: Waits, clock: ManualClock) -> None:
    other = Engine(store)
    claim, p = await waits.create_suspended(Count(60, CountKind.DISTINCT_SIGNALS, ("k",)))
    signals = [waits.signal_args(claim.execution_id, "go", p.waitpoint_id, p.waitpoint_token) for _ in range(60)]

    results = await gather_results(
        [(other if n % 2 else waits.engine).deliver_signal(signal) for n, signal in enumerate(signals)]
    )

    assert sorted(one.effect for one in results) == [APPENDED] * 59 + [SATISFIED]
    await check_invariants(other)


async def test_every_one_of_many_concurrent_messages_is_stored(waits: Waits) -> None:
    e = await waits.env.create()

    await gather_results(
        [
            waits.engine.send_message(
                MessageArgs(execution_id=e, mailbox="m", message_id=waits.new_id(), payload=b"%d" % n)
            )
            for n in range(50)
        ]
    )

    from tests.scenarios.checked_store import dump

    kept = (await dump(waits.engine.store))["ff_mail"]
    assert [row.payload for row in kept] == [b"%d" % n for n in range(50)]


def test_pending_rows_keep_the_first_guard_and_the_last_write() -> None:
    root = Suspension("e", 1, revision=9)
    want = Read(Suspension, ("e",))
    ledger = PendingRows([want], [[root]], now=1000)
    guard = Guard(Suspension, ("e",), 9)

    ledger.apply(Change((guard,), (Patch(Suspension, ("e",), {"signal_count": 1}),), not_before=5))
    ledger.apply(Change((guard,), (Patch(Suspension, ("e",), {"last_signal_at": FromNow(7)}),), not_before=3))
    [seen] = ledger.find(want)
    change = ledger.to_change()

    assert (seen.signal_count, seen.last_signal_at) == (1, 1007)
    assert change is not None
    assert (change.guards, change.not_before) == ((guard,), 5)
    [put] = change.writes
    assert isinstance(put, Upsert)
    assert (put.row.signal_count, put.row.last_signal_at) == (1, FromNow(7))  # type: ignore[attr-defined]


def test_pending_rows_refuse_to_patch_an_unloaded_row() -> None:
    ledger = PendingRows([], [], now=0)

    with pytest.raises(errors.BugError):
        ledger.apply(Change((), (Patch(Execution, ("e",), {"priority": 1}),)))
