"""Evidence of a commit whose reply was lost: rows and events that only this change would have written.

A root whose revision is the change's id proves the commit, until the root is written again. Afterwards the
evidence below still does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from flowfabric.model.change import Change, Insert, Upsert
from flowfabric.model.event import Event, FeedEvent
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Edge
from flowfabric.model.instant import FromNow
from flowfabric.model.stream import Frame
from flowfabric.model.suspension import IdempotencyRecord, Signal, Waitpoint

MINTED_ROWS = (Waitpoint, IdempotencyRecord, Frame, Edge)  # one call mints the key of such a row if it inserts one
WAITPOINT_IDENTITY = ("execution_id", "attempt_index", "waitpoint_key", "suspension_id", "gate")


def evidence_rows(change: Change, decided_on: Iterable[msgspec.Struct]) -> list[msgspec.Struct]:
    """Return the rows that nobody else would write: those with minted keys, and waitpoints given to a suspension.

    A signal counts only if the change has no event, because the same signal may be sent twice.
    """
    minted = MINTED_ROWS if change.events else (*MINTED_ROWS, Signal)
    rows: list[msgspec.Struct] = [
        write.row for write in change.writes if isinstance(write, Insert) and isinstance(write.row, minted)
    ]
    known = [row for row in decided_on if isinstance(row, Waitpoint)]
    for write in change.writes:
        row = write.row
        if isinstance(write, Upsert) and isinstance(row, Waitpoint) and not any(_is_same(row, one) for one in known):
            rows.append(row)
    return rows


def _is_same(intended: Waitpoint, known: Waitpoint) -> bool:
    key = (known.waitpoint_id, known.partition)
    return key == (intended.waitpoint_id, intended.partition) and is_evidence(known, intended)


def is_evidence(found: msgspec.Struct, intended: msgspec.Struct) -> bool:
    """Return whether a stored row is the intended one; revisions and instants that the store fills in are ignored.

    Only the identity of a waitpoint is compared, because others count its signals, activate it and close it.
    """
    values = msgspec.structs.asdict(intended)
    if isinstance(intended, Waitpoint):
        values = {name: values[name] for name in WAITPOINT_IDENTITY if values[name] is not None}
    return all(
        type(value) is FromNow or name == "revision" or getattr(found, name) == value for name, value in values.items()
    )


def find_event(history: Sequence[FeedEvent], event: Event, decided_on: Execution | None) -> FeedEvent | None:
    """Return the latest equal event of a history that is not older than the row the change was decided on.

    An earlier life of the execution may have emitted an equal event.
    """
    since = 0 if decided_on is None else decided_on.last_mutation_at
    return next((one for one in reversed(history) if one.event == event and one.at >= since), None)
