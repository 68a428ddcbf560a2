"""Invariants of schedules: an instant has one run at most, and what is decided lies before what comes next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from flowfabric.engine.engine import Engine
from flowfabric.model.execution import Execution, Payload
from flowfabric.model.scheduling.schedule import Schedule
from flowfabric.rules.schedules.identity import run_id
from flowfabric.rules.schedules.overlap import MAX_QUEUED, SCHEDULE_KEY, pending_of
from flowfabric.testing.invariants import InvariantBroken, scan_all


async def check_schedule_invariants(engine: Engine) -> None:
    """Check every schedule and its runs; raises `InvariantBroken` with every violation."""
    schedules = {row.schedule_id: row for row in await scan_all(engine.store, Schedule)}
    if not schedules:
        return
    payloads = {payload.execution_id: payload for payload in await scan_all(engine.store, Payload)}
    runs: dict[str, dict[str, int]] = {name: {} for name in schedules}
    for row in await scan_all(engine.store, Execution):
        if row.parent_id in schedules and (instant := _instant(payloads.get(row.execution_id))) is not None:
            runs[row.parent_id][row.execution_id] = instant
    broken = [text for name, row in schedules.items() for text in _violations(row, runs[name])]
    if broken:
        raise InvariantBroken("\n".join(broken))


def _violations(row: Schedule, runs: Mapping[str, int]) -> Iterator[str]:
    pending = pending_of(row)
    derived = Counter(at for name, at in runs.items() if name == run_id(row.schedule_id, at))
    for instant, count in derived.items():
        if count > 1:
            yield f"schedule {row.name}: {count} runs for the instant {instant}"
    if len(runs) > row.fired:
        yield f"schedule {row.name}: {len(runs)} runs, and {row.fired} were counted"
    if row.next_instant is not None and row.next_instant <= row.decided_until:
        yield f"schedule {row.name}: its next instant was decided before"
    if (row.next_at is None) != (row.next_instant is None):
        yield f"schedule {row.name}: an instant without a time to fire it, or the reverse"
    if row.paused_at is not None and row.next_at is not None:
        yield f"schedule {row.name}: it is paused, and fires"
    if len(set(pending)) < len(pending) or len(pending) > MAX_QUEUED:
        yield f"schedule {row.name}: its queue has an instant twice, or too many"
    for instant in pending:
        if run_id(row.schedule_id, instant) in runs:
            yield f"schedule {row.name}: the instant {instant} is queued and has a run"


def _instant(payload: Payload | None) -> int | None:
    if payload is None or payload.policy is None:
        return None
    found = msgspec.json.decode(payload.policy).get(SCHEDULE_KEY)
    return None if found is None else int(found["at"])
