"""The model: what must happen by the contract of durable functions, checked against the journal of a run.

An outcome of an operation *stands* once the contract forbids another one: a success when the function has seen it, a
failure or a cancellation when the function has moved past it. It has moved past it when the branch came to another
operation, when a branch that surrounds it did so after this one had ended, or when the run parked. An outcome that
stands is the only one from then on: no effect is repeated, and every later invocation sees the same class, text and
fields.

The result is computed by evaluating the program with the outcomes that stand. Without faults the number of attempts
is known, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from tests.sdk.programs.evaluation import Evaluation, ModelFailure, NeverCalled, winner_of
from tests.sdk.programs.journal import Event, Journal, What
from tests.sdk.programs.program import (
    Ask,
    Catch,
    Child,
    Children,
    Group,
    Loop,
    Node,
    Options,
    Program,
    Race,
    RaceOf,
    Receive,
    Reserve,
    Saga,
    Sequence,
    Sleep,
    Spend,
    Step,
    WaitFor,
    describe_failure,
    make_failure,
)

SLACK_S = 60.0  # by which a sleep may be late: retries and replays take time
FAULT_S = 180.0  # and for each fault: a lease expires, another process polls


class Violation(msgspec.Struct, frozen=True):
    """Something that the contract forbids, and the section of the contract."""

    section: int
    text: str

    def __str__(self) -> str:
        return f"section {self.section}: {self.text}"


class End(msgspec.Struct, frozen=True):
    """How a run ended: with a value, or with the reason of its failure; neither if it did not end."""

    value: Any = None
    reason: str | None = None
    is_stuck: bool = False
    spent: int = 0


class Outcome(msgspec.Struct, frozen=True):
    what: What
    value: Any


class Standing(msgspec.Struct, frozen=True):
    """An outcome, and the position in the journal from which on it stands."""

    since: int
    outcome: Outcome


def find_violations(program: Program, journal: Journal, end: End, *, faults: int) -> list[Violation]:
    """Return everything in which a run differs from the contract."""
    history = History(program, journal)
    found = [
        *history.swapped_results(),
        *history.repeated_effects(),
        *history.changed_outcomes(),
        *history.late_effects(),
        *history.wrong_sleeps(SLACK_S + FAULT_S * faults),
        *(Violation(0, f"the run parked under {event.path}") for event in journal.events if event.what is What.TORN),
        *(Violation(2, f"false alarm: {alarm}") for alarm in journal.alarms),
    ]
    if end.is_stuck:
        has_left = any(event.what in (What.LEFT, What.CANCELLED) for event in journal.events)
        return [*found, Violation(3 if has_left else 0, "the run does not end")]
    found += history.wrong_end(end)
    found += history.wrong_spending(end.spent)
    if not faults:
        found += history.wrong_attempts(end)
    return found


# -- the outcomes that stand -------------------------------------------------------------------------------------------


class History:
    """The journal of a run, ordered by what is asked of it."""

    def __init__(self, program: Program, journal: Journal) -> None:
        self._program = program
        self._events = journal.events
        self._calls = journal.calls
        self._entered_s = journal.entered_s
        self._failed = {event.path for event in journal.events if event.what is What.FAILED}
        self._nodes = dict(_places(program.body, "r"))
        self._begins: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        by_invocation: dict[int, list[tuple[int, Event]]] = defaultdict(list)
        for position, event in enumerate(self._events):
            by_invocation[event.invocation].append((position, event))
            if event.what is What.BEGIN:
                self._begins[event.invocation] = position
            if event.what in (What.RETURNED, What.RAISED):
                self._ends[event.invocation] = position
        self._by_invocation = by_invocation
        # A process that lost its lease may call a step once more, after the run has ended in a later invocation.
        self._last_calls = {event.path: event.value for event in self._calls_of(max(self._ends, default=-1))}
        self.stands: dict[str, list[Standing]] = defaultdict(list)
        self._cancelled: dict[str, int] = {}  # branches, and the position from which on that stands
        for position, event in enumerate(self._events):
            if (since := self._stands_since(position, event)) is None:
                continue
            if event.what is What.BRANCH_CANCELLED:
                self._cancelled.setdefault(event.path, since)
            else:
                self.stands[event.path].append(Standing(since, Outcome(event.what, event.value)))

    def _calls_of(self, invocation: int) -> list[Event]:
        return [event for _, event in self._by_invocation.get(invocation, ()) if event.what is What.CALL]

    def _stands_since(self, position: int, event: Event) -> int | None:
        if event.what is What.DONE:
            return position
        if event.what not in (What.FAILED, What.RACE_FAILED, What.LEFT, What.CANCELLED, What.BRANCH_CANCELLED):
            return None
        has_branch_ended = False
        for later, other in self._by_invocation[event.invocation]:
            if later <= position:
                continue
            if other.what is What.PARKED:
                return later
            if later > self._ends.get(event.invocation, later):
                return None
            if other.what is What.BRANCH_END and other.branch == event.branch:
                has_branch_ended = True
            if other.what not in (What.CALL, What.DONE, What.FAILED) or other.path == event.path:
                continue
            if other.branch == event.branch or (has_branch_ended and _surrounds(other.branch, event.branch)):
                return later
        return None

    def _stood_before(self, event: Event) -> Outcome | None:
        """Return the outcome of an event's operation that stood when its invocation began."""
        begin = self._begins[event.invocation]
        return next((one.outcome for one in self.stands[event.path] if one.since < begin), None)

    def repeated_effects(self) -> Iterator[Violation]:
        """Effects after their outcome stood, and effects twice in one invocation."""
        seen: set[tuple[int, str]] = set()
        for event in self._events:
            if event.what is not What.CALL:
                continue
            if (stood := self._stood_before(event)) is not None:
                section = {What.DONE: 0, What.FAILED: 1}.get(stood.what, 3)
                yield Violation(section, f"{event.path} runs again although it was {stood.what}: {stood.value}")
            elif (event.invocation, event.path) in seen and not isinstance(self._nodes.get(event.path), Options):
                yield Violation(0, f"{event.path} runs twice in one invocation")
            seen.add((event.invocation, event.path))

    def changed_outcomes(self) -> Iterator[Violation]:
        """Outcomes that differ from the one that stood."""
        for event in self._events:
            if event.what not in (What.DONE, What.FAILED, What.RACE_FAILED, What.LEFT):
                continue
            stood = self._stood_before(event)
            if stood is None or stood.what is What.CANCELLED:  # its record may have been in flight
                continue
            if stood != Outcome(event.what, event.value):
                section = {What.DONE: 0, What.FAILED: 1}.get(stood.what, 3)
                text = f"{event.path} was {stood.what}: {stood.value}, and is now {event.what}: {event.value}"
                yield Violation(section, text)
        for path, standings in self.stands.items():
            outcomes = [one.outcome for one in standings if one.outcome.what is not What.CANCELLED]
            if any(outcome != outcomes[0] for outcome in outcomes):
                yield Violation(1, f"{path} has two outcomes: {outcomes}")

    def late_effects(self) -> Iterator[Violation]:
        """Effects of steps to which a branch had not come when the function cancelled it."""
        first: dict[str, int] = {}
        for position, event in enumerate(self._events):
            if event.what is not What.CALL or event.path.endswith("!"):  # a child runs on
                continue
            first.setdefault(event.path, position)
            for branch, since in self._cancelled.items():
                is_later = since < first[event.path] and since < self._begins[event.invocation]
                if is_later and (event.path == branch or _surrounds(branch, event.path)):
                    yield Violation(3, f"{event.path} runs although the function had cancelled {branch}")

    def swapped_results(self) -> Iterator[Violation]:
        """Results and failures of another place in the program."""
        for event in self._events:
            if event.what is What.DONE and not self._is_own_value(event.path, event.value):
                yield Violation(0, f"{event.path} got the result of another: {event.value}")
            if event.what is What.FAILED and event.path not in event.value["text"].split():
                yield Violation(0, f"{event.path} got the failure of another: {event.value}")

    def _is_own_value(self, path: str, value: Any) -> bool:
        match self._nodes.get(path):
            case Child():
                return bool(value == path)
            case Children(count=count):
                return bool(value == [f"{path}.{number}" for number in range(count)])
            case Receive(after=after):
                return bool(value == (None if after is None else f"mail {path}"))
            case Ask():
                return bool(value == [True])
            case Sleep() | Spend() | Reserve():
                return value is None
            case Race(after=after):
                return bool(value == winner_of(path, after))
            case RaceOf(members=members):
                return value[0] in [f"m{number}" for number in range(len(members))]
            case _:  # a step
                return bool(value[0] == path and 1 <= value[1] <= self._calls[path])

    def wrong_sleeps(self, slack_s: float) -> Iterator[Violation]:
        """Sleeps that end too early or too late, from the first time the function came to them.

        A process that dies as it comes to a sleep may have begun it: what it sent last is written without it.
        """
        entered: dict[str, float] = {}
        done: set[str] = set()
        for event in self._events:
            node = self._nodes.get(event.path)
            if not isinstance(node, Sleep):
                continue
            if event.what is What.ENTER:
                entered.setdefault(event.path, event.at_s)
            elif event.what is What.DONE and event.path not in done:
                done.add(event.path)
                slept_s, length_s = event.at_s - entered[event.path], node.minutes * 60.0
                most_s = event.at_s - self._entered_s[event.path]
                if most_s < length_s - 0.01 or slept_s > length_s + slack_s:
                    yield Violation(0, f"{event.path} slept for {slept_s:.0f} s instead of {length_s:.0f} s")

    def wrong_spending(self, spent: int) -> Iterator[Violation]:
        """Amounts that were counted more or less than once."""
        least: dict[str, int] = {}
        most: dict[str, int] = {}
        for event in self._events:
            if isinstance(node := self._nodes.get(event.path), Spend | Reserve):
                most[event.path] = node.amount
                if event.what is What.DONE:
                    least[event.path] = node.amount
        if not sum(least.values()) <= spent <= sum(most.values()):
            yield Violation(7, f"{spent} spent, not {sum(least.values())} to {sum(most.values())}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def wrong_end(self, end: End) -> Iterator[Violation]:
        """A result or failure other than that of the program, or effects that do not belong to it."""
        evaluation = Evaluation(self)
        try:
            expected = evaluation.run(self._program.body, "r", "r")
        except ModelFailure as failure:
            if end.reason is None or failure.described["text"] not in end.reason:
                yield Violation(1, f"the run ended with {end.reason or end.value}, not with {failure.described}")
        except NeverCalled as missing:
            yield Violation(0, f"the run ended with {end.reason or end.value}, and {missing} never ran")
            return
        else:
            if end.reason is not None or end.value != expected:
                yield Violation(0, f"the result is {end.reason or end.value}, not {expected}")
        known = {path for _, path in evaluation.reached}
        for path in self._calls:
            if path.removesuffix("!") not in known:
                yield Violation(1, f"{path} ran, and it should not have")
        yield from self._wrong_order(evaluation.reached)

    def _wrong_order(self, reached: list[tuple[str, str]]) -> Iterator[Violation]:
        first: dict[str, int] = {}
        for position, event in enumerate(self._events):
            if event.what is What.CALL:
                first.setdefault(event.path, position)
        latest: dict[str, tuple[int, str]] = {}
        for branch, path in reached:
            if path in first:
                position, before = latest.get(branch, (-1, ""))
                if first[path] < position:
                    yield Violation(0, f"{path} ran before {before}")
                latest[branch] = (max(position, first[path]), path)

    def outcome(self, step: Step, path: str) -> Outcome | None:
        """Return the outcome of a step: the one that stands, or else that of its last call; None if it never ran.

        The last call is that of the invocation that ended the run, if it made one.
        """
        for standing in self.stands[path]:
            if standing.outcome.what in (What.DONE, What.FAILED):
                return standing.outcome
        if not (call := self._last_calls.get(path) or self._calls[path]):
            return None
        if isinstance(self._nodes.get(path), Options) and call <= step.failures and path not in self._failed:
            return None  # it was cancelled between two of its tries
        if call <= step.failures:
            return Outcome(What.FAILED, describe_failure(make_failure(step.kind, path, call)))
        return Outcome(What.DONE, [path, call])

    def winner(self, path: str) -> str | None:
        """Return the name of the member that won a race; None if it failed."""
        return next((one.outcome.value[0] for one in self.stands[path] if one.outcome.what is What.DONE), None)

    def wrong_attempts(self, end: End) -> Iterator[Violation]:
        """Attempts after a failure that is permanent, and retries that are missing."""
        raised = [
            (position, event)
            for position, event in enumerate(self._events)
            if event.what is What.RAISED and event.value["class"] != "Busy"
        ]
        if any(event.value["class"] == "RunFailed" for _, event in raised):  # a retry finds the same child
            return
        for number, (position, event) in enumerate(raised):
            is_permanent = event.value["class"] == "Fatal" or self._had_moved_past(position, event)
            is_permanent = is_permanent or self._owns_retries(event)
            is_last = number == len(raised) - 1
            if is_permanent and not is_last:
                yield Violation(1, f"retried although its failure is permanent: {event.value}")
            ended_the_run = is_last and not any(later.what is What.RAISED for later in self._events[position + 1 :])
            has_retries_left = ended_the_run and end.reason is not None and len(raised) <= self._program.retries
            if has_retries_left and not is_permanent and not self._has_operation_after_failure(position, event):
                yield Violation(1, f"failed after {len(raised)} attempts of {self._program.retries + 1}")

    def _had_moved_past(self, position: int, raised: Event) -> bool:
        """True if the function raised a failure that it had moved past."""
        outcome = Outcome(What.FAILED, raised.value)
        return any(one.since < position and one.outcome == outcome for all_ in self.stands.values() for one in all_)

    def _owns_retries(self, raised: Event) -> bool:
        """True if a step with retries of its own failed: the task's retries are not asked then."""
        return any(isinstance(self._nodes.get(word), Options) for word in raised.value["text"].split())

    def _has_operation_after_failure(self, position: int, raised: Event) -> bool:
        """True if any branch came to an operation between a failure and the end, and time passed between these two.

        The function waited where it caught the failure, so that this may count as passed.
        """
        failed: Event | None = None
        for other_position, event in self._by_invocation[raised.invocation]:
            if failed is None and event.what is What.FAILED and event.value == raised.value:
                failed = event
            elif failed is not None and other_position < position and event.what in (What.ENTER, What.CALL, What.DONE):
                return raised.at_s > failed.at_s
        return False


def _surrounds(outer: str, inner: str) -> bool:
    return inner.startswith(f"{outer}.")


def _places(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """Yield every node of a program with its path."""
    yield path, node
    match node:
        case Sequence(items=parts) | Group(members=parts) | Saga(steps=parts) | RaceOf(members=parts):
            children = list(enumerate(parts))
        case Loop(times=times, body=body):
            children = [(number, body) for number in range(times)]
        case Catch(body=body, handler=handler):
            children = [(0, body), (1, handler)]
        case Reserve(body=body):
            children = [(0, body)]
        case WaitFor(step=step):
            children = [(0, step)]
        case _:
            children = []
    for number, part in children:
        yield from _places(part, f"{path}.{number}")
