"""Crowds at one waitpoint: every signal is decided as if it had come alone, and few changes are written."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.runtime.pending_rows import PendingRows
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
from tests.scenarios.play import RESUMABLE, Play
from tests.scenarios.waits import APPENDED, NO_OP, SATISFIED, Waits

CROWD = 120


@pytest.fixture
async def wire(store: Store) -> FlakyStore:
    return FlakyStore(store)


@pytest.fixture
async def crowded(wire: FlakyStore, clock: ManualClock) -> Waits:
    engine = Engine(wire)
    await engine.seed_waitpoint_hmac_secret("k1", "00" * 32)
    return Waits(Play(engine, clock))


async def answers(calls: list[Any]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_every_signal_of_a_crowd_counts_once(crowded: Waits, wire: FlakyStore) -> None:
    held, p = await crowded.suspended(Count(CROWD, CountKind.DISTINCT_SOURCES, ("k",)))
    e = held.execution_id

    effects = await answers([crowded.effect(e, "ok", p, source=f"s{n}") for n in range(CROWD)])

    assert effects.count(APPENDED) == CROWD - 1
    assert effects.count(SATISFIED) == 1
    assert await crowded.play.vector(e) == RESUMABLE
    assert (await crowded.record(e, p.waitpoint_id)).signal_count == CROWD
    again = await crowded.play.resumed(e)
    assert len(await crowded.engine.observe_signals(again.handle)) == CROWD
    assert len(await crowded.signals_told(e)) == CROWD
    await check_invariants(crowded.engine)


async def test_those_after_the_one_that_resumed_hear_so(crowded: Waits) -> None:
    held, p = await crowded.suspended()

    heard = await answers([crowded.effect(held.execution_id, "go", p) for _ in range(30)])

    assert heard.count(SATISFIED) == 1
    refused = [one for one in heard if one != SATISFIED]
    assert {type(one) for one in refused} == {errors.TargetNotSignalable}


async def test_a_crowd_with_one_key_is_one_signal(crowded: Waits) -> None:
    held, p = await crowded.suspended(OperatorOnly())

    heard = await answers([crowded.send(held.execution_id, "go", p, idempotency_key="i") for _ in range(30)])

    [first] = [one for one in heard if isinstance(one, Accepted)]
    assert [one for one in heard if one != first] == [DuplicateDelivery(first.signal_id)] * 29
    assert (await crowded.record(held.execution_id, p.waitpoint_id)).signal_count == 1


async def test_forgeries_in_a_crowd_do_not_disturb_the_others(crowded: Waits) -> None:
    held, p = await crowded.suspended(OperatorOnly())
    e = held.execution_id
    calls = []
    for number in range(40):
        token = p.waitpoint_token if number % 2 else "k1:" + "0" * 64
        calls.append(crowded.engine.deliver_signal(crowded.signal(e, "go", p.waitpoint_id, token)))

    heard = await answers(calls)

    assert [type(one) for one in heard] == [errors.InvalidToken, Accepted] * 20
    assert await crowded.failed_check(e) == crowded.play.now


async def test_the_cap_holds_within_a_crowd(crowded: Waits) -> None:
    held, p = await crowded.suspended(OperatorOnly())

    heard = await answers([crowded.effect(held.execution_id, "go", p, max_signals_per_execution=7) for _ in range(20)])

    assert heard.count(NO_OP) == 7
    assert sum(isinstance(one, errors.SignalLimitExceeded) for one in heard) == 13


@pytest.mark.parametrize("loss", Loss)
async def test_a_crowd_whose_answer_is_lost_counts_once(crowded: Waits, wire: FlakyStore, loss: Loss) -> None:
    held, p = await crowded.suspended(OperatorOnly())
    wire.lose("commit", loss, after=1)

    heard = await answers([crowded.effect(held.execution_id, "go", p) for _ in range(20)])

    assert heard == [NO_OP] * 20
    assert len(wire.losses) == 1
    assert (await crowded.record(held.execution_id, p.waitpoint_id)).signal_count == 20


async def test_two_processes_may_crowd_the_same_waitpoint(store: Store, crowded: Waits, clock: ManualClock) -> None:
    other = Engine(store)
    held, p = await crowded.suspended(Count(60, CountKind.DISTINCT_SIGNALS, ("k",)))
    e = held.execution_id
    signals = [crowded.signal(e, "go", p.waitpoint_id, p.waitpoint_token) for _ in range(60)]

    heard = await answers(
        [(other if n % 2 else crowded.engine).deliver_signal(signal) for n, signal in enumerate(signals)]
    )

    assert sorted(one.effect for one in heard) == [APPENDED] * 59 + [SATISFIED]
    await check_invariants(other)


async def test_messages_of_a_crowd_are_all_kept(crowded: Waits) -> None:
    e = await crowded.play.create()

    await answers(
        [
            crowded.engine.send_message(
                MessageArgs(execution_id=e, mailbox="m", message_id=crowded.id(), payload=b"%d" % n)
            )
            for n in range(50)
        ]
    )

    from tests.scenarios.watched import dump

    kept = (await dump(crowded.engine.store))["ff_mail"]
    assert [row.payload for row in kept] == [b"%d" % n for n in range(50)]


def test_a_ledger_keeps_the_first_guard_and_the_last_word() -> None:
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


def test_a_ledger_refuses_to_patch_what_it_has_not_seen() -> None:
    ledger = PendingRows([], [], now=0)

    with pytest.raises(errors.BugError):
        ledger.apply(Change((), (Patch(Execution, ("e",), {"priority": 1}),)))
