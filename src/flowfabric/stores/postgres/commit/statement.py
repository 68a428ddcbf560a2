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

from flowfabric.stores.postgres.claim_result import JOIN_PAYLOADS
from flowfabric.stores.postgres.claim_result import result_columns as told_of
from flowfabric.stores.postgres.commit.claim import UNLESS_CLAIMED, ClaimFragment
from flowfabric.stores.postgres.commit.fragments import (
    CLOCK_SQL,
    NEXT_BATCH_ID_SQL,
    ConditionFragment,
    DeleteFragment,
    EventFragment,
    TemplateFragment,
    WriteFragment,
)
from flowfabric.stores.postgres.commit.plan import CommitPlan
from flowfabric.stores.postgres.notifier import CHANNEL
from flowfabric.stores.postgres.pool import in_transaction
from flowfabric.stores.postgres.queue_ids import ENSURE_QUEUES
from flowfabric.stores.postgres.sql import ParameterNumbering

# Drawn only when all locks are held, since it asks for the verdict.
BATCH_ID_CTE = f"number as materialized ({NEXT_BATCH_ID_SQL} from verdict where true = any (yes))"
INSERT_BATCH_CTE = (
    "batch as (insert into ff_batch (batch_id, at, events) select n.batch_id, v.now, {events} from number n, verdict v)"
)
NOTIFY_COLUMN = f", case when {{hint}} is not null and true = any (yes) then pg_notify('{CHANNEL}', {{hint}}) end"
MAX_CACHED_STATEMENTS = 1000

_wordings: dict[tuple[Any, ...], str] = {}


async def commit(
    connection: Any, batch: CommitPlan, clock: int | None, hint: str | None = None, *, ensure_queues: bool = True
) -> list[Any]:
    """Judge and write the batch.

    `ensures` lets it write the rows of its queues where they are missing.

    The answer begins with the commit's time and the verdicts, in the order of the changes. Behind those, and a column
    of no meaning, it has the rows that were handed over, if the batch does that.

    A hint goes out to those who listen at the instant of the commit, if anything was written.
    """
    queues = (batch.queues if ensure_queues else None) or ()
    if batch.is_multi_statement:
        return await in_transaction(connection, lambda inside: _commit_in_steps(inside, batch, clock, hint, queues))
    hand = () if batch.claim is None else (batch.claim,)
    pieces = [*batch.guards, *hand, *batch.rounds[0]]
    arrays = [array for _, arrays in pieces for array in arrays]
    if batch.events is not None:
        arrays += batch.events[1]
    words = _words(
        tuple(guard for guard, _ in batch.guards),
        tuple(piece for piece, _ in batch.rounds[0]),
        batch.events and batch.events[0],
        batch.claim and batch.claim[0],
        alone=batch.is_single,
        queued=bool(queues),
    )
    answer: list[Any] = await connection.fetch(words, clock, *arrays, *queues, hint)
    return answer


async def _commit_in_steps(
    connection: Any, batch: CommitPlan, clock: int | None, hint: str | None, queues: tuple[Any, ...]
) -> list[Any]:
    arrays = [array for _, given in batch.guards for array in given]
    guards = tuple(guard for guard, _ in batch.guards)
    words = _words(guards, (), None, None, alone=batch.is_single, queued=bool(queues))
    answer: list[Any] = await connection.fetch(words, clock, *arrays, *queues, hint)
    now, yes, _ = answer[0]
    told = batch.events
    for pieces in batch.rounds:
        arrays = [array for _, given in pieces for array in given]
        if told is not None:
            arrays += told[1]
        writes = tuple(piece for piece, _ in pieces)
        words = _words(None, writes, told and told[0], None, alone=batch.is_single, queued=False)
        await connection.fetchrow(words, yes, now, *arrays)
        told = None
    return answer


def _words(
    guards: tuple[ConditionFragment, ...] | None,
    writes: tuple[WriteFragment, ...],
    told: EventFragment | None,
    hand: ClaimFragment | None,
    *,
    alone: bool,
    queued: bool,
) -> str:
    shape = (guards, writes, told, hand, alone, queued)
    words = _wordings.get(shape)
    if words is None:
        if len(_wordings) >= MAX_CACHED_STATEMENTS:
            _wordings.clear()
        words = _wordings[shape] = compose_statement(guards, writes, told, hand, single=alone, ensure_queues=queued)
    return words


def compose_statement(
    guards: Sequence[ConditionFragment] | None,
    writes: Sequence[WriteFragment],
    told: EventFragment | None,
    hand: ClaimFragment | None = None,
    *,
    single: bool,
    ensure_queues: bool = False,
) -> str:
    """The statement of these shapes, for one change `alone` or for any number of them.

    `queued` batches put work into ready queues, and add the rows of those that are missing. Without guards, the
    verdicts and the time are given as its first parameters.
    """
    parameters = ParameterNumbering()
    if guards is None:
        yes, now = parameters.add("boolean[]"), parameters.add("bigint")
        parts = [f"verdict as materialized (select {yes} as yes, {now} as now)"]
    else:
        parts = _verdict(guards, parameters, alone=single)
    forms = [(f"write_{number}", piece) for number, piece in enumerate(writes) if isinstance(piece, TemplateFragment)]
    if told is not None or forms or hand is not None:
        parts.append(BATCH_ID_CTE)
    if hand is not None:
        parts.append(hand.sql(parameters))
    for number, piece in enumerate(writes):
        name = f"write_{number}"
        unless = UNLESS_CLAIMED if hand is not None and number == hand.replaced_write else ""
        parts.append(f"{name} as ({piece.sql(parameters)}{unless})")
        if isinstance(piece, DeleteFragment):
            parts += piece.keep_pointers_sql(name)
    events = [piece.events_sql(name) for name, piece in forms]
    if told is not None:
        parts += told.sql(parameters)
        events.insert(0, told.events_sql())
    if hand is not None:
        events.append("(select events from acquired)")
    if events:
        parts.append(INSERT_BATCH_CTE.format(events=" || ".join(events)))
    if ensure_queues:
        parts.append(parameters.bind_names(ENSURE_QUEUES, ("numbers", "rows")))
    hinted = "" if guards is None else NOTIFY_COLUMN.format(hint=parameters.add("text"))
    answer = f"select now, yes{hinted} from verdict"
    if hand is not None:
        rows = f"left join handed t on true {JOIN_PAYLOADS}"
        answer = f"select v.*, {told_of(hand.shared_fields)} from ({answer}) v {rows}"
    return "with " + ",\n".join(parts) + f"\n{answer}"


def _verdict(guards: Sequence[ConditionFragment], parameters: ParameterNumbering, *, alone: bool) -> list[str]:
    clock = CLOCK_SQL.format(given=parameters.add("bigint"))
    parts, before = [], None
    for number, guard in enumerate(guards):
        parts.append(guard.sql(f"guard_{number}", before, parameters))
        before = f"guard_{number}"
    locked = " and ".join(f"(select count(*) from guard_{number}) >= 0" for number in range(len(guards)))
    judged = " union all ".join(guard.verdict_sql(f"guard_{number}") for number, guard in enumerate(guards))
    parts.append(f"clock as materialized (select {clock} as now where {locked})")
    each = "" if alone else " group by no order by no"
    parts.append(
        "verdict as materialized (select now, array(select bool_and(ok)"
        f" from ({judged}) judged{each}) as yes from clock)"
    )
    return parts
