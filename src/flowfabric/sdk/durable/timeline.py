"""The timeline of a durable function: what it has done and waits for, in the order in which it did so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.engine.types import sets_of
from flowfabric.model.failure import read_failure
from flowfabric.model.gate import Gate, GateKind, GateMemo, GateOutcome, StepMemo, StepState
from flowfabric.model.text import format_instant, pluralize
from flowfabric.sdk.durable.ledger import ENDED, INSIDE

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI

MAX_DETAIL_CHARS = 200
# Operations that are recorded like steps, under names with a prefix.
_OPERATIONS = {
    "child": "child",
    "close": "close",
    "patch": "patched",
    "pin": "pinned",
    "race": "race",
    "reply": "reply",
    "reserved": "reserve",
    "spent": "spend",
}
_WAITS = {
    GateKind.SIGNALS: "approval",
    GateKind.MAILBOX: "receive",
    GateKind.CHILDREN: "children",
    GateKind.TIMER: "sleep",
}


class TimelineEntry(msgspec.Struct, frozen=True):
    """One operation of a durable function."""

    number: int | None  # its place in the order of operations; None if an older release recorded it
    at: int
    # "step", "sleep", "receive", "approval", "children", "child", "patched", "pinned", "race", "reserve", "spend",
    # "set", "reply" or "close"
    kind: str
    name: str
    state: str  # "done", "failed", "tries", "began", "left", "open", "timed_out" …
    detail: str = ""  # the result, the failure, the tries so far, or what it waits for
    started_at: int | None = None  # of a step, if that is known; `at` is when it was recorded

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.state}" + (f" ({self.detail})" if self.detail else "")


async def read_timeline(engine: EngineAPI, execution_id: str) -> list[TimelineEntry]:
    """Read the timeline of an execution; empty if it is no durable function."""
    steps, waits = await engine.read_steps(execution_id), await engine.read_waits(execution_id)
    entries = [_step_entry(memo) for memo in steps if not _is_detail(memo)]
    entries += [_memo_entry(memo) for memo in waits.memos.values()]
    entries += [_gate_entry(name, gate) for name, gate in waits.open.items()]
    return sorted(_without_superseded(entries), key=lambda entry: (entry.number or 0, entry.at))


def _is_detail(memo: StepMemo) -> bool:
    """True for how a child ended, which its gate shows, and for a branch that was left, beside its operations."""
    return memo.step.startswith(ENDED) or (memo.state is StepState.LEFT and memo.step.endswith("/"))


def _without_superseded(entries: list[TimelineEntry]) -> Iterator[TimelineEntry]:
    """Leave out tries and starts of steps that have ended."""
    ended = {(entry.kind, entry.name) for entry in entries if entry.state in ("done", "failed")}
    for entry in entries:
        if entry.state not in ("tries", "began") or (entry.kind, entry.name) not in ended:
            yield entry


def _step_entry(memo: StepMemo) -> TimelineEntry:
    prefix, _, rest = memo.step.partition(":")
    is_operation = prefix in _OPERATIONS and (bool(rest) or prefix == "pin")
    kind, name = (_OPERATIONS[prefix], rest) if is_operation else ("step", memo.step)
    if memo.state is StepState.FACT:
        return TimelineEntry(memo.number, memo.recorded_at, "set", memo.step, "done", _step_detail(memo))
    name = name if memo.occurrence == 0 else f"{name} #{memo.occurrence}"
    return TimelineEntry(
        memo.number, memo.recorded_at, kind, name, memo.state.value, _step_detail(memo), memo.started_at
    )


def _step_detail(memo: StepMemo) -> str:
    match memo.state:
        case StepState.DONE:
            return _cut(memo.result.decode("utf-8", "replace"))
        case StepState.FAILED:
            failure = read_failure(memo.result)
            return _cut(f"{failure.type}: {failure.text}")
        case StepState.TRIES:
            return _tries_text(memo.result)
        case StepState.FACT:
            return "" if memo.step.startswith(INSIDE) else pluralize(sets_of(memo), "time")
        case _:
            return ""


def _tries_text(data: bytes) -> str:
    """Return "try 3 of 5, next at 12:03:10, last: 503" for recorded tries."""
    try:
        tries: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        return _cut(data.decode("utf-8", "replace"))
    most = tries.get("of")
    parts = [f"try {tries.get('count', 0)}" + ("" if most is None else f" of {most}")]
    if next_at := tries.get("next_at"):
        parts.append(f"next at {format_instant(next_at)}")
    if last := tries.get("last"):
        parts.append(f"last: {last}")
    return _cut(", ".join(parts))


def _memo_entry(memo: GateMemo) -> TimelineEntry:
    kind = _WAITS[memo.kind]
    state = "done" if memo.ended_as is GateOutcome.SATISFIED else memo.ended_as.value
    detail = "" if memo.payload is None else _cut(memo.payload.decode("utf-8", "replace"))
    return TimelineEntry(memo.number, memo.opened_at, kind, memo.gate, state, detail)


def _gate_entry(name: str, gate: Gate) -> TimelineEntry:
    match gate.kind:
        case GateKind.CHILDREN:
            waits_for = f"{gate.need} of {pluralize(len(gate.children), 'child', 'children')}: "
            waits_for += ", ".join(gate.children)
        case GateKind.MAILBOX:
            waits_for = f"a message {' or '.join(map(repr, gate.receives))}"
        case GateKind.SIGNALS:
            waits_for = pluralize(len(gate.waitpoints), "person", "people")
        case _:
            waits_for = "time to pass"
    until = "" if gate.expires_at is None else f", until {format_instant(gate.expires_at)}"
    return TimelineEntry(gate.number, gate.opened_at, _WAITS[gate.kind], name, "open", _cut(f"{waits_for}{until}"))


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_DETAIL_CHARS else f"{line[: MAX_DETAIL_CHARS - 1]}…"
