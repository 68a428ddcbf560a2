"""The commit: one statement that locks, reads the clock, judges and writes a whole batch.

    guards     each guarded root is found by its key and locked, in key order: `for update` when its change writes
               it, `for share` when the change only relies on it
    clock      the time, read when all locks are held
    verdict    per change: yes or no, from the locked rows and the clock alone
    writes     one part a shape, each for the changes with a yes
    queues     the rows of ready queues that work is put into, where they are missing (lines.py)
    handed     rows that are claimed instead of being put into their line, if somebody wants them (hand.py)
    events     one batch of the feed, numbered when all locks are held

Why like this. The parts of one statement see the snapshot of its start, while an update that had to wait goes on with
the row as it is then. If each part judged for itself, a change of two rows could be torn: the first row written by the
snapshot, the second refused by the row as it became. A locked row is the row as it is, and stays so until the commit;
so only locked rows are judged, and everything that is written asks the one verdict.

A row that must be absent cannot be locked. It is looked for, and if two batches insert it at once, the second one
fails as a whole on the unique key (`Collision`); whoever sent it sends the halves again. A change that puts it inserts
it, therefore.

The join of guards and rows is lateral, so that the server can only walk the given keys one by one through the primary
key, in the given order. Verdicts travel as an array that each part picks from by the number of the change: no part
joins another one, so no plan depends on a guess of how many rows there are.

Statements are composed from the shapes in the batch, and kept: the same shapes give the same words, which the driver
has prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowfabric.stores.postgres.claim_result import PAYLOADS
from flowfabric.stores.postgres.claim_result import told as told_of
from flowfabric.stores.postgres.commit.claim import UNLESS_HANDED, Hand
from flowfabric.stores.postgres.commit.fragments import CLOCK, NUMBER, Deleted, Formed, Guards, Told, Writes
from flowfabric.stores.postgres.commit.plan import Batch
from flowfabric.stores.postgres.notifier import CHANNEL
from flowfabric.stores.postgres.pool import in_transaction
from flowfabric.stores.postgres.queue_ids import ENSURE
from flowfabric.stores.postgres.sql import Parameters

# Drawn only when all locks are held, since it asks for the verdict.
NUMBERED = f"number as materialized ({NUMBER} from verdict where true = any (yes))"
BATCH = (
    "batch as (insert into ff_batch (batch_id, at, events) select n.batch_id, v.now, {events} from number n, verdict v)"
)
HINT = f", case when {{hint}} is not null and true = any (yes) then pg_notify('{CHANNEL}', {{hint}}) end"
MOST_WORDINGS = 1000

_wordings: dict[tuple[Any, ...], str] = {}


async def commit(
    connection: Any, batch: Batch, clock: int | None, hint: str | None = None, *, ensures: bool = True
) -> list[Any]:
    """Judge and write the batch.

    `ensures` lets it write the rows of its queues where they are missing.

    The answer begins with the commit's time and the verdicts, in the order of the changes. Behind those, and a column
    of no meaning, it has the rows that were handed over, if the batch does that.

    A hint goes out to those who listen at the instant of the commit, if anything was written.
    """
    queues = (batch.queues if ensures else None) or ()
    if batch.in_steps:
        return await in_transaction(connection, lambda inside: _commit_in_steps(inside, batch, clock, hint, queues))
    hand = () if batch.handing is None else (batch.handing,)
    pieces = [*batch.guards, *hand, *batch.rounds[0]]
    arrays = [array for _, arrays in pieces for array in arrays]
    if batch.told is not None:
        arrays += batch.told[1]
    words = _words(
        tuple(guard for guard, _ in batch.guards),
        tuple(piece for piece, _ in batch.rounds[0]),
        batch.told and batch.told[0],
        batch.handing and batch.handing[0],
        alone=batch.alone,
        queued=bool(queues),
    )
    answer: list[Any] = await connection.fetch(words, clock, *arrays, *queues, hint)
    return answer


async def _commit_in_steps(
    connection: Any, batch: Batch, clock: int | None, hint: str | None, queues: tuple[Any, ...]
) -> list[Any]:
    arrays = [array for _, given in batch.guards for array in given]
    guards = tuple(guard for guard, _ in batch.guards)
    words = _words(guards, (), None, None, alone=batch.alone, queued=bool(queues))
    answer: list[Any] = await connection.fetch(words, clock, *arrays, *queues, hint)
    now, yes, _ = answer[0]
    told = batch.told
    for pieces in batch.rounds:
        arrays = [array for _, given in pieces for array in given]
        if told is not None:
            arrays += told[1]
        writes = tuple(piece for piece, _ in pieces)
        words = _words(None, writes, told and told[0], None, alone=batch.alone, queued=False)
        await connection.fetchrow(words, yes, now, *arrays)
        told = None
    return answer


def _words(
    guards: tuple[Guards, ...] | None,
    writes: tuple[Writes, ...],
    told: Told | None,
    hand: Hand | None,
    *,
    alone: bool,
    queued: bool,
) -> str:
    shape = (guards, writes, told, hand, alone, queued)
    words = _wordings.get(shape)
    if words is None:
        if len(_wordings) >= MOST_WORDINGS:
            _wordings.clear()
        words = _wordings[shape] = compose(guards, writes, told, hand, alone=alone, queued=queued)
    return words


def compose(
    guards: Sequence[Guards] | None,
    writes: Sequence[Writes],
    told: Told | None,
    hand: Hand | None = None,
    *,
    alone: bool,
    queued: bool = False,
) -> str:
    """The statement of these shapes, for one change `alone` or for any number of them.

    `queued` batches put work into ready queues, and add the rows of those that are missing. Without guards, the
    verdicts and the time are given as its first parameters.
    """
    parameters = Parameters()
    if guards is None:
        yes, now = parameters.one("boolean[]"), parameters.one("bigint")
        parts = [f"verdict as materialized (select {yes} as yes, {now} as now)"]
    else:
        parts = _verdict(guards, parameters, alone=alone)
    forms = [(f"write_{number}", piece) for number, piece in enumerate(writes) if isinstance(piece, Formed)]
    if told is not None or forms or hand is not None:
        parts.append(NUMBERED)
    if hand is not None:
        parts.append(hand.words(parameters))
    for number, piece in enumerate(writes):
        name = f"write_{number}"
        unless = UNLESS_HANDED if hand is not None and number == hand.held_back else ""
        parts.append(f"{name} as ({piece.words(parameters)}{unless})")
        if isinstance(piece, Deleted):
            parts += piece.then(name)
    events = [piece.told(name) for name, piece in forms]
    if told is not None:
        parts += told.words(parameters)
        events.insert(0, told.told())
    if hand is not None:
        events.append("(select events from acquired)")
    if events:
        parts.append(BATCH.format(events=" || ".join(events)))
    if queued:
        parts.append(parameters.named(ENSURE, ("numbers", "rows")))
    hinted = "" if guards is None else HINT.format(hint=parameters.one("text"))
    answer = f"select now, yes{hinted} from verdict"
    if hand is not None:
        rows = f"left join handed t on true {PAYLOADS}"
        answer = f"select v.*, {told_of(hand.becomes)} from ({answer}) v {rows}"
    return "with " + ",\n".join(parts) + f"\n{answer}"


def _verdict(guards: Sequence[Guards], parameters: Parameters, *, alone: bool) -> list[str]:
    clock = CLOCK.format(given=parameters.one("bigint"))
    parts, before = [], None
    for number, guard in enumerate(guards):
        parts.append(guard.words(f"guard_{number}", before, parameters))
        before = f"guard_{number}"
    locked = " and ".join(f"(select count(*) from guard_{number}) >= 0" for number in range(len(guards)))
    judged = " union all ".join(guard.verdict(f"guard_{number}") for number, guard in enumerate(guards))
    parts.append(f"clock as materialized (select {clock} as now where {locked})")
    each = "" if alone else " group by no order by no"
    parts.append(
        "verdict as materialized (select now, array(select bool_and(ok)"
        f" from ({judged}) judged{each}) as yes from clock)"
    )
    return parts
