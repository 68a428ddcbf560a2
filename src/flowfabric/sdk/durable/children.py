"""Children of a durable function: spawned once, found again by their input, with results that travel.

A spawn is recorded in the change that creates the child. A replay finds it by its place, or if the function has
changed, by its input; a child that was purged is not created a second time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from flowfabric.batcher import Batcher
from flowfabric.engine.types import CreateExecution, MemoArgs
from flowfabric.model.gate import StepMemo
from flowfabric.sdk.durable.ledger import INSIDE, Place

if TYPE_CHECKING:
    from flowfabric.sdk.durable.attempt import DurableAttempt
    from flowfabric.sdk.durable.branches import Branch

MAX_BATCH = 1000


class ChildRequest(msgspec.Struct, frozen=True):
    """A child to create, and the memo that records it."""

    ask: CreateExecution
    memo: MemoArgs


class Spawner:
    """Creates the children of one attempt; branches that spawn at the same time share a round trip."""

    def __init__(self, durable: DurableAttempt) -> None:
        self._durable = durable
        self._batcher: Batcher[ChildRequest, str] = Batcher(self._create, max_items=MAX_BATCH)
        self._used: set[Place] = set()  # places that children of this attempt have taken

    async def spawn(
        self, branch: Branch, asks: Sequence[tuple[Place, CreateExecution]], child_id: Callable[[Place], str]
    ) -> list[tuple[str, str]]:
        """Return for each request the id of its child, created now or before, and the id that belongs to its place.

        They differ if a call with a key found the run of another submit.
        """
        found: list[tuple[str, str]] = []
        new: list[ChildRequest] = []
        for own_place, ask in asks:
            digest = input_digest(ask)
            place, memo = await self._find(branch, own_place, digest)
            own_id = child_id(place)
            if memo is not None:
                found.append((own_id, msgspec.json.decode(memo.result, type=str)))
                continue
            number = self._durable.ledger.next_number()
            record = MemoArgs(name=place[0], occurrence=place[1], encoding="json", digest=digest, number=number)
            new.append(ChildRequest(msgspec.structs.replace(ask, execution_id=own_id), record))
            found.append((own_id, ""))
        answers: Iterator[str] = iter(())
        if new:
            async with self._durable.parker.without_parking():
                created = [await child for child in [self._batcher.add(request) for request in new]]
            answers = iter(created)
        return [(known or next(answers), own_id) for own_id, known in found]

    async def _find(self, branch: Branch, place: Place, digest: str) -> tuple[Place, StepMemo | None]:
        """Return the place of the child and its memo: at its own place, or wherever its input is recorded."""
        ledger, (name, occurrence) = self._durable.ledger, place
        free = {
            number: memo
            for (other, number), memo in sorted(ledger.ends.items())
            if other == name and (other, number) not in self._used
        }
        own = free.get(occurrence)
        if own is None or own.digest not in (None, digest):
            same = next((number for number, memo in free.items() if memo.digest == digest), None)
            if same is not None:
                ledger.replace_skipped(branch, (name, same))
                return self._take((name, same)), free[same]
        if own is not None:
            if own.digest not in (None, digest):
                ledger.reach(place)
                # A step that runs again from its beginning may find other inputs; its children are kept.
                if name.startswith(INSIDE) or not await self._durable.holds.on_other_child(place):
                    return self._take(place), own  # as recorded
                return self._take(self._free_place(place)), None
            ledger.replace_skipped(branch, place)
            return self._take(place), own
        place = self._free_place(place)
        await ledger.check_new(branch, place)
        return self._take(place), None

    def _take(self, place: Place) -> Place:
        self._used.add(place)
        self._durable.ledger.reach(place)
        return place

    def _free_place(self, place: Place) -> Place:
        name, occurrence = place
        while (name, occurrence) in self._durable.ledger.ends or (name, occurrence) in self._used:
            occurrence += 1
        return name, occurrence

    async def _create(self, requests: list[ChildRequest]) -> Sequence[str | Exception]:
        durable = self._durable
        try:
            answers = await durable.engine.spawn(
                durable.handle, [one.ask for one in requests], [one.memo for one in requests]
            )
        except Exception:
            if len(requests) == 1:
                raise
            # One of them is at fault. Those that were created are found by their memos.
            return [await self._create_alone(one) for one in requests]
        return [answer.execution_id for answer in answers]

    async def _create_alone(self, request: ChildRequest) -> str | Exception:
        try:
            [child_id] = await self._create([request])
            return child_id
        except Exception as error:
            return error


def input_digest(ask: CreateExecution) -> str:
    """Return the digest of a child's input, by which a changed function finds it again."""
    return hashlib.sha256(ask.input_payload).hexdigest()[:32]
