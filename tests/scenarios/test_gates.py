"""Gates, mailboxes, children and steps: what a durable function waits for survives the worker that waited."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.gates import OpenedGate, Parked
from flowfabric.ids import ExecutionId
from flowfabric.model.answers import Claimed
from flowfabric.model.condition import Condition, Count, CountKind
from flowfabric.model.gate import GateEnd, GateKind, GateMemo
from flowfabric.model.states import PublicState
from flowfabric.rules.mailbox import MailArgs
from flowfabric.rules.parking import GateArgs, Ready
from flowfabric.rules.resuming import Expiry, Resumed
from flowfabric.rules.signals import Accepted, Duplicate
from tests.scenarios.play import ACTIVE, LEASE_MS, RESUMABLE, Play
from tests.scenarios.waits import APPENDED, SATISFIED, SUSPENDED, Waits

WAITS = SUSPENDED.format(reason="waiting_for_signal")
HOUR = 3_600_000


def all_of(*keys: str) -> Condition:
    return Count(len(keys), CountKind.DISTINCT_WAITPOINTS, keys)


class Function:
    """A durable function, as far as the engine sees it."""

    def __init__(self, play: Play, waits: Waits, e: str, held: Claimed | None = None) -> None:
        self.play, self.waits, self.e = play, waits, e
        self.engine = play.engine
        self._held = held

    @property
    def held(self) -> Claimed:
        """What its worker holds."""
        assert self._held is not None
        return self._held

    @held.setter
    def held(self, held: Claimed) -> None:
        self._held = held

    async def approval(self, name: str = "approve", *keys: str, **given: Any) -> OpenedGate | GateMemo:
        keys = keys or ("ana", "bo")
        pairs = tuple((self.waits.id(), key) for key in keys)
        args = GateArgs(name=name, kind=GateKind.SIGNALS, condition=all_of(*keys), waitpoints=pairs, **given)
        return await self.engine.open_gate(self.held.handle, args)

    async def receive(self, name: str, mailbox: str = "steer", **given: Any) -> OpenedGate | GateMemo:
        args = GateArgs(name=name, kind=GateKind.MAILBOX, mailbox=mailbox, **given)
        return await self.engine.open_gate(self.held.handle, args)

    async def timer(self, name: str, length: int) -> OpenedGate | GateMemo:
        return await self.engine.open_gate(
            self.held.handle, GateArgs(name=name, kind=GateKind.TIMER, expires_in_ms=length)
        )

    async def children(self, name: str, *children: str, **given: Any) -> OpenedGate | GateMemo:
        args = GateArgs(name=name, kind=GateKind.CHILDREN, children=children, **given)
        return await self.engine.open_gate(self.held.handle, args)

    async def park(self, *names: str) -> Parked | Ready:
        return await self.engine.park(self.held.handle, names)

    async def vote(self, gate: OpenedGate, key: str, **given: Any) -> str:
        [link] = [link for link in gate.links if link.waitpoint_key == key]
        signal = self.waits.signal(self.e, "vote", link.waitpoint_id, link.token, source=key, **given)
        accepted = await self.engine.deliver_signal(signal)
        assert isinstance(accepted, Accepted)
        return accepted.effect

    async def send(self, text: bytes, mailbox: str = "steer", **given: Any) -> Accepted | Duplicate:
        fields: dict[str, Any] = {"execution_id": self.e, "mailbox": mailbox, "message_id": self.waits.id()}
        return await self.engine.send_message(MailArgs(**(fields | {"payload": text} | given)))

    async def go_on(self, worker: str = "wb") -> None:
        self.held = await self.play.resumed(self.e, worker)

    async def killed(self, worker: str = "wb") -> None:
        await self.play.expired(self.held)
        self.held = await self.play.reclaimed(self.e, worker)

    async def memo(self, name: str) -> GateMemo:
        return (await self.engine.read_waits(self.e)).memos[name]

    async def child(self) -> Claimed:
        """A running child, on the partition of its parent."""
        e = await self.play.create(parent_id=self.e)
        return await self.play.claimed_again(e, "wc")


@pytest.fixture
async def function(play: Play, waits: Waits) -> Function:
    held = await play.claimed()
    return Function(play, waits, held.execution_id, held)


def opened(gate: OpenedGate | GateMemo) -> OpenedGate:
    assert isinstance(gate, OpenedGate)
    return gate


def closed(gate: OpenedGate | GateMemo) -> GateMemo:
    assert isinstance(gate, GateMemo)
    return gate


# -- gates ----------------------------------------------------------------------------------------------------------


async def test_votes_resume_a_parked_function_and_are_remembered(function: Function, play: Play) -> None:
    gate = opened(await function.approval())
    assert isinstance(await function.park("approve"), Parked)
    assert await play.vector(function.e) == WAITS

    assert await function.vote(gate, "ana", payload=b"yes") == APPENDED
    assert await function.vote(gate, "ana") == "appended_to_waitpoint_duplicate"
    assert await function.vote(gate, "bo", payload=b"no") == SATISFIED

    assert await play.vector(function.e) == RESUMABLE
    await function.go_on()
    memo = closed(await function.approval())
    assert memo.ended_as is GateEnd.SATISFIED
    votes = await function.engine.read_votes(memo)
    assert [(vote.source_identity, vote.payload) for vote in votes] == [("ana", b"yes"), ("bo", b"no")]


async def test_links_stay_valid_when_the_worker_dies_after_mailing_them(function: Function, play: Play) -> None:
    gate = opened(await function.approval(expires_in_ms=10 * HOUR))
    assert await function.vote(gate, "ana") == APPENDED
    await function.killed()

    again = opened(await function.approval(expires_in_ms=10 * HOUR))

    assert [link.token.reveal() for link in again.links] == [link.token.reveal() for link in gate.links]
    assert again.gate.expires_at == gate.gate.expires_at
    assert isinstance(await function.park("approve"), Parked)
    assert await function.vote(gate, "bo") == SATISFIED


async def test_votes_survive_the_death_of_the_worker_that_they_resumed(function: Function, play: Play) -> None:
    gate = opened(await function.approval())
    await function.park("approve")
    for key in ("ana", "bo"):
        await function.vote(gate, key)
    await function.go_on()
    await function.killed("wd")

    memo = closed(await function.approval())

    assert len(await function.engine.read_votes(memo)) == 2
    assert await function.park("approve") == Ready(("approve",))
    assert await play.vector(function.e) == ACTIVE


async def test_votes_before_the_wait_count(function: Function, play: Play) -> None:
    gate = opened(await function.approval())
    for key in ("ana", "bo"):
        await function.vote(gate, key)
    assert await play.vector(function.e) == ACTIVE

    assert await function.park("approve") == Ready(("approve",))


async def test_a_gate_that_nobody_passes_in_time_says_so(function: Function, play: Play, waits: Waits) -> None:
    gate = opened(await function.approval(expires_in_ms=1000))
    assert isinstance(await function.park("approve"), Parked)
    await waits.time_out(play.now + 1000)

    assert await play.vector(function.e) == RESUMABLE
    assert (await function.memo("approve")).ended_as is GateEnd.TIMED_OUT
    with pytest.raises(errors.TargetNotSignalable):
        await function.vote(gate, "ana")


async def test_a_vote_after_the_time_is_refused_swept_or_not(function: Function, play: Play) -> None:
    gate = opened(await function.approval(expires_in_ms=1000))
    play.clock.pass_ms(1000)

    async with play.refused(errors.TargetNotSignalable):
        await function.vote(gate, "ana")
    assert await function.park("approve") == Ready(("approve",))
    assert (await function.memo("approve")).ended_as is GateEnd.TIMED_OUT


async def test_different_waits_are_awaited_together_and_again(function: Function, play: Play, waits: Waits) -> None:
    gate = opened(await function.approval())
    await function.timer("nap", 500)
    await function.receive("steer-0")
    names = ("approve", "nap", "steer-0")
    assert isinstance(await function.park(*names), Parked)

    await waits.time_out(play.now + 500)
    await function.go_on()
    assert (await function.memo("nap")).ended_as is GateEnd.SATISFIED
    assert isinstance(await function.park("approve", "steer-0"), Parked)
    await function.send(b"left")
    await function.go_on("wd")
    assert (await function.memo("steer-0")).payload == b"left"
    assert isinstance(await function.park("approve"), Parked)
    await function.vote(gate, "ana")
    assert await function.vote(gate, "bo") == SATISFIED
    assert (await function.engine.read_waits(function.e)).open == {}


async def test_an_operator_nudges_a_parked_function_without_closing_its_gates(function: Function, play: Play) -> None:
    await function.approval()
    await function.park("approve")

    assert await function.engine.resume_execution(function.e) == Resumed(PublicState.WAITING)

    await function.go_on()
    assert list((await function.engine.read_waits(function.e)).open) == ["approve"]
    assert isinstance(await function.park("approve"), Parked)


async def test_parking_on_what_does_not_exist_is_refused(function: Function, play: Play) -> None:
    async with play.refused(errors.InvalidInput):
        await function.park("nothing")
    async with play.refused(errors.InvalidInput):
        await function.park()
    await function.approval()
    async with play.refused(errors.InvalidInput):
        await function.receive("approve")


async def test_a_worker_that_lost_its_lease_neither_opens_nor_parks(function: Function, play: Play) -> None:
    await function.approval()
    stale = function.held
    await function.killed()
    function.held, live = stale, function.held

    async with play.refused(errors.StaleLease):
        await function.approval("other")
    async with play.refused(errors.StaleLease):
        await function.park("approve")
    async with play.refused(errors.StaleLease):
        await function.engine.record_step(stale.handle, "pay", 0, b"late")
    function.held = live
    assert isinstance(await function.park("approve"), Parked)


async def test_waitpoints_of_a_gate_are_listed_and_their_tokens_read(function: Function, play: Play) -> None:
    gate = opened(await function.approval(expires_in_ms=HOUR))

    page = await function.engine.list_pending_waitpoints(function.e)

    assert {entry.waitpoint_key for entry in page.entries} == {"ana", "bo"}
    assert {entry.expires_at for entry in page.entries} == {play.now + HOUR}
    for link in gate.links:
        assert await function.engine.read_waitpoint_token(86, link.waitpoint_id) == link.token


async def test_cancelling_a_parked_function_ends_its_waits(function: Function, play: Play) -> None:
    gate = opened(await function.approval())
    await function.park("approve")
    await function.engine.cancel_execution(function.e)

    with pytest.raises(errors.TargetNotSignalable):
        await function.vote(gate, "ana")
    assert await function.engine.expire_suspension(function.e) is Expiry.NOT_SUSPENDED


# -- mailboxes ------------------------------------------------------------------------------------------------------


async def test_messages_are_kept_before_between_and_after_receives(play: Play, waits: Waits) -> None:
    e = await play.create()
    function = Function(play, waits, e)
    assert (await function.send(b"0")) != await function.send(b"1")  # before the first claim
    await play.grant(e)
    function.held = await play.claim(e)

    got = [closed(await function.receive(f"r{n}")).payload for n in range(2)]
    await function.receive("r2")
    assert isinstance(await function.park("r2"), Parked)
    await function.send(b"2")
    await function.send(b"3")
    await function.go_on()
    got += [(closed(await function.receive(f"r{n}"))).payload for n in (2, 3)]

    assert got == [b"0", b"1", b"2", b"3"]
    assert (await play.everything())["ff_mail"] == []


async def test_a_message_received_once_is_the_answer_for_ever(function: Function, play: Play) -> None:
    await function.send(b"first", sender="ana")
    memo = closed(await function.receive("r0"))
    await function.send(b"second")
    await function.killed()

    assert closed(await function.receive("r0")) == memo
    assert (memo.payload, memo.sender) == (b"first", "ana")
    assert closed(await function.receive("r1")).payload == b"second"


async def test_mailboxes_have_names(function: Function) -> None:
    await function.send(b"a", mailbox="one")
    await function.send(b"b", mailbox="two")

    assert closed(await function.receive("r0", "two")).payload == b"b"
    assert closed(await function.receive("r1", "one")).payload == b"a"


async def test_two_receivers_of_one_name_are_served_in_turn(function: Function, play: Play) -> None:
    await function.receive("r0")
    await function.receive("r1")
    await function.send(b"a")
    await function.send(b"b")

    assert [(await function.memo(name)).payload for name in ("r0", "r1")] == [b"a", b"b"]


async def test_a_message_with_a_key_is_kept_once(function: Function) -> None:
    first = await function.send(b"a", idempotency_key="i")
    assert isinstance(first, Accepted)
    assert await function.send(b"a", idempotency_key="i") == Duplicate(first.signal_id)
    assert isinstance(await function.send(b"a", mailbox="other", idempotency_key="i"), Accepted)

    assert closed(await function.receive("r0")).payload == b"a"
    assert isinstance(await function.receive("r1"), OpenedGate)


async def test_messages_to_the_missing_and_the_ended_are_refused(function: Function, play: Play) -> None:
    async with play.refused(errors.NotFound, entity="execution"):
        await function.send(b"a", execution_id=play.engine.new_execution_id())
    async with play.refused(errors.PayloadTooLarge):
        await function.send(b"x" * 65_537)
    await function.engine.complete(function.held.handle)
    async with play.refused(errors.TargetNotSignalable):
        await function.send(b"a")


async def test_a_message_that_nobody_receives_in_time_stays(function: Function, play: Play, waits: Waits) -> None:
    await function.receive("r0", expires_in_ms=1000)
    await function.park("r0")
    await waits.time_out(play.now + 1000)
    assert (await function.memo("r0")).ended_as is GateEnd.TIMED_OUT

    await function.send(b"late")
    await function.go_on()
    assert closed(await function.receive("r1")).payload == b"late"


# -- children -------------------------------------------------------------------------------------------------------


async def test_the_end_of_children_resumes_their_parent(function: Function, play: Play) -> None:
    first, second = await function.child(), await function.child()
    await function.children("both", first.execution_id, second.execution_id)
    await function.park("both")

    await function.engine.complete(first.handle)
    await function.engine.folds_done()
    assert await play.vector(function.e) == WAITS
    await function.engine.complete(second.handle)
    await function.engine.folds_done()

    assert await play.vector(function.e) == RESUMABLE
    assert (await function.memo("both")).ended_as is GateEnd.SATISFIED


async def test_a_child_that_ended_before_the_wait_counts(function: Function) -> None:
    child = await function.child()
    await function.engine.complete(child.handle)
    await function.engine.folds_done()

    assert closed(await function.children("one", child.execution_id)).ended_as is GateEnd.SATISFIED
    assert closed(await function.children("again", child.execution_id)).ended_as is GateEnd.SATISFIED


@pytest.mark.parametrize(
    ("need", "any_outcome", "ends", "ended_as"),
    [
        (2, False, ["success", "failed", "success"], GateEnd.SATISFIED),
        (2, False, ["failed", "failed"], GateEnd.IMPOSSIBLE),
        (3, True, ["failed", "success", "cancelled"], GateEnd.SATISFIED),
        (1, False, ["success"], GateEnd.SATISFIED),
        (3, False, ["failed"], GateEnd.IMPOSSIBLE),
    ],
)
async def test_a_quorum_of_children(
    function: Function, play: Play, need: int, any_outcome: bool, ends: list[str], ended_as: GateEnd
) -> None:
    children = [await function.child() for _ in range(3)]
    names = [child.execution_id for child in children]
    await function.children("quorum", *names, need=need, any_outcome=any_outcome)
    await function.park("quorum")

    for number, (child, end) in enumerate(zip(children, ends, strict=False)):
        assert await play.vector(function.e) == WAITS, f"before end {number}"
        match end:
            case "success":
                await function.engine.complete(child.handle)
            case "failed":
                await function.engine.fail(child.handle, reason="no", category="permanent")
            case _:
                await function.engine.cancel_execution(child.execution_id)
        await function.engine.folds_done()

    assert await play.vector(function.e) == RESUMABLE
    assert (await function.memo("quorum")).ended_as is ended_as


async def test_an_end_that_nobody_carried_over_is_found_by_the_sweep(function: Function, play: Play) -> None:
    child = await function.child()
    await function.children("one", child.execution_id)
    await function.park("one")
    function.engine.followers.clear()  # as if the process had died right after the commit

    await function.engine.complete(child.handle)
    assert await play.vector(function.e) == WAITS
    assert (await function.engine.sweep_once("child_ends")).processed == 1

    assert await play.vector(function.e) == RESUMABLE
    assert (await function.engine.sweep_once("child_ends")).processed == 0


async def test_a_child_lives_where_its_parent_does(play: Play) -> None:
    with pytest.raises(errors.InvalidInput, match="parent_id"):
        await play.create(parent_id=ExecutionId("{fp:1}:11111111-1111-4111-8111-111111111111"))


async def test_many_children_are_taken_in_together(store: Any, clock: Any) -> None:
    from flowfabric.engine.engine import Engine

    play = Play(Engine(store), clock)
    held = await play.claimed()
    function = Function(play, Waits(play), held.execution_id, held)
    children = [await function.child() for _ in range(60)]
    await function.children("all", *(child.execution_id for child in children))
    await function.park("all")

    await asyncio.gather(*(function.engine.complete(child.handle) for child in children))
    await function.engine.folds_done()

    assert await play.vector(function.e) == RESUMABLE


# -- steps ----------------------------------------------------------------------------------------------------------


async def test_the_first_record_of_a_step_stands(function: Function, play: Play) -> None:
    first = await function.engine.record_step(function.held.handle, "pay", 0, b"receipt", digest="d")
    again = await function.engine.record_step(function.held.handle, "pay", 0, b"another")
    other = await function.engine.record_step(function.held.handle, "pay", 1, b"another")

    assert (first.result, first.recorded_at) == (b"receipt", play.now)
    assert again == first
    assert other.result == b"another"
    assert await function.engine.read_steps(function.e) == [first, other]


async def test_steps_survive_everything_but_the_replay_of_a_success(function: Function, play: Play) -> None:
    memo = await function.engine.record_step(function.held.handle, "pay", 0, b"receipt")
    await function.killed()
    assert await function.engine.read_steps(function.e) == [memo]
    await function.timer("nap", 0)
    assert await function.park("nap") == Ready(("nap",))
    await function.engine.fail(function.held.handle, reason="no", category="permanent")
    await function.engine.replay_execution(function.e)
    assert await function.engine.read_steps(function.e) == [memo]
    assert "nap" in (await function.engine.read_waits(function.e)).memos

    function.held = await play.claimed_again(function.e, "wx")
    gate = opened(await function.approval())
    await function.engine.complete(function.held.handle)
    await function.engine.replay_execution(function.e)

    assert await function.engine.read_steps(function.e) == []
    left = await function.engine.read_waits(function.e)
    assert (left.open, left.memos) == ({}, {})
    with pytest.raises(errors.TargetNotSignalable):
        await function.vote(gate, "ana")


async def test_a_lapsed_lease_records_nothing(function: Function, play: Play) -> None:
    play.clock.pass_ms(LEASE_MS)

    with pytest.raises(errors.LeaseExpired):
        await function.engine.record_step(function.held.handle, "pay", 0, b"late")

    assert await function.engine.read_steps(function.e) == []


async def test_everything_goes_with_the_execution(function: Function, play: Play) -> None:
    child = await function.child()
    await function.engine.append_frame(function.held.handle, b"{}", mode="summary")
    await function.engine.record_step(function.held.handle, "pay", 0, b"receipt")
    gate = opened(await function.approval())
    await function.vote(gate, "ana", idempotency_key="i")
    await function.send(b"unread", idempotency_key="i")
    await function.receive("r0")
    await function.engine.complete(child.handle)
    await function.engine.folds_done()
    await function.engine.complete(function.held.handle)

    play.clock.pass_ms(25 * HOUR)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 2

    kept = await play.everything()
    left = {name for name, rows in kept.items() if rows and name.startswith("ff_")}
    assert left <= {"ff_keystore", "ff_waitpoint_hmac", "ff_idempotency", "ff_lane", "ff_line", "ff_sweep"}
