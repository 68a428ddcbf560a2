"""The verdict: what the demo proved, looked up in the store afterwards."""

from __future__ import annotations

import msgspec

from flowfabric import Engine
from flowfabric.cursors import FROM_THE_START
from flowfabric.demo import release
from flowfabric.demo.orders import FLAKY, LONG, receipt
from flowfabric.demo.screen import Screen


class DemoState(msgspec.Struct):
    """What has happened so far."""

    ids: dict[str, str]  # the orders
    flow: dict[str, str]  # the members of the flow
    retried: bool = False  # whether the order that fails was seen to wait for its next attempt
    killed: str = ""  # the worker
    killed_at: int = 0  # by the store's clock
    late_write: str = ""  # how the store answered the dead worker's lease
    approval: str = ""  # what came of the yes


async def check_claims(engine: Engine, play: DemoState, screen: Screen) -> bool:
    """Check everything that the summary says, and say it; whether all of it holds."""
    names = {execution_id: name for name, execution_id in play.ids.items()}
    all_ends = await _ends(engine)
    ends = [execution_id for execution_id in all_ends if execution_id in names]
    results = [await engine.get_execution_result(execution_id) for execution_id in names]
    epochs = [await _epochs(engine, execution_id) for execution_id in names]
    highest = max(max(told, default=0) for told in epochs)
    flaky = await engine.attempt_history(play.ids[FLAKY.name])
    long = await engine.attempt_history(play.ids[LONG.name])
    takeover_s = (long[-1].started_at - play.killed_at) / 1000
    kinds = [attempt.attempt_type.value for attempt in long]
    claims = [
        (
            "each order completed exactly once",
            sorted(ends) == sorted(names) and results == [receipt(name) for name in names.values()],
            f"{len(ends)} completions, {len(names)} orders, each with its own result",
        ),
        (
            f"{FLAKY.name} failed and was retried",
            flaky[0].attempt_state.value == "ended_failure"
            and flaky[-1].attempt_state.value == "ended_success"
            and "retry" in [attempt.attempt_type.value for attempt in flaky],
            f"attempt 1: {flaky[0].failure_reason}; attempt {len(flaky)} succeeded",
        ),
        (
            f"{LONG.name} was taken over from {play.killed}",
            kinds[:1] == ["initial"] and kinds[-1] == "reclaim" and long[-1].worker_instance_id != play.killed,
            f"{long[-1].worker_instance_id} began {takeover_s:.1f} s after the kill; nobody had to ask",
        ),
        (
            "the dead worker's lease could write nothing any more",
            play.late_write in ("stale_lease", "execution_not_active"),
            f"refused with {play.late_write}",
        ),
        (
            "epochs only rose",
            highest > 1 and all(told == sorted(set(told)) for told in epochs),
            f"one step with each lease, up to {highest} for {LONG.name}",
        ),
        *await _flow_claims(engine, play, all_ends),
    ]
    screen.console.print()
    for claim, held, detail in claims:
        screen.print_claim(claim, held, detail)
    held = all(held for _, held, _ in claims)
    screen.print_event("proven" if held else "something did not hold", "bold green" if held else "bold red")
    return held


async def _flow_claims(engine: Engine, play: DemoState, ends: list[str]) -> list[tuple[str, bool, str]]:
    states = {name: str(await engine.read_execution_state(one)) for name, one in play.flow.items()}
    attempts = {name: await engine.attempt_history(one) for name, one in play.flow.items()}
    ended_at = {name: some[-1].ended_at or 0 for name, some in attempts.items() if some}
    began_at = {name: some[0].started_at for name, some in attempts.items() if some}
    asked = attempts[release.PUBLISH]
    good = [branch for branch in release.BRANCHES if states[branch] == "completed"]
    once = sorted(one for one in ends if one in play.flow.values()) == sorted(play.flow.values())
    return [
        (
            "the flow went on without the branch that failed",
            states == release.EXPECTED_STATES and once and not attempts[release.ARCHIVE],
            f"{release.FAILING} failed, so {release.ALERT} ran and {release.ARCHIVE} was skipped, each once",
        ),
        (
            f"{release.PUBLISH} ran when two of three were done",
            len(good) == 2 and began_at.get(release.PUBLISH, 0) >= max(ended_at.get(one, 0) for one in good) > 0,
            f"{' and '.join(good)} were enough",
        ),
        (
            f"{release.PUBLISH} waited for a yes without a worker",
            play.approval == "resume_condition_satisfied" and len(asked) == 1 and asked[0].resumed_at is not None,
            "suspended, signalled, and gone on with in the same attempt",
        ),
    ]


async def _epochs(engine: Engine, execution_id: str) -> list[int]:
    """The epochs of the leases that an execution had, in the order in which they were acquired."""
    history = await engine.lease_history(execution_id)
    return [
        entry.fields["lease_epoch" if entry.event == "acquired" else "new_lease_epoch"]
        for entry in history
        if entry.event in ("acquired", "reclaimed")
    ]


async def _ends(engine: Engine) -> list[str]:
    """The executions of the completion feed, from its beginning, as often as they ended."""
    feed = await engine.subscribe_completion(FROM_THE_START)
    ended = []
    while (end := await feed.next(timeout_s=0)) is not None:
        ended.append(end.execution_id)
    return ended
