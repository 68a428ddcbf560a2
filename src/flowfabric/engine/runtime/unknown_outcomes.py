"""Unknown outcomes: finds out whether a change whose reply was lost was written.

After a lost reply `Runtime.decide_and_commit` loads the rows again. A root that has the revision of the change proves
that it was written. If somebody else wrote the root since, the event or a row of the change proves it
(`rules.commit_evidence`). Without a proof it was not written, and is decided again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from flowfabric.engine.runtime.after_commit import Rows, execution_among, first_row
from flowfabric.model.change import Change, Delete, Patch, Upsert, expand
from flowfabric.model.event import TOPIC_FIELDS, Event, FeedEvent, Topic
from flowfabric.rules.commit_evidence import evidence_rows, find_event, is_evidence
from flowfabric.rules.decision import Decision
from flowfabric.stores.catalog import TABLE, key_of
from flowfabric.stores.queries import Loaded, Read

MAX_PROBED_ROWS = 100  # of one change: any of them proves that it was written
MAX_HISTORY_EVENTS = 1000


class UnknownOutcome(msgspec.Struct, frozen=True):
    """A change whose reply was lost, with its decision and the rows it was decided on."""

    change: Change
    decision: Decision[Any]
    rows: Rows


# A change that was written, and the instant of its commit if that is known.
Written = tuple[UnknownOutcome, int | None]


class UnknownOutcomes:
    """Looks for proof of changes whose replies were lost."""

    def __init__(
        self,
        load: Callable[[Sequence[Read]], Awaitable[Loaded]],
        history: Callable[[str, Topic, int], Awaitable[list[FeedEvent]]],
    ) -> None:
        self._load = load
        self._history = history

    async def find_written(self, unknown: dict[int, UnknownOutcome], rows: Rows) -> Written | None:
        """Return the first of these changes that was written; `rows` were loaded after the replies were lost."""
        return _find_by_revision(unknown, rows) or await self._find_evidence(unknown, rows)

    async def _find_evidence(self, unknown: dict[int, UnknownOutcome], rows: Rows) -> Written | None:
        """Return the change that was written and whose roots others have written since: its event or row is stored.

        A root that nobody has written since the decision proves that the change was not written.
        """
        for lost in unknown.values():
            change = lost.change if lost.change.template is None else expand(lost.change, first_row(lost.rows))
            if _is_unwritten(change, rows):
                continue
            if change.events and (event := await self._stored_event(change.events[0], lost.rows)) is not None:
                return lost, event.at
            intended = evidence_rows(change, (row for found in lost.rows for row in found))[-MAX_PROBED_ROWS:]
            if not intended:
                continue
            stored = (await self._load([Read(type(row), key_of(row)) for row in intended])).rows
            if any(found and is_evidence(found[0], row) for row, found in zip(intended, stored, strict=True)):
                return lost, None
        return await self._find_deleted(unknown)

    async def _find_deleted(self, unknown: dict[int, UnknownOutcome]) -> Written | None:
        """Return the change without events that deletes a root which no longer exists, by this change or another."""
        for lost in unknown.values():
            if lost.change.events:
                continue
            roots = {(guard.row, guard.key) for guard in lost.change.guards}
            deletes = [
                write for write in lost.change.writes if isinstance(write, Delete) and (write.row, write.key) in roots
            ]
            if deletes and not any((await self._load([Read(write.row, write.key) for write in deletes])).rows):
                return lost, None
        return None

    async def _stored_event(self, event: Event, decided_on: Rows) -> FeedEvent | None:
        """Return an event as its execution's history has it, if it was stored since the decision."""
        topic = next(topic for topic, field in TOPIC_FIELDS.items() if getattr(event, field) is not None)
        history = await self._history(event.execution_id, topic, MAX_HISTORY_EVENTS)
        return find_event(history, event, execution_among(event.execution_id, decided_on))


def _find_by_revision(unknown: dict[int, UnknownOutcome], rows: Rows) -> Written | None:
    """Return the change that wrote one of these roots last, and the commit's time if the row has it."""
    for found in rows:
        for row in found:
            if lost := unknown.get(getattr(row, "revision", 0)):
                return lost, getattr(row, "last_mutation_at", None)
    return None


def _is_unwritten(change: Change, rows: Rows) -> bool:
    """Return whether a root that the change writes still has the revision that it was decided on."""
    decided_on = {(guard.row, guard.key): guard.revision for guard in change.guards}
    written = {
        (write.row, write.key)
        for write in change.writes
        if isinstance(write, Delete) or (isinstance(write, Patch) and write.unless_set is None)
    }
    written |= {(type(write.row), key_of(write.row)) for write in change.writes if isinstance(write, Upsert)}
    return any(
        (root := (type(row), key_of(row))) in written and decided_on.get(root) == getattr(row, "revision", None)
        for found in rows
        for row in found
        if TABLE[type(row)].is_aggregate_root
    )
