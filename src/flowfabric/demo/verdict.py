"""The verdict: what the demo proved, looked up in the store afterwards."""

from __future__ import annotations

import msgspec

from flowfabric import Engine
from flowfabric.cursors import FROM_THE_START
from flowfabric.demo.orders import FLAKY, LONG, receipt
from flowfabric.demo.screen import Screen


class Play(msgspec.Struct):
    """What has happened so far."""

    ids: dict[str, str]
    killed: str = ""  # the worker
    killed_at: int = 0  # by the store's clock
    late_write: str = ""  # how the store answered the dead worker's lease


async def judged(engine: Engine, play: Play, screen: Screen) -> bool:
    """Check everything that the summary says, and say it; whether all of it holds."""
    names = {execution_id: name for name, execution_id in play.ids.items()}
    ends = await _ends(engine)
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
    ]
    screen.console.print()
    for claim, held, detail in claims:
        screen.verdict(claim, held, detail)
    held = all(held for _, held, _ in claims)
    screen.say("proven" if held else "something did not hold", "bold green" if held else "bold red")
    return held


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
