"""The ledger of an attempt: what the run remembers, read once, and what this attempt has reached so far.

What a step returned or raised is answered from here without a round trip, and so is the outcome of a closed gate. What
failed or was left in this attempt is *pending*: it is recorded when the function moves past it, and not before.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from flowfabric.engine.types import is_accepted, sets_of
from flowfabric.model.gate import Gate, GateKind, GateMemo, StepMemo, StepState
from flowfabric.sdk.durable.branches import Branch, BranchTree, untracked
from flowfabric.sdk.exceptions import Fatal

if TYPE_CHECKING:
    from flowfabric.engine.operations.durable import Remembered
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.handles import Handle

logger = logging.getLogger("flowfabric.durable")

_KIND = "child|patch|race|reserved|spent"  # prefixes of records that are no steps
_BRANCH = re.compile(rf"(?:(?:{_KIND}):)?((?:(?:gather#\d+\.\d+|race#\d+\.[^/]*|task:[^/]*#\d+)/)*)")

Place = tuple[str, int]  # the qualified name of an operation, and how often that name occurred before
OnSkipped = Callable[[Place, list[str]], Awaitable[None]]
OnLeft = Callable[[Branch], Awaitable[None]]

INSIDE = "in:"  # prefix of what happens inside a step
ENDED = "ended:"  # prefix of how a child failed
# Records that a replay may reach at any time, or not at all.
WITHOUT_ORDER = ("key:", "patch:", "pin:", "held:", "hold:", "retry:", "reserved:", ENDED, INSIDE)


class NonDeterministic(Fatal):
    """A durable function no longer matches its recorded steps. Raised if its task has `on_mismatch="error"`."""


class Pending(msgspec.Struct, frozen=True, eq=False):
    """A step that failed, an operation that the function left, or an end, which is not recorded yet."""

    branch: Branch
    place: Place
    label: str
    failure: bytes | None = None  # the encoded exception
    digest: str | None = None
    started_at: int | None = None
    is_gate: bool = False
    result: bytes | None = None  # result of an operation that has ended; without a result and a failure it was left


class Ledger:
    """The records of one run, and which of them this attempt has reached."""

    def __init__(
        self,
        engine: EngineAPI,
        handle: Handle,
        branches: BranchTree,
        *,
        strict: bool,
        on_skipped: OnSkipped,
        on_left: OnLeft,
    ) -> None:
        """Prepare the ledger; nothing is read yet.

        `strict` raises `NonDeterministic` for a mismatch. `on_skipped` is called before a new operation that comes
        before remembered ones, `on_left` before one in a branch that the function left.
        """
        self.pending: list[Pending] = []
        self.ends: dict[Place, StepMemo] = {}  # the results and failures of steps
        self.gates: dict[str, GateMemo] = {}
        self.open: dict[str, Gate] = {}
        self.progress_counts: dict[str, int] = {}  # by branch, how often earlier attempts reported progress
        self.fact_sets: dict[str, int] = {}  # by place, how often earlier attempts have set a fact
        self._tries: dict[Place, StepMemo] = {}
        self._began: dict[Place, StepMemo] = {}
        self._left: set[Place] = set()
        self._engine = engine
        self._handle = handle
        self._branches = branches
        self._strict = strict
        self.is_loaded = False
        self._load_lock = asyncio.Lock()
        self._names: dict[str, int] = {}
        self._number = 0
        self._gates_below: dict[str, list[str]] = {}  # by branch: waits in it and below that it may have left
        self._reached: set[Place] = set()
        self._reached_gates: set[str] = set()
        self._accepted: set[Place] = set()
        self._on_skipped = on_skipped
        self._on_left = on_left
        self.has_warned = False
        self.has_warned_of_length = False

    # -- names ----------------------------------------------------------------------------------------------------

    def next_occurrence(self, branch: Branch, label: str) -> Place:
        """Return the qualified name for a label in a branch, and how often that name occurred before."""
        name = f"{branch.name}{label}"
        occurrence = self._names.get(name, 0)
        self._names[name] = occurrence + 1
        return name, occurrence

    def next_number(self) -> int:
        """Return the place of a new record in the order of the run's operations; the holder is the only writer."""
        self._number += 1
        return self._number

    # -- what is remembered -----------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read what the run remembers, once per attempt."""
        async with self._load_lock:
            if not self.is_loaded:
                with untracked():
                    self._fill(await self._engine.remembered(self._handle))
                self.is_loaded = True

    def _fill(self, remembered: Remembered) -> None:
        self.gates, self.open = dict(remembered.memos), dict(remembered.open)
        self.progress_counts = remembered.progress_counts
        for memo in remembered.steps:
            place = (memo.step, memo.occurrence)
            match memo.state:
                case StepState.DONE | StepState.FAILED:
                    known = self.ends.get(place)  # a worker of an older release may add a result to a failure
                    self.ends[place] = memo if known is None else min(known, memo, key=lambda one: one.recorded_at)
                case StepState.TRIES:
                    self._tries[place] = memo
                case StepState.BEGAN:
                    self._began[place] = memo
                case StepState.LEFT:
                    self._left.add(place)
                case StepState.FACT:
                    self.fact_sets[memo.step] = sets_of(memo)
        for name, closed in self.gates.items():
            if name.startswith("hold:") and is_accepted(closed):
                step, _, occurrence = name.removeprefix("hold:").rpartition(".")[0].rpartition("#")
                self.accept((step, int(occurrence)))
        numbers = [
            *((memo.recorded_at, memo.number) for memo in remembered.steps),
            *((memo.opened_at, memo.number) for memo in self.gates.values()),
            *((gate.opened_at, gate.number) for gate in self.open.values()),
        ]
        self._branches.by_arrival = False
        if numbers:
            self._number = max((number for _, number in numbers if number is not None), default=0)
            self._index_gates(max(recorded_at for recorded_at, _ in numbers))
            # A run whose first record has no number began before tasks had names; arrival identifies its tasks.
            self._branches.by_arrival = min(numbers, key=lambda one: one[0])[1] is None

    def _index_gates(self, last_recorded_at: int) -> None:
        """Find the waits of branches that a branch leaves if it ends before it comes to them.

        These are the open ones, and those whose message arrived last: nothing was recorded after it.
        """
        waits = [name for name, gate in self.open.items() if gate.kind is not GateKind.SIGNALS]
        waits += [name for name, memo in self.gates.items() if memo.mailbox and memo.closed_at >= last_recorded_at]
        for name in waits:
            for branch in _with_makers(branch_of(name)):
                self._gates_below.setdefault(branch, []).append(name)

    def abandon_gates(self, branch: Branch) -> list[str]:
        """Return the remembered waits to which an attempt cannot come any more because this branch ends."""
        names = [name for name in self._gates_below.pop(branch.name, ()) if name not in self._reached_gates]
        if names:
            living = {other.name for other in branch.tree.living}
            names = [name for name in names if branch_of(name) not in living]
            self._reached_gates.update(names)
        return names

    def find_left(self, place: Place) -> bool:
        """True if an earlier attempt recorded that the function left this operation."""
        if place not in self._left:
            return False
        self._reached.add(place)
        return True

    def find_left_gate(self, branch: Branch, name: str) -> bool:
        """True if an earlier attempt left this wait, or the branch in which it is new."""
        is_new = name not in self.gates and name not in self.open
        return self.find_left((name, 0)) or (is_new and self.has_left(branch))

    def has_left(self, branch: Branch) -> bool:
        """True if an earlier attempt cancelled this branch, or one that it is in, and moved past that."""
        at: Branch | None = branch if self._left else None
        while at is not None and (at.name, 0) not in self._left:
            at = at.maker
        return at is not None

    def find_tries(self, place: Place) -> StepMemo | None:
        """Return the count of the failed tries of a step."""
        return self._tries.get(place)

    def find_start(self, place: Place) -> StepMemo | None:
        """Return the recorded start of a step that must not run twice."""
        return self._began.get(place)

    def find_open_gate(self, name: str) -> Gate | None:
        """Return an open gate without links that an earlier attempt opened."""
        gate = self.open.get(name)
        return None if gate is None or gate.kind is GateKind.SIGNALS else gate

    async def find_step(self, branch: Branch, place: Place, digest: str | None) -> StepMemo | None:
        """Return the recorded result or failure of a step, or None if it has not ended.

        If the record has another input, a later record of this name with the same input takes its place. Without one
        the mismatch is reported, and the record is used all the same.
        """
        if not self.is_loaded:
            await self.load()
        memo = self.ends.get(place)
        self._reached.add(place)
        if memo is None:
            if self._left or self._has_records:
                await self.check_new(branch, place)
            return None
        name, occurrence = place
        self.replace_skipped(branch, place)
        if digest is None or memo.digest in (None, digest):
            return memo
        for (other_name, number), other in self.ends.items():
            if other_name == name and other.digest == digest and number > occurrence:
                self.ends[place], self.ends[(other_name, number)] = other, memo
                return other
        self.report_mismatch(
            f"step {name!r} (number {occurrence}) is recorded with another input; the recorded result is used. Give "
            "steps that may swap places a key="
        )
        return memo

    def reach(self, place: Place) -> None:
        """Record that this attempt has reached an operation."""
        self._reached.add(place)

    def reach_gate(self, name: str) -> None:
        """Record that this attempt has reached a wait."""
        self._reached_gates.add(name)

    async def check_new(self, branch: Branch, place: Place) -> None:
        """Report a mismatch if a new step or child comes before operations of its branch that are remembered.

        It would repeat or skip an effect: the function has changed. In a branch that the function left, it does not
        come to an end: the branch is cancelled again.
        """
        if place[0].startswith(INSIDE):  # it belongs to its step, which was checked
            return
        if self.has_left(branch):
            await self._on_left(branch)
        if place[0].startswith("key:") or not self.skipped(branch):
            return
        await asyncio.sleep(0)  # steps that start concurrently are all reached within one iteration of the loop
        if skipped := self.skipped(branch):
            await self._on_skipped(place, skipped)
            self.replace_skipped(branch, place)

    def accept(self, place: Place) -> None:
        """Note that a person accepted the new way at a place."""
        self._accepted.add(place)

    def replace_skipped(self, branch: Branch, place: Place) -> None:
        """Take an operation at an accepted place for the first remembered one that the function skipped.

        So the renamed operation holds nothing behind this place, now and in every replay.
        """
        if place not in self._accepted:
            return
        skipped = [one for one in self.ends.keys() - self._reached if self._is_ordered_in(branch, one[0])]
        if skipped:
            self._reached.add(min(skipped, key=lambda one: self.ends[one].number or 0))

    def _is_ordered_in(self, branch: Branch, step: str) -> bool:
        return not step.startswith(WITHOUT_ORDER) and branch_of(step.removeprefix("race:")) == branch.name

    def skipped(self, branch: Branch) -> list[str]:
        """Return the names of remembered operations of a branch to which this attempt has not come."""
        if not self._has_records:
            return []
        own = {repr(name) for name, _ in self.ends.keys() - self._reached if self._is_ordered_in(branch, name)}
        gates = (name for name in (*self.gates, *self.open) if name not in self._reached_gates)
        own |= {
            repr(name.rpartition("#")[0])
            for name in gates
            if not name.startswith(WITHOUT_ORDER)
            and branch_of(name) == branch.name
            and not name.removeprefix(branch.name).startswith("budget#")
        }
        return sorted(own)

    @property
    def _has_records(self) -> bool:
        return bool(self.ends or self.gates or self.open)

    @property
    def reached_count(self) -> int:
        """The number of operations to which this attempt has come: the same in a replay that is at the same place."""
        return len(self._reached) + len(self._reached_gates)

    @property
    def is_empty(self) -> bool:
        """True if the run remembers nothing."""
        known = (self.ends, self.gates, self.open, self.fact_sets, self._tries, self._began, self._left)
        return not any(known)

    @property
    def has_numbers(self) -> bool:
        """True if this release recorded everything that the run remembers, so that its order is known."""
        numbers = [memo.number for memo in self.ends.values()]
        numbers += [memo.number for memo in self.gates.values()]
        numbers += [gate.number for gate in self.open.values()]
        return None not in numbers

    def report_mismatch(self, message: str) -> None:
        """Report that the function no longer matches its records: by a warning, or if strict, by an error."""
        message = f"{self._handle.fields.execution_id}: {message}"
        if self._strict:
            raise NonDeterministic(message)
        self.has_warned = True
        logger.warning(message)


def _with_makers(branch: str) -> list[str]:
    """Return the prefix of a branch, and those of the branches that it is in, without the root."""
    return [branch[: end + 1] for end, character in enumerate(branch) if character == "/"]


def branch_of(name: str) -> str:
    """Return the branch prefix of the name of an operation."""
    match = _BRANCH.match(name)
    return match[1] if match else ""
