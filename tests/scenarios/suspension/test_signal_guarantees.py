"""Sentences of the specification of waits that no numbered scenario tells: signals, tokens and ways out."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import ExecutionId, partition_of
from flowfabric.model.change import Change, Guard, Upsert
from flowfabric.model.condition import AllConditions, ByName, Count, CountKind, OperatorOnly, Single, TimeoutOnly
from flowfabric.model.signing_key import Keystore, SigningKey
from flowfabric.model.suspension import TimeoutBehavior, WaitpointState
from flowfabric.rules.suspension.arguments import FreshWaitpoint
from flowfabric.rules.suspension.resume import SuspensionExpiry
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery, SignalArgs
from flowfabric.stores.queries import Read
from tests.scenarios.play import RESUMABLE, Play
from tests.scenarios.waits import APPENDED, BUFFERED, NO_OP, REPEATED, SATISFIED, SUSPENDED, Waits, count, named

DAY = 86_400_000
WAITS = SUSPENDED.format(reason="waiting_for_signal")


async def test_a_delivery_is_looked_at_in_its_order(play: Play, waits: Waits) -> None:
    """Each call is wrong in every later way as well."""
    held, p = await waits.suspended(named("go"))
    e, token = held.execution_id, p.waitpoint_token
    await waits.effect(e, "other", p, idempotency_key="first")

    async def refused(kind: type[errors.FabricError], *, stamped: bool = False, **given: Any) -> None:
        args: dict[str, Any] = {
            "execution_id": e,
            "payload": b"x",
            "idempotency_key": "new",
            "max_signals_per_execution": 1,
        } | given
        signal = waits.signal(e, "go", p.waitpoint_id, args.pop("waitpoint_token", token))
        before = await play.everything()
        with pytest.raises(kind):
            await play.engine.deliver_signal(
                SignalArgs(**({n: getattr(signal, n) for n in signal.__struct_fields__} | args))
            )
        after = await play.everything()
        changed = {name for name in before if before[name] != after[name]}
        assert changed == ({"ff_exec_core"} if stamped else set())

    missing = play.engine.new_execution_id()
    await refused(errors.PayloadTooLarge, payload=b"x" * 65_537, execution_id=missing, waitpoint_token="")
    await refused(errors.NotFound, execution_id=missing, waitpoint_token="")
    await refused(errors.InvalidToken, waitpoint_token="", idempotency_key="first", stamped=True)
    play.clock.advance_ms(1)
    await refused(errors.SignalLimitExceeded)
    again = await waits.send(e, "go", p, idempotency_key="first", max_signals_per_execution=1)
    assert isinstance(again, DuplicateDelivery)
    await play.engine.cancel_execution(e, reason="over")
    await refused(errors.TargetNotSignalable)
    assert isinstance(await waits.send(e, "go", p, idempotency_key="first"), DuplicateDelivery)
    await refused(errors.InvalidToken, waitpoint_token="k1:" + "0" * 64, stamped=True)


async def test_a_closed_waitpoint_says_so_only_while_its_execution_waits_on_another(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e = held.execution_id
    pending = await play.engine.create_waitpoint(held.handle, "k", DAY)
    assert await play.engine.close_waitpoint(pending.waitpoint_id) is True
    async with play.untouched():
        assert await play.engine.close_waitpoint(pending.waitpoint_id, "again") is False
    record = await waits.record(e, pending.waitpoint_id)
    assert (record.state, record.close_reason, record.satisfied_at) == ("closed", "proactive_close", None)

    async with play.refused(errors.TargetNotSignalable):
        await waits.send(e, "go", pending)
    p = await waits.suspend(held)
    async with play.refused(errors.WaitpointClosed):
        await waits.send(e, "go", pending)
    assert await waits.effect(e, "go", p) == SATISFIED
    async with play.refused(errors.TargetNotSignalable):
        await waits.send(e, "go", p)
    async with play.refused(errors.WaitpointNotFound):
        await play.engine.close_waitpoint(waits.id())


async def test_a_waitpoint_that_was_closed_by_hand_stays_so_when_its_time_is_over(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "k", 1000)
    await play.engine.close_waitpoint(pending.waitpoint_id, "changed my mind")
    play.clock.advance_ms(1000)

    async with play.untouched():
        assert (await play.engine.sweep_once("pending_wp_expiry")).processed == 0

    assert (await waits.record(held.execution_id, pending.waitpoint_id)).close_reason == "changed my mind"


async def test_what_is_counted_of_each_effect(play: Play, waits: Waits) -> None:
    condition = AllConditions(
        (Single("a", ByName("go")), Count(2, CountKind.DISTINCT_WAITPOINTS, ("a", "b"), ByName("ok")))
    )
    held, a = await waits.suspended(condition, FreshWaitpoint(waits.id(), "a"), FreshWaitpoint(waits.id(), "b"))
    e, [b] = held.execution_id, a.additional_waitpoints
    played = (
        (a, "noise", "signal_ignored_matcher_failed", (1, 0)),
        (a, "go", APPENDED, (2, 1)),
        (a, "go", REPEATED, (3, 2)),
        (a, "ok", APPENDED, (4, 3)),
        (b, "go", "signal_ignored_matcher_failed", (1, 0)),
        (b, "ok", SATISFIED, (2, 1)),
    )
    for place, name, effect, counted in played:
        play.clock.advance_ms(1)
        assert await waits.effect(e, name, place) == effect
        record = await waits.record(e, place.waitpoint_id)
        assert (record.signal_count, record.matched_signal_count, record.last_signal_at) == (*counted, play.now)
        root = await play.engine.describe_suspension(e)
        assert root is not None
        assert root.last_signal_at == play.now
    told = [news.effect for news in await waits.signals_told(e)]
    assert told == [f"Other({effect})" for _, _, effect, _ in played[:-1]] + ["Satisfied"]


async def test_a_condition_that_names_other_places_ignores_the_signal(play: Play, waits: Waits) -> None:
    for condition in (
        count(1, CountKind.DISTINCT_SIGNALS, "x"),
        AllConditions((OperatorOnly(), Single("x"), TimeoutOnly())),
    ):
        held, p = await waits.suspended(condition, timeout_at=play.now + DAY)
        assert await waits.effect(held.execution_id, "go", p) == "signal_ignored_not_in_condition"
        assert (await waits.record(held.execution_id, p.waitpoint_id)).matched_signal_count == 0


async def test_a_true_count_goes_on_counting(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(AllConditions((count(1), Single("k", ByName("go")))))
    e = held.execution_id

    assert [await waits.effect(e, "x", p, source) for source in ("ana", "bo", "bo")] == [APPENDED, APPENDED, REPEATED]
    assert await waits.effect(e, "go", p, "bo") == SATISFIED
    seen = await play.engine.observe_signals((await play.resumed(e)).handle)
    assert [one.source_identity for one in seen] == ["ana", "bo", "bo"]


async def test_names_are_compared_letter_by_letter(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(named("Zo\u00eb go"))
    for name in ("zo\u00eb go", "Zoe\u0308 go", "Zo\u00eb go ", "", "Zo\u00eb"):
        assert await waits.effect(held.execution_id, name, p) == NO_OP
    assert await waits.effect(held.execution_id, "Zo\u00eb go", p) == SATISFIED


async def test_distinct_signals_are_told_apart_by_their_ids(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(count(2, CountKind.DISTINCT_SIGNALS))
    e, one = held.execution_id, waits.id()

    assert await waits.effect(e, "go", p, signal_id=one) == APPENDED
    assert await waits.effect(e, "go", p, "bo", signal_id=one) == REPEATED
    assert await waits.effect(e, "go", p) == SATISFIED


async def test_repeated_approvals_are_one_source(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(count(2))

    async def approve(suffix: str, ttl: int = DAY) -> Accepted | DuplicateDelivery:
        return await play.engine.deliver_approval_signal(
            held.execution_id,
            lane_id="default",
            waitpoint_id=p.waitpoint_id,
            signal_name="approved",
            idempotency_suffix=suffix,
            signal_dedup_ttl_ms=ttl,
        )

    first = await approve("a")
    assert isinstance(first, Accepted)
    assert first.effect == APPENDED
    assert await approve("a") == DuplicateDelivery(first.signal_id)
    for suffix, ttl in (("b", DAY), ("a", 0)):
        again = await approve(suffix, ttl)
        assert isinstance(again, Accepted)
        assert again.effect == REPEATED
    kept = (await play.everything())["ff_signal"][0]
    assert (kept.signal_category, kept.source_type, kept.source_identity) == ("approval", "operator", "")
    assert (kept.target_scope, kept.payload, kept.idempotency_key) == ("execution", None, "approval:approved:a")
    assert await waits.effect(held.execution_id, "approved", p, "ana") == SATISFIED


async def test_a_signal_is_kept_as_it_was_sent(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended()
    given: dict[str, Any] = {
        "payload": b"\x00\xff",
        "payload_encoding": "cbor",
        "correlation_id": "c",
        "created_at": 5,
        "target_scope": "execution",
        "idempotency_key": "i",
        "signal_name": "Ein Wort \n mehr",
        "source_type": "",
    }
    await waits.send(held.execution_id, "go", p, **given)

    [kept] = (await play.everything())["ff_signal"]
    assert {name: getattr(kept, name) for name in given} == given
    assert (kept.accepted_at, kept.observed_effect) == (play.now, SATISFIED)


async def spoil(engine: Engine, keys: list[SigningKey]) -> None:
    """The keystore's rows, written past every rule."""
    [[root]] = (await engine.store.load([Read(Keystore, (0,))])).rows
    change = Change(
        guards=(Guard(Keystore, (0,), root.revision),),
        writes=(Upsert(Keystore(0, root.current_kid)), *(Upsert(key) for key in keys)),
        id=engine.minter.change_id(),
    )
    assert await engine.store.commit([change]) != [None]


@pytest.mark.parametrize(
    ("keys", "kind", "detail"),
    [
        ([SigningKey("k1", "00" * 32, current=False)], errors.InvalidInput, "hmac_secret_not_initialized"),
        ([SigningKey("k1", "nonsense", current=True)], errors.Corruption, "invalid_secret"),
        ([SigningKey("k1", "", current=True)], errors.Corruption, "invalid_secret"),
        (
            [SigningKey("k1", "00" * 32, current=False), SigningKey("k2", "22" * 32, current=True)],
            errors.InvalidToken,
            "token_expired",
        ),
        (
            [SigningKey("k1", "nonsense", current=False, expires_at=-1), SigningKey("k2", "22" * 32, current=True)],
            errors.InvalidToken,
            "token_expired",
        ),
    ],
    ids=("no current key", "spoilt", "torn", "retired without an end", "retired long ago, and spoilt"),
)
async def test_a_keystore_that_cannot_be_used_refuses_and_stamps(
    play: Play, waits: Waits, keys: list[SigningKey], kind: type[errors.FabricError], detail: str
) -> None:
    held, p = await waits.suspended()
    await spoil(play.engine, keys)
    play.clock.advance_ms(1)

    for token in (p.waitpoint_token.reveal(), "k1:" + "0" * 64):
        with pytest.raises(kind) as refusal:
            await play.engine.deliver_signal(waits.signal(held.execution_id, "go", p.waitpoint_id, token))
        assert refusal.value.detail == detail
    assert await waits.failed_check(held.execution_id) == play.now
    with pytest.raises(errors.InvalidToken, match="missing_token"):
        await play.engine.deliver_signal(waits.signal(held.execution_id, "go", p.waitpoint_id, ""))
    with pytest.raises(errors.InvalidToken, match="invalid_token"):
        await play.engine.deliver_signal(waits.signal(held.execution_id, "go", p.waitpoint_id, "k1:short"))
    assert await play.vector(held.execution_id) == WAITS


async def test_nothing_happens_to_a_suspension_before_its_time_and_at_it_everything(play: Play, waits: Waits) -> None:
    a, b = FreshWaitpoint(waits.id(), "a"), FreshWaitpoint(waits.id(), "b")
    held, p = await waits.suspended(AllConditions((Single("a"), Single("b"))), a, b, timeout_at=play.now + 100)
    e = held.execution_id
    play.clock.advance_ms(99)
    async with play.untouched():
        assert await play.engine.expire_suspension(e) is SuspensionExpiry.NOT_DUE
        assert (await play.engine.sweep_once("suspension_timeout")).processed == 0
    assert await waits.effect(e, "go", p) == APPENDED
    play.clock.advance_ms(1)

    assert await play.engine.expire_suspension(e) is SuspensionExpiry.FAILED

    for one in (a, b):
        record = await waits.record(e, one.waitpoint_id)
        assert (record.state, record.close_reason, record.satisfied_at) == ("closed", "timed_out_fail", None)
    core = await play.core(e)
    assert (core["failure_reason"], core["completed_at"]) == ("suspension_timeout:fail", play.now)
    row = await play.sheet(e)
    assert (row.current_suspension_id, row.current_waitpoint_id) == (None, None)
    async with play.untouched():
        assert await play.engine.expire_suspension(e) is SuspensionExpiry.NOT_SUSPENDED
        assert await play.engine.expire_suspension(play.engine.new_execution_id()) is SuspensionExpiry.NOT_SUSPENDED
    assert await waits.engine.observe_signals(held.handle) == []


async def test_an_escalated_suspension_times_out_no_more_and_is_resumed_as_ever(play: Play, waits: Waits) -> None:
    held, _ = await waits.suspended(timeout_at=play.now, timeout_behavior=TimeoutBehavior.ESCALATE)
    e = held.execution_id
    assert await play.engine.expire_suspension(e) is SuspensionExpiry.ESCALATED
    async with play.untouched():
        assert await play.engine.expire_suspension(e) is SuspensionExpiry.NOT_DUE
    root = await play.engine.describe_suspension(e)
    assert root is not None
    assert (root.timeout_at, root.timeout_behavior, root.closed_at) == (None, None, None)
    await play.engine.resume_execution(e)
    assert await play.vector(e) == RESUMABLE


async def test_only_the_pair_of_execution_and_partition_finds_a_token(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended()
    here = partition_of(ExecutionId(held.execution_id))
    read = play.engine.read_waitpoint_token

    assert await read(here, p.waitpoint_id) == p.waitpoint_token
    assert await read(f"{{fp:{here}}}", p.waitpoint_id) == p.waitpoint_token
    assert await read(here + 1, p.waitpoint_id) is None
    assert await read(here, waits.id()) is None
    pending = await play.engine.create_waitpoint((await play.claimed()).handle, "k", 10)
    assert await read(here, pending.waitpoint_id) == pending.token
    play.clock.advance_ms(10)
    assert await read(here, pending.waitpoint_id) is None
    for bad in ("{b:1}", "nonsense", -1, 70_000, None):
        with pytest.raises(errors.InvalidInput):
            await read(bad, p.waitpoint_id)  # type: ignore[arg-type]


async def test_waitpoints_are_made_pending_and_unlike_each_other(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    one, two = [await play.engine.create_waitpoint(held.handle, "same", 1000) for _ in range(2)]

    assert one.waitpoint_id != two.waitpoint_id
    listed = (await play.engine.list_pending_waitpoints(held.execution_id)).entries
    assert [entry.waitpoint_id for entry in listed] == sorted((one.waitpoint_id, two.waitpoint_id))
    for entry in listed:
        assert (entry.state, entry.required_signal_names, entry.activated_at) == (WaitpointState.PENDING, [], None)
        assert (entry.waitpoint_key, entry.created_at, entry.expires_at) == ("same", play.now, play.now + 1000)
    assert await waits.effect(held.execution_id, "go", one, idempotency_key="i") == BUFFERED
    assert await waits.effect(held.execution_id, "go", two, idempotency_key="i") == BUFFERED
    play.clock.advance_ms(1000)
    assert (await play.engine.list_pending_waitpoints(held.execution_id)).entries == []
    assert (await play.engine.sweep_once("pending_wp_expiry")).processed == 2
    record = await waits.record(held.execution_id, one.waitpoint_id)
    assert (record.state, record.close_reason, record.signal_count) == ("closed", "never_committed", 1)
