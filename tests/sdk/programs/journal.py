"""The journal: what programs did and saw, kept outside the engine, so that no fault of the engine can hide anything."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from tests.sdk.programs.program import Step, make_failure


class What(StrEnum):
    BEGIN = "begin"  # a process calls the function
    ENTER = "enter"  # the function comes to an operation
    CALL = "call"  # the effect of a step begins
    DONE = "done"  # an operation returned
    FAILED = "failed"  # an operation raised a failure
    RACE_FAILED = "race failed"  # a race raised the failure of its winner
    LEFT = "left"  # the function gave a wait up
    CANCELLED = "cancelled"  # an operation was cancelled, and not by parking
    BRANCH_CANCELLED = "branch cancelled"  # not by parking
    BRANCH_END = "branch end"
    TORN = "torn"  # a pause of the function's own was cut off by parking
    PARKED = "parked"
    RETURNED = "returned"
    RAISED = "raised"


class Event(msgspec.Struct, frozen=True):
    """One thing that happened. `invocation` numbers the calls of functions by workers."""

    at_s: float
    invocation: int
    what: What
    path: str
    branch: str
    value: Any = None


class Wish(msgspec.Struct, frozen=True):
    """What the outside world shall do once: send a message to a mailbox, or vote with a link."""

    value: Any
    after_s: float
    mailbox: str | None = None
    link: str | None = None


class MortalProcess(Protocol):
    """A process that can die; what happens in it afterwards has not happened."""

    is_dead: bool


class Journal:
    """Everything that happened in one run of a program, in order."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._processes: list[MortalProcess] = []  # by invocation
        self._wished: set[str] = set()
        self.events: list[Event] = []
        self.calls: Counter[str] = Counter()
        self.wishes: asyncio.Queue[Wish] = asyncio.Queue()
        self.entered_s: dict[str, float] = {}  # by path: when any process came to an operation, be it a dying one
        self.alarms: list[str] = []  # mismatches that the engine reported

    def begin(self, process: MortalProcess) -> int:
        """Note that a process calls a function; return the number of the invocation."""
        self._processes.append(process)
        invocation = len(self._processes) - 1
        self.note(invocation, What.BEGIN)
        return invocation

    def note(self, invocation: int, what: What, path: str = "", branch: str = "", value: Any = None) -> None:
        """Add an event, unless its process is dead."""
        if what is What.ENTER:
            self.entered_s.setdefault(path, self._now_s())
        if not self._processes[invocation].is_dead:
            self.events.append(Event(self._now_s(), invocation, what, path, branch, value))

    def wish(self, invocation: int, path: str, wish: Wish) -> None:
        """Let the outside world do something, the first time this path is reached."""
        if path not in self._wished and not self._processes[invocation].is_dead:
            self._wished.add(path)
            self.wishes.put_nowait(wish)

    async def perform(self, invocation: int, step: Step, path: str, branch: str, *, ms: int) -> list[Any]:
        """Perform the effect of a step: return its path and the number of the call, or fail as scripted."""
        if self._processes[invocation].is_dead:
            raise asyncio.CancelledError("the process is dead")
        self.calls[path] += 1
        call = self.calls[path]
        self.note(invocation, What.CALL, path, branch, call)
        if ms:
            await asyncio.sleep(ms / 1000)
        if call <= step.failures:
            raise make_failure(step.kind, path, call)
        return [path, call]
