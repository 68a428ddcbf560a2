"""Holds: a function that no longer fits what its run remembers waits for a fix, before it repeats an effect.

A held run is parked on a gate, with its slot free and no attempt spent. It records every version that held it, and is
released once for each new version that a worker serves, or by a person, who may accept the new way at this place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from flowfabric.engine.types import HOLD_MAILBOX, GateArgs, is_accepted
from flowfabric.model.gate import GateKind
from flowfabric.sdk.durable.ledger import Place

if TYPE_CHECKING:
    from flowfabric.sdk.durable.attempt import DurableAttempt

logger = logging.getLogger("flowfabric.durable")

DEFAULT_ON_MISMATCH: Final = "hold"  # of a task that no longer fits the records of its runs
ON_MISMATCH = ("hold", "warn", "error")
MAX_NOTE_CHARS = 1000


ADVICE = "Give it its old name= or a key=, ask ctx.patched(…), or let runs of the old function finish first"


class CodeVersion(msgspec.Struct, frozen=True):
    """The code that runs: which task, in which version, and what it does when it does not fit.

    With `pin` a run ends with the version it began with.
    """

    task: str
    on_mismatch: str
    version: Callable[[], str]
    pin: bool = False


class Holds:
    """What one attempt does when the function does not fit what the run remembers."""

    def __init__(self, durable: DurableAttempt, code: CodeVersion) -> None:
        self._durable = durable
        self._code = code

    @property
    def is_strict(self) -> bool:
        """True if a mismatch fails the run for good."""
        return self._code.on_mismatch == "error"

    async def on_skipped(self, place: Place, skipped: Sequence[str]) -> None:
        """Hold the run before a new operation that comes before remembered ones; or warn, or raise."""
        name, occurrence = place
        facts = f"for the first time although {', '.join(skipped)} ran before: was it renamed or moved?"
        await self._on_mismatch(
            place,
            held=f"{_title(place)} would run {facts}",
            warned=f"step {name!r} (number {occurrence}) runs {facts} {ADVICE}",
        )

    async def on_other_child(self, place: Place) -> bool:
        """Handle a child with another input than the one recorded at its place; True if it may be created."""
        name, occurrence = place
        message = f"{name!r} (number {occurrence}) is recorded with another input: was a child added or moved?"
        await self._on_mismatch(place, held=message, warned=message)
        return self._holds()

    async def _on_mismatch(self, place: Place, *, held: str, warned: str) -> None:
        if self._holds():
            await self._hold(place, held)
        elif self.is_strict or not self._durable.ledger.has_warned:
            self._durable.report_mismatch(warned)

    def _holds(self) -> bool:
        # Records of an earlier release have no order that could be compared.
        return self._code.on_mismatch == "hold" and self._durable.ledger.has_numbers

    async def _hold(self, place: Place, message: str) -> None:
        durable, ledger = self._durable, self._durable.ledger
        name, occurrence = place
        prefix, version = f"hold:{name}#{occurrence}.", self._code.version()
        while True:
            closed = [memo for gate, memo in ledger.gates.items() if gate.startswith(prefix)]
            if any(is_accepted(memo) for memo in closed):
                ledger.accept(place)
                return
            held = (f"held:{version}", 0)
            if held not in ledger.ends:
                logger.warning("%s is held: %s", durable.handle.fields.execution_id, message)
                async with durable.parker.without_parking():
                    await durable.reach(f"hold:{name}", "before_effect")
                    ledger.ends[held] = await durable.record_step(held, msgspec.json.encode(message))
                    await durable.reach(f"hold:{name}", "after_commit")
            gate = f"{prefix}{len(closed)}"
            ledger.gates[gate] = await durable.open_and_wait(
                GateArgs(
                    name=gate,
                    kind=GateKind.MAILBOX,
                    mailbox=HOLD_MAILBOX,
                    task=self._code.task,
                    version=version,
                    note=message[:MAX_NOTE_CHARS],
                )
            )


def _title(place: Place) -> str:
    """Return an operation as people call it: `step 'charge'`, `child 'report' (number 2)`."""
    name, occurrence = place
    before, child, task = name.partition("child:")
    title = f"child {before + task!r}" if child else f"step {name!r}"
    return title if not occurrence else f"{title} (number {occurrence})"


class Pin:
    """Pins the run of a pinned task before its first durable operation."""

    def __init__(self, durable: DurableAttempt, code: CodeVersion) -> None:
        self._durable = durable
        self._code = code
        self.is_done = not code.pin
        self._lock = asyncio.Lock()

    async def ensure(self) -> None:
        """Require the version of this code, unless the run remembers anything: then it began before, or was moved."""
        async with self._lock:  # branches may begin together; the second one finds the memo of the first
            if self._durable.ledger.is_empty:
                durable = self._durable
                async with durable.parker.without_parking():
                    memo = await durable.engine.pin_version(
                        durable.handle, self._code.version(), number=durable.ledger.next_number()
                    )
                durable.ledger.ends[memo.name, 0] = memo
            self.is_done = True


async def ask_patched(durable: DurableAttempt, patch: str) -> bool:
    """Return whether this run takes the new way of a patch; the first answer is remembered for the whole run."""
    branch = await durable.begin_operation()
    place = (f"patch:{patch}", 0)
    memo = durable.ledger.ends.get(place)
    if memo is None:
        is_new = not durable.ledger.skipped(branch)
        async with durable.parker.without_parking():
            memo = await durable.engine.record_patch(
                durable.handle, patch, is_new=is_new, number=durable.ledger.next_number()
            )
        durable.ledger.ends[place] = memo
    return msgspec.json.decode(memo.result, type=bool)
