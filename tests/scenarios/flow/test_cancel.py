"""S-039 to S-051 and EX-085: a flow is cancelled once, and the selected members are cancelled despite crashes."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric import errors
from flowfabric.cursors import FROM_THE_START
from flowfabric.engine.operations import flows
from flowfabric.engine.operations.flows import NoWait, WaitIndefinite, WaitTimeout
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.change import Change, Delete, Insert, Patch
from flowfabric.model.event import Topic
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CancelBacklog, CancellationPolicy, Flow, FlowMember, PendingMemberCancel
from flowfabric.rules.feed import Filter
from flowfabric.stores.verdicts import Unstorable, Verdict
from tests.scenarios.flow_env import FlowEnv

WAIT = WaitIndefinite()
ALL, PENDING, FLOW_ONLY = CancellationPolicy


async def cancel_events(flow: FlowEnv, chosen: Filter | None = None) -> list[dict[str, object]]:
    """Return the details of flow cancels on the operator feed."""
    feed = await flow.engine.subscribe_operator_event(FROM_THE_START, chosen)
    found = []
    while (event := await feed.next(timeout_s=0)) is not None:
        found += [event.details] if event.event_type == "flow_cancel_requested" else []
    return found


@pytest.mark.spec("S-039")
async def test_cancel_flow_with_wait_cancels_every_unfinished_member(flow: FlowEnv) -> None:
    await flow.begin("abc")
    await flow.claim("b")
    await flow.succeed("c")

    answer = await flow.engine.cancel_flow(flow.id, policy="cancel_all", reason="r", wait=WAIT)

    assert answer == flow_answers.FlowCancelled(ALL, flow.ids("abc"))
    assert await flow.state(*"abc") == "cancelled cancelled completed"
    for name in "ab":
        row = await flow.row(name)
        assert (row.cancellation_reason, row.cancelled_by) == ("r", "operator_override")
    assert await flow.backlog() == (None, [])
    assert await cancel_events(flow) == [
        {"flow_id": flow.id, "cancellation_policy": "cancel_all", "reason": "r", "member_count": 3}
    ]
    described = await flow.describe()
    assert (described.public_flow_state, described.cancelled_at) == ("cancelled", flow.clock.now)
    assert (described.cancel_reason, described.cancellation_policy) == ("r", "cancel_all")


async def test_the_event_of_a_cancelled_flow_has_the_flow_id_as_execution_id(flow: FlowEnv) -> None:
    await flow.begin("a")
    feed = await flow.engine.subscribe_operator_event(FROM_THE_START)

    await flow.engine.cancel_flow(flow.id, wait=WAIT)

    event = await feed.next(timeout_s=0)
    assert event is not None
    assert (event.event_type, event.execution_id) == ("flow_cancel_requested", flow.id)
    [events] = await flow.engine.store.history(flow.id, Topic.OPERATOR, 10)
    assert events.event.operator == "flow_cancel_requested"


async def test_a_tag_filter_matches_the_cancel_event_of_a_tagged_flow(flow: FlowEnv) -> None:
    await flow.begin()
    await flow.engine.set_flow_tag(flow.id, "app.team", "blue")
    await flow.engine.cancel_flow(flow.id, policy="cancel_all", reason="r", wait=WAIT)

    for team, namespace, count in (("blue", "default", 1), ("red", "default", 0), ("blue", "other", 0)):
        assert len(await cancel_events(flow, Filter(namespace, ("app.team", team)))) == count


@pytest.mark.spec("S-040")
async def test_cancel_flow_without_wait_cancels_in_the_background(flow: FlowEnv) -> None:
    names = [f"m{number:02}" for number in range(40)]
    await flow.begin(names)

    answer = await flow.engine.cancel_flow(flow.id, policy="cancel_all", reason="r", wait=NoWait())

    assert answer == flow_answers.CancellationScheduled(ALL, 40, flow.ids(names))
    assert await flow.engine.bulk_canceller.close() == 0
    assert {await flow.state(name) for name in names} == {"cancelled"}
    assert await flow.backlog() == (None, [])


class RefusingStore:
    """A store that refuses changes of one execution."""

    def __init__(self, flow: FlowEnv, name: str) -> None:
        self._store, self._execution = flow.engine.store, flow.names[name]

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def commit(self, changes: list[Change], hint: frozenset[str] = frozenset()) -> list[Verdict]:
        refused = [any(guard.key == (self._execution,) for guard in one.guards) for one in changes]
        others = [one for one, is_refused in zip(changes, refused, strict=True) if not is_refused]
        verdicts = iter(await self._store.commit(others, hint))
        return [Unstorable("a broken page") if is_refused else next(verdicts) for is_refused in refused]


@pytest.mark.spec("S-041")
async def test_a_member_that_cannot_be_cancelled_is_reported(flow: FlowEnv) -> None:
    await flow.begin("gh")
    flow.engine.runtime.commit_queue._store = RefusingStore(flow, "h")  # type: ignore[assignment]

    answer = await flow.engine.cancel_flow(flow.id, reason="r", wait=WAIT)

    assert answer == flow_answers.PartiallyCancelled(ALL, flow.ids("gh"), [flow.names["h"]])
    assert await flow.state(*"gh") == "cancelled waiting"
    backlog, pending = await flow.backlog()
    assert (pending, backlog and backlog.remaining) == (["h"], 1)
    assert (await flow.load(Flow, flow.id)).public_flow_state == "cancelled"


@pytest.mark.spec("S-042")
async def test_a_finished_or_missing_member_is_not_a_failed_cancel(flow: FlowEnv) -> None:
    await flow.begin("cp")
    await flow.succeed("c")
    await flow.write(Delete(Execution, (flow.names["p"],)))

    answer = await flow.engine.cancel_flow(flow.id, policy="cancel_all", wait=WAIT)

    assert answer == flow_answers.FlowCancelled(ALL, flow.ids("cp"))


async def test_a_member_that_completes_before_its_cancel_is_acknowledged(flow: FlowEnv) -> None:
    await flow.begin("ab")
    await flow.engine.cancel_flow_header(flow.id, reason="r")
    await flow.succeed("a")
    flow.clock.advance_ms(30_000)

    await flow.sweep("cancel_reconciler")

    assert await flow.state(*"ab") == "completed cancelled"
    assert await flow.backlog() == (None, [])


@pytest.mark.spec("S-043")
async def test_a_second_cancel_keeps_the_policy_of_the_first(flow: FlowEnv) -> None:
    await flow.begin("a")
    await flow.engine.cancel_flow(flow.id, policy="cancel_flow_only", reason="first")

    again = await flow.engine.cancel_flow(flow.id, policy="cancel_all", reason="second", wait=WAIT)

    assert again == flow_answers.FlowCancelled(FLOW_ONLY, flow.ids("a"))
    assert (await flow.load(Flow, flow.id)).cancel_reason == "first"
    assert await flow.state("a") == "waiting"
    assert len(await cancel_events(flow)) == 1


@pytest.mark.spec("S-044")
async def test_a_second_cancel_lists_at_most_1000_members(flow: FlowEnv) -> None:
    names = [f"m{number:04}" for number in range(1500)]
    await flow.begin()
    flow.names = {name: flow.new_id() for name in names}
    await flow.write(*(Insert(FlowMember(flow.id, execution)) for execution in flow.names.values()))

    first = await flow.engine.cancel_flow(flow.id)
    again = await flow.engine.cancel_flow(flow.id)

    assert len(first.member_execution_ids) == 1500
    assert again.member_execution_ids == flow.ids(names)[:1000]


@pytest.mark.spec("S-045")
async def test_cancel_pending_keeps_running_and_suspended_members(flow: FlowEnv) -> None:
    await flow.begin("qwmrs")
    await flow.add("d", delay_until=flow.clock.now + 60_000)
    await flow.edge("r", "w")
    await flow.engine.block_execution_for_admission(flow.names["m"], reason="waiting_for_budget")
    running = await flow.claim("r")
    await flow.suspend("s")

    answer = await flow.engine.cancel_flow(flow.id, policy="cancel_pending", wait=WAIT)

    assert answer == flow_answers.FlowCancelled(PENDING, flow.ids("qdwmrs"))
    assert await flow.state(*"qdwm") == "cancelled cancelled cancelled cancelled"
    assert await flow.state(*"rs") == "active suspended"
    await flow.engine.complete(running.handle)
    await flow.engine.resume_execution(flow.names["s"])
    await flow.succeed("s")
    assert await flow.state(*"rs") == "completed completed"


@pytest.mark.spec("S-046")
async def test_acknowledged_members_leave_the_backlog(flow: FlowEnv) -> None:
    await flow.begin("ab")
    await flow.engine.cancel_flow_header(flow.id, reason="r")
    events = await flow.engine.store.feed_end()

    await flow.engine.ack_cancel_member(flow.id, flow.names["a"])
    backlog, pending = await flow.backlog()
    assert (pending, backlog is not None) == (["b"], True)
    await flow.engine.ack_cancel_member(flow.id, flow.names["b"])
    assert await flow.backlog() == (None, [])
    await flow.engine.ack_cancel_member(flow.id, flow.names["b"])
    await flow.engine.ack_cancel_member(flow.id, flow.new_id())
    await flow.engine.ack_cancel_member(flow.engine.minter.uuid(), flow.names["a"])

    assert await flow.engine.store.feed_end() == events


async def test_concurrent_acknowledgements_remove_the_backlog_entry(flow: FlowEnv) -> None:
    await flow.begin("abcd")
    await flow.engine.cancel_flow_header(flow.id)

    await asyncio.gather(*(flow.engine.ack_cancel_member(flow.id, flow.names[name]) for name in "abcd"))

    assert await flow.backlog() == (None, [])


@pytest.mark.spec("S-047")
async def test_the_cancel_reconciler_finishes_a_cancel_after_its_grace_period(flow: FlowEnv) -> None:
    await flow.begin("ab")
    header = await flow.engine.cancel_flow_header(flow.id, reason="r")
    assert isinstance(header, flow_answers.HeaderCancelled)

    await flow.sweep("cancel_reconciler", after_ms=29_999)
    assert await flow.state(*"ab") == "waiting waiting"
    await flow.sweep("cancel_reconciler", after_ms=1)

    assert await flow.state(*"ab") == "cancelled cancelled"
    assert {(await flow.row(name)).cancellation_reason for name in "ab"} == {"r"}
    assert await flow.backlog() == (None, [])


@pytest.mark.spec("S-048")
@pytest.mark.parametrize("crashes", [False, True])
async def test_an_empty_cancel_reason_gets_a_default(flow: FlowEnv, crashes: bool) -> None:
    await flow.begin("a")
    if crashes:
        await flow.engine.cancel_flow_header(flow.id, reason="")
        await flow.sweep("cancel_reconciler", after_ms=30_000)
    else:
        await flow.engine.cancel_flow(flow.id, policy="cancel_all")
        await flow.engine.bulk_canceller.close()

    assert (await flow.row("a")).cancellation_reason == "flow_cancelled"


@pytest.mark.spec("S-049")
async def test_dependents_of_a_cancelled_flow_are_cancelled_not_skipped(flow: FlowEnv) -> None:
    flow.engine.dispatcher._enabled = True
    await flow.begin("abc", edges=("ab", "bc"))

    await flow.engine.cancel_flow(flow.id, policy="cancel_all", reason="r")
    await flow.engine.bulk_canceller.close()
    await flow.engine.dispatcher.wait_idle()

    assert await flow.state(*"abc") == "cancelled cancelled cancelled"
    assert {(await flow.row(name)).cancellation_reason for name in "abc"} == {"r"}


async def test_a_failure_before_the_cancel_leaves_dependents_to_the_cancel(flow: FlowEnv) -> None:
    await flow.begin("abc", edges=("ab", "bc"))
    await flow.engine.cancel_flow_header(flow.id, reason="r")
    await flow.fail_and_cascade("a")

    assert await flow.state(*"bc") == "waiting_children waiting_children"
    assert await flow.counts("b") == "0/1/0 of 1 impossible"
    await flow.sweep("cancel_reconciler", after_ms=30_000)
    assert await flow.state(*"abc") == "failed cancelled cancelled"


async def test_a_running_member_kept_by_cancel_pending_may_be_skipped(flow: FlowEnv) -> None:
    await flow.begin("ab")
    claim = await flow.claim("b")
    await flow.edge("a", "b")

    await flow.engine.cancel_flow(flow.id, policy="cancel_pending", wait=WAIT)
    await flow.cascade("a")

    assert await flow.state(*"ab") == "cancelled skipped"
    with pytest.raises(errors.ExecutionNotActive):
        await flow.engine.complete(claim.handle)


@pytest.mark.spec("S-050")
async def test_invalid_backlog_rows_are_removed(flow: FlowEnv) -> None:
    missing, empty = FlowEnv(flow.engine, flow.clock), FlowEnv(flow.engine, flow.clock)
    await missing.begin("a")
    await missing.engine.cancel_flow_header(missing.id)
    await missing.write(Delete(Flow, (missing.id,)))
    await empty.begin()
    await empty.write(Insert(CancelBacklog(empty.id, flow.clock.now, 1)))
    await flow.begin("v")
    await flow.engine.cancel_flow_header(flow.id, reason="r")
    await flow.write(
        Insert(PendingMemberCancel(flow.id, "no id at all")), Patch(CancelBacklog, (flow.id,), {"remaining": 2})
    )
    flow.clock.advance_ms(30_000)

    done = await flow.engine.sweep_once("cancel_reconciler")

    assert done.errors == 1
    assert [await each.backlog() for each in (missing, empty, flow)] == [(None, [])] * 3
    assert await missing.state("a") == "waiting"
    assert await flow.state("v") == "cancelled"


@pytest.mark.spec("S-051")
async def test_a_filtered_cancel_reconciler_keeps_members_of_other_namespaces(flow: FlowEnv) -> None:
    await flow.create_mixed({"a": "n1", "b": "n2"})
    await flow.engine.cancel_flow_header(flow.id, reason="r")
    flow.clock.advance_ms(30_000)

    await flow.engine.sweep_once("cancel_reconciler", Filter(namespace="n1"))

    assert await flow.state(*"ab") == "cancelled waiting"
    backlog, pending = await flow.backlog()
    assert (pending, backlog is not None) == (["b"], True)
    await flow.engine.gauges.refresh_gauges(max_age_s=0)
    assert flow.engine.metrics.gauges["ff_cancel_backlog_depth", ()] == 1
    await flow.sweep("cancel_reconciler")
    assert await flow.state(*"ab") == "cancelled cancelled"
    await flow.engine.gauges.refresh_gauges(max_age_s=0)
    assert flow.engine.metrics.gauges["ff_cancel_backlog_depth", ()] == 0


async def test_members_excluded_by_a_filter_do_not_starve_the_others(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.sweeps.flows.MAX_MEMBERS_PER_BACKLOG", 2)
    flow.names |= zip("abcdef", sorted(flow.new_id() for _ in range(6)), strict=True)
    await flow.create_mixed({name: "n1" if name in "def" else "n2" for name in "abcdef"})
    await flow.engine.cancel_flow_header(flow.id, grace_ms=0)

    done = [await flow.engine.sweep_once("cancel_reconciler", Filter(namespace="n1")) for _ in range(2)]

    assert [one.processed for one in done] == [2, 1]
    assert (await flow.backlog())[1] == ["a", "b", "c"]
    assert await flow.state(*"abcdef") == "waiting waiting waiting cancelled cancelled cancelled"


@pytest.mark.spec("EX-085")
async def test_a_claimed_member_of_a_cancelled_flow_is_cancelled(flow: FlowEnv) -> None:
    await flow.begin("a")
    await flow.engine.cancel_flow_header(flow.id, reason="r")

    claim = await flow.claim("a")
    flow.clock.advance_ms(20_000)
    await flow.engine.renew(claim.handle)
    await flow.sweep("cancel_reconciler", after_ms=10_000)

    assert await flow.state("a") == "cancelled"
    [attempt] = await flow.engine.attempt_history(flow.names["a"])
    assert attempt.attempt_state == "ended_cancelled"
    history = await flow.engine.lease_history(flow.names["a"])
    assert [entry.fields["reason"] for entry in history if entry.event == "released"] == ["cancelled"]
    events = await flow.engine.store.history(flow.names["a"], Topic.COMPLETION, 10)
    assert [one.event.outcome for one in events] == ["cancelled"]
    with pytest.raises(errors.ExecutionNotActive) as caught:
        await flow.engine.complete(claim.handle)
    assert caught.value.terminal_outcome == "cancelled"


async def test_cancelling_an_unknown_flow_is_refused(flow: FlowEnv) -> None:
    with pytest.raises(errors.NotFound) as caught:
        await flow.engine.cancel_flow(flow.id)
    assert caught.value.entity == "flow"


@pytest.mark.parametrize("grace_ms", [-1, 2**53, 1.5, float("inf"), True, "30000", None])
async def test_an_invalid_grace_period_is_refused(flow: FlowEnv, grace_ms: object) -> None:
    await flow.begin("a")

    with pytest.raises(errors.InvalidGraceMs):
        await flow.engine.cancel_flow_header(flow.id, grace_ms=grace_ms)

    assert (await flow.load(Flow, flow.id)).public_flow_state == "open"


async def test_an_unknown_policy_is_refused_and_changes_nothing(flow: FlowEnv) -> None:
    await flow.begin("a")

    with pytest.raises(errors.InvalidInput):
        await flow.engine.cancel_flow(flow.id, policy="cancel_some")
    with pytest.raises(errors.InvalidInput):
        await flow.engine.cancel_flow(flow.id, wait="for ever")  # type: ignore[arg-type]

    assert (await flow.load(Flow, flow.id)).public_flow_state == "open"


async def test_one_of_two_concurrent_cancels_takes_effect(flow: FlowEnv) -> None:
    await flow.begin("ab")

    both = await asyncio.gather(*(flow.engine.cancel_flow_header(flow.id, reason=reason) for reason in "xy"))

    assert sorted(type(one).__name__ for one in both) == ["HeaderAlreadyTerminal", "HeaderCancelled"]
    assert len(await cancel_events(flow)) == 1
    backlog, pending = await flow.backlog()
    assert (pending, backlog and backlog.remaining) == (["a", "b"], 2)


class BlockedStore:
    """A store that blocks changes of one execution until it is released."""

    def __init__(self, flow: FlowEnv, name: str) -> None:
        self._store, self._execution = flow.engine.store, flow.names[name]
        self.freed = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def commit(self, changes: list[Change], hint: frozenset[str] = frozenset()) -> list[Verdict]:
        if any(guard.key == (self._execution,) for one in changes for guard in one.guards):
            await self.freed.wait()
        return await self._store.commit(changes, hint)


async def test_a_cancel_that_times_out_is_finished_from_the_backlog(flow: FlowEnv) -> None:
    await flow.begin("a")
    blocked = BlockedStore(flow, "a")
    flow.engine.runtime.commit_queue._store = blocked  # type: ignore[assignment]

    with pytest.raises(errors.OperationTimeout) as caught:
        await flow.engine.cancel_flow(flow.id, wait=WaitTimeout(20))

    assert (caught.value.op, caught.value.elapsed_ms) == ("cancel_flow", 20)
    assert (await flow.backlog())[1] == ["a"]
    blocked.freed.set()
    await flow.sweep("cancel_reconciler", after_ms=30_000)
    assert await flow.state("a") == "cancelled"


async def test_an_indefinite_wait_is_bounded(flow: FlowEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flows.MAX_WAIT_MS == 300_000
    monkeypatch.setattr(flows, "MAX_WAIT_MS", 20)
    await flow.begin("a")
    blocked = BlockedStore(flow, "a")
    flow.engine.runtime.commit_queue._store = blocked  # type: ignore[assignment]

    with pytest.raises(errors.OperationTimeout) as caught:
        await flow.engine.cancel_flow(flow.id, wait=WAIT)

    assert caught.value.elapsed_ms == 20
    blocked.freed.set()
    assert (await flow.backlog())[1] == ["a"]
