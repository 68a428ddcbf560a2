"""The commit statement: one statement that locks, reads the clock, judges and writes a whole batch of changes.

    guards     finds each guarded aggregate root by its key and locks it, in key order: `for update` if the change
               writes the root, `for share` if the change only relies on it
    clock      the time, read when all locks are held
    verdict    accepted or refused, per change, decided from the locked rows and the clock alone
    writes     one CTE per shape of write, each for the accepted changes
    queues     inserts missing rows of the ready queues that work is put into (queue_ids.py)
    claimed    rows that are claimed instead of being enqueued, for a commit-and-claim (claim.py)
    events     one batch of the event log, numbered when all locks are held

Why one verdict. All CTEs of a statement see the snapshot of its start, but an update that had to wait for a lock goes
on with the current version of the row. If each CTE judged for itself, a change of two rows could be torn: the first
row written according to the snapshot, the second refused according to the current version. A locked row is current
and stays so until the commit. So only locked rows are judged, and every write depends on that one verdict.

A row that must be absent cannot be locked. The statement looks it up. If two batches insert it at once, the second one
fails as a whole on the unique key (`Collision`), and the store retries it in halves. For this reason an upsert of a row
that must be absent is written as an insert.

The join of guards and rows is lateral, so the only possible plan walks the given keys one by one through the primary
key, in the given order. Verdicts are an array that each CTE subscripts with the number of the change. No CTE joins
another one, so no plan depends on a row estimate.

A statement is composed from the shapes in the batch and cached. The same shapes give the same text, which the driver
has already prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowfabric.stores.postgres.claim_result import JOIN_PAYLOADS, result_columns
from flowfabric.stores.postgres.commit.claim import UNLESS_CLAIMED, ClaimFragment
from flowfabric.stores.postgres.commit.fragments import (
    CLOCK_SQL,
    NEXT_BATCH_ID_SQL,
    ConditionFragment,
    DeleteFragment,
    EventFragment,
    InsertFragment,
    TemplateFragment,
    WriteFragment,
)
from flowfabric.stores.postgres.commit.plan import CommitPlan
from flowfabric.stores.postgres.notifier import CHANNEL
from flowfabric.stores.postgres.pool import in_transaction
from flowfabric.stores.postgres.queue_ids import ENSURE_QUEUES
from flowfabric.stores.postgres.sql import ParameterNumbering

# Drawn only when all locks are held, because it depends on the verdict.
BATCH_ID_CTE = f"new_batch as materialized ({NEXT_BATCH_ID_SQL} from verdict where true = any (accepted))"
INSERT_BATCH_CTE = (
    "batch as (insert into ff_batch (batch_id, at, events)"
    " select n.batch_id, v.now, {events} from new_batch n, verdict v)"
)
NOTIFY_COLUMN = (
    f", case when {{topics}} is not null and true = any (accepted) then pg_notify('{CHANNEL}', {{topics}}) end"
)
MAX_CACHED_STATEMENTS = 1000

_statements: dict[tuple[Any, ...], str] = {}


async def commit(
    connection: Any, plan: CommitPlan, clock: int | None, topics: str | None = None, *, ensure_queues: bool = True
) -> list[Any]:
    """Judge and write a batch.

    `ensure_queues` makes the commit insert missing rows of its queues. If anything is written, listeners are notified
    about `topics` at the instant of the commit.

    The result's rows begin with the commit's time, the verdicts in the order of the changes, and a column without
    meaning. The columns of the claimed rows follow, if the batch claims any.
    """
    queues = (plan.queues if ensure_queues else None) or ()
    if plan.is_multi_statement:
        return await in_transaction(
            connection, lambda transaction: _commit_in_steps(transaction, plan, clock, topics, queues)
        )
    claim = () if plan.claim is None else (plan.claim,)
    fragments = [*plan.guards, *claim, *plan.rounds[0]]
    arguments = [argument for _, arguments in fragments for argument in arguments]
    if plan.events is not None:
        arguments += plan.events[1]
    statement = _statement(
        tuple(guard for guard, _ in plan.guards),
        tuple(write for write, _ in plan.rounds[0]),
        plan.events and plan.events[0],
        plan.claim and plan.claim[0],
        single=plan.is_single,
        ensure_queues=bool(queues),
    )
    result: list[Any] = await connection.fetch(statement, clock, *arguments, *queues, topics)
    return result


async def _commit_in_steps(
    connection: Any, plan: CommitPlan, clock: int | None, topics: str | None, queues: tuple[Any, ...]
) -> list[Any]:
    arguments = [argument for _, arguments in plan.guards for argument in arguments]
    guards = tuple(guard for guard, _ in plan.guards)
    statement = _statement(guards, (), None, None, single=plan.is_single, ensure_queues=bool(queues))
    result: list[Any] = await connection.fetch(statement, clock, *arguments, *queues, topics)
    now, accepted, _ = result[0]
    events = plan.events
    for fragments in plan.rounds:
        arguments = [argument for _, arguments in fragments for argument in arguments]
        if events is not None:
            arguments += events[1]
        writes = tuple(write for write, _ in fragments)
        statement = _statement(None, writes, events and events[0], None, single=plan.is_single, ensure_queues=False)
        await connection.fetchrow(statement, accepted, now, *arguments)
        events = None
    return result


def _statement(
    guards: tuple[ConditionFragment, ...] | None,
    writes: tuple[WriteFragment, ...],
    events: EventFragment | None,
    claim: ClaimFragment | None,
    *,
    single: bool,
    ensure_queues: bool,
) -> str:
    shape = (guards, writes, events, claim, single, ensure_queues)
    statement = _statements.get(shape)
    if statement is None:
        if len(_statements) >= MAX_CACHED_STATEMENTS:
            _statements.clear()
        statement = compose_statement(guards, writes, events, claim, single=single, ensure_queues=ensure_queues)
        _statements[shape] = statement
    return statement


def compose_statement(
    guards: Sequence[ConditionFragment] | None,
    writes: Sequence[WriteFragment],
    events: EventFragment | None,
    claim: ClaimFragment | None = None,
    *,
    single: bool,
    ensure_queues: bool = False,
) -> str:
    """Compose the statement of these shapes, for a `single` change or for any number of changes.

    With `ensure_queues` it inserts missing rows of the queues that the batch puts work into. Without guards, the
    verdicts and the time are its first parameters.
    """
    parameters = ParameterNumbering()
    if guards is None:
        accepted, now = parameters.add("boolean[]"), parameters.add("bigint")
        ctes = [f"verdict as materialized (select {accepted} as accepted, {now} as now)"]
    else:
        ctes = _verdict_ctes(guards, parameters, single=single)
    templates = [(f"write_{number}", write) for number, write in enumerate(writes) if type(write) is TemplateFragment]
    if events is not None or templates or claim is not None:
        ctes.append(BATCH_ID_CTE)
    if claim is not None:
        ctes.append(claim.sql(parameters))
    for number, write in enumerate(writes):
        name = f"write_{number}"
        if isinstance(write, InsertFragment) and write.is_hot_upsert:
            update, insert = write.hot_upsert_sql(parameters)
            ctes += [f"{name} as ({update})", f"{name}_absent as ({insert})"]
            continue
        unless = UNLESS_CLAIMED if claim is not None and number == claim.replaced_write else ""
        ctes.append(f"{name} as ({write.sql(parameters)}{unless})")
        if isinstance(write, DeleteFragment):
            ctes += write.keep_pointers_sql(name)
    event_arrays = [write.events_sql(name) for name, write in templates]
    if events is not None:
        ctes += events.sql(parameters)
        event_arrays.insert(0, events.events_sql())
    if claim is not None:
        event_arrays.append("(select events from claim_events)")
    if event_arrays:
        ctes.append(INSERT_BATCH_CTE.format(events=" || ".join(event_arrays)))
    if ensure_queues:
        ctes.append(parameters.bind_names(ENSURE_QUEUES, ("queue_ids", "rows")))
    notify = "" if guards is None else NOTIFY_COLUMN.format(topics=parameters.add("text"))
    select = f"select now, accepted{notify} from verdict"
    if claim is not None:
        claimed = f"left join claimed t on true {JOIN_PAYLOADS}"
        select = f"select v.*, {result_columns(claim.template)} from ({select}) v {claimed}"
    return "with " + ",\n".join(ctes) + f"\n{select}"


def _verdict_ctes(guards: Sequence[ConditionFragment], parameters: ParameterNumbering, *, single: bool) -> list[str]:
    clock = CLOCK_SQL.format(given=parameters.add("bigint"))
    ctes, previous = [], None
    for number, guard in enumerate(guards):
        ctes.append(guard.sql(f"guard_{number}", previous, parameters))
        previous = f"guard_{number}"
    locked = " and ".join(f"(select count(*) from guard_{number}) >= 0" for number in range(len(guards)))
    judged = " union all ".join(guard.verdict_sql(f"guard_{number}") for number, guard in enumerate(guards))
    ctes.append(f"clock as materialized (select {clock} as now where {locked})")
    per_change = "" if single else " group by change_no order by change_no"
    ctes.append(
        "verdict as materialized (select now, array(select bool_and(ok)"
        f" from ({judged}) judged{per_change}) as accepted from clock)"
    )
    return ctes
