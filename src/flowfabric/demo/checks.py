"""The claims of the demo, checked against the store afterwards."""

from __future__ import annotations

import msgspec

from flowfabric import Engine
from flowfabric.cursors import FROM_THE_START
from flowfabric.demo import release
from flowfabric.demo.orders import FLAKY, LONG, receipt
from flowfabric.demo.screen import Screen


class DemoState(msgspec.Struct):
    """What has happened in the demo so far."""

    ids: dict[str, str]  # the orders
    flow: dict[str, str]  # the members of the flow
    retried: bool = False  # True once the failing order waits for its next attempt
    killed: str = ""  # the worker that was killed
    killed_at: int = 0  # instant of the store's clock
    late_write: str = ""  # the reply to a write with the dead worker's lease
    approval: str = ""  # the effect of the approval signal


async def check_claims(engine: Engine, demo: DemoState, screen: Screen) -> bool:
    """Check and print all claims; True if all of them hold."""
    names = {execution_id: name for name, execution_id in demo.ids.items()}
    all_completed = await _completed_ids(engine)
    completed = [execution_id for execution_id in all_completed if execution_id in names]
    results = [await engine.get_execution_result(execution_id) for execution_id in names]
    epochs = [await _lease_epochs(engine, execution_id) for execution_id in names]
    highest = max(max(acquired, default=0) for acquired in epochs)
    flaky = await engine.attempt_history(demo.ids[FLAKY.name])
    long = await engine.attempt_history(demo.ids[LONG.name])
    takeover_s = (long[-1].started_at - demo.killed_at) / 1000
    kinds = [attempt.attempt_type.value for attempt in long]
    claims = [
        (
            "each order completed exactly once",
            sorted(completed) == sorted(names) and results == [receipt(name) for name in names.values()],
            f"{len(completed)} completions, {len(names)} orders, each with its own result",
        ),
        (
            f"{FLAKY.name} failed and was retried",
            flaky[0].attempt_state.value == "ended_failure"
            and flaky[-1].attempt_state.value == "ended_success"
            and "retry" in [attempt.attempt_type.value for attempt in flaky],
            f"attempt 1: {flaky[0].failure_reason}; attempt {len(flaky)} succeeded",
        ),
        (
            f"{LONG.name} was taken over from {demo.killed}",
            kinds[:1] == ["initial"] and kinds[-1] == "reclaim" and long[-1].worker_instance_id != demo.killed,
            f"{long[-1].worker_instance_id} started {takeover_s:.1f} s after the kill, without an operator",
        ),
        (
            "a write with the dead worker's lease was refused",
            demo.late_write in ("stale_lease", "execution_not_active"),
            f"refused with {demo.late_write}",
        ),
        (
            "lease epochs only increased",
            highest > 1 and all(acquired == sorted(set(acquired)) for acquired in epochs),
            f"by one with each lease, up to {highest} for {LONG.name}",
        ),
        *await _flow_claims(engine, demo, all_completed),
    ]
    screen.console.print()
    for claim, held, detail in claims:
        screen.print_claim(claim, held, detail)
    held = all(held for _, held, _ in claims)
    screen.print_event("proven" if held else "something did not hold", "bold green" if held else "bold red")
    return held


async def _flow_claims(engine: Engine, demo: DemoState, completed: list[str]) -> list[tuple[str, bool, str]]:
    states = {name: str(await engine.read_execution_state(run_id)) for name, run_id in demo.flow.items()}
    attempts = {name: await engine.attempt_history(run_id) for name, run_id in demo.flow.items()}
    ended_at = {name: history[-1].ended_at or 0 for name, history in attempts.items() if history}
    started_at = {name: history[0].started_at for name, history in attempts.items() if history}
    approved = attempts[release.PUBLISH]
    good = [branch for branch in release.BRANCHES if states[branch] == "completed"]
    once = sorted(one for one in completed if one in demo.flow.values()) == sorted(demo.flow.values())
    return [
        (
            "the flow continued without the failed branch",
            states == release.EXPECTED_STATES and once and not attempts[release.ARCHIVE],
            f"{release.FAILING} failed, so {release.ALERT} ran and {release.ARCHIVE} was skipped, each once",
        ),
        (
            f"{release.PUBLISH} ran when two of three were done",
            len(good) == 2
            and started_at.get(release.PUBLISH, 0) >= max(ended_at.get(branch, 0) for branch in good) > 0,
            f"{' and '.join(good)} were enough",
        ),
        (
            f"{release.PUBLISH} waited for its approval without a worker",
            demo.approval == "resume_condition_satisfied" and len(approved) == 1 and approved[0].resumed_at is not None,
            "suspended, signalled and resumed in the same attempt",
        ),
    ]


async def _lease_epochs(engine: Engine, execution_id: str) -> list[int]:
    """Return the epochs of an execution's leases, in the order in which they were acquired."""
    history = await engine.lease_history(execution_id)
    return [
        entry.fields["lease_epoch" if entry.event == "acquired" else "new_lease_epoch"]
        for entry in history
        if entry.event in ("acquired", "reclaimed")
    ]


async def _completed_ids(engine: Engine) -> list[str]:
    """Return the ids in the completion feed, one for each completion event."""
    feed = await engine.subscribe_completion(FROM_THE_START)
    ended = []
    while (end := await feed.next(timeout_s=0)) is not None:
        ended.append(end.execution_id)
    return ended
