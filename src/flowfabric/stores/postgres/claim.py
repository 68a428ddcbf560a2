"""Claim and renew: the server computes the new values itself, for many rows in one round trip.

The statements are compiled once per template.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from msgspec.structs import astuple

from flowfabric.model.change import Condition, RowTemplate
from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.claims import ClaimRequest, LeaseIds, LeaseRef
from flowfabric.stores.codec import QueueDecoder
from flowfabric.stores.postgres.claim_result import (
    CLAIM_PARAMETERS,
    JOIN_PAYLOADS,
    claim_arguments,
    claim_fragments,
    decode_claim_result,
    fragment,
    result_columns,
)
from flowfabric.stores.postgres.commit.fragments import (
    CLOCK_SQL,
    NEXT_BATCH_ID_SQL,
    columns_read,
    template_event_sql,
    value_sql,
)
from flowfabric.stores.postgres.dead_entries import IndexRange
from flowfabric.stores.postgres.reads import ENTRIES_READ_TEMPLATE
from flowfabric.stores.postgres.sql import column_list, load_statements, number_parameters

_STATEMENTS = load_statements("claim.sql")
_NOW = CLOCK_SQL.format(given=":clock::bigint")

QueueCount = Literal["one", "few", "many"]

ENTRIES_READ_SQL = ENTRIES_READ_TEMPLATE.format(index="ff_exec_core_line")
RANGE_PARAMETERS = ("low_ranks", "low_ids", "high_ranks", "high_ids")
_RANGES_SQL = (
    "unnest(:queue_ids::bigint[], :low_ranks::bigint[], :low_ids::text[], :high_ranks::bigint[], :high_ids::text[])"
    " as queue (line, low_rank, low_id, high_rank, high_id)"
)
_WITHIN_RANGE_SQL = (
    " and (e.rank, e.execution_id) > (queue.low_rank, queue.low_id)"
    " and (e.rank, e.execution_id) <= (queue.high_rank, queue.high_id)"
)
MANY_QUEUES = 16
HEADS_PER_ROW = 2  # the number of heads that are read for each requested row
HEADS_FACTOR = 8  # a claim reads this many times as many heads if concurrent claims had locked those that it read
MAX_HEADS_PER_ROW = HEADS_PER_ROW * HEADS_FACTOR**2


class ClaimStatement:
    """The statement of a claim with this template, and the decoder of its result."""

    def __init__(self, template: RowTemplate, queue_count: QueueCount, ranged: bool) -> None:
        """`ranged` claims read only given ranges of positions in each queue."""
        one = queue_count == "one" and not ranged
        heads = "" if one else _heads_sql(queue_count, ranged)
        statement = _STATEMENTS["claim_rows"].format(
            clock=_NOW,
            entries=ENTRIES_READ_SQL,
            locked=fragment("lock_heads_of_one_queue") if one else fragment("lock_heads_of_queues").format(heads=heads),
            more="" if one else "(select count(*) from heads) = :max_heads or ",
            any_row=fragment("any_row_of_one_queue") if one else "select 1 from heads",
            next_batch_id=NEXT_BATCH_ID_SQL,
            result_columns=result_columns(template),
            join_payloads=JOIN_PAYLOADS,
            **claim_fragments(template),
        )
        self.limits_heads = not one
        names = ["clock", "queue_ids", "max_rows", *CLAIM_PARAMETERS]
        names += ["max_heads"] if self.limits_heads else []
        self.sql = number_parameters(statement, [*names, *RANGE_PARAMETERS] if ranged else names)

    def decode(
        self, result: list[Any], request: ClaimRequest, lease_ids: Sequence[LeaseIds], decode_queue: QueueDecoder
    ) -> list[tuple[Execution, Payload]]:
        """Decode the claimed rows of the statement's result."""
        return decode_claim_result(result, 4, request, lease_ids, decode_queue)


def _heads_sql(queue_count: QueueCount, ranged: bool) -> str:
    return fragment("heads_of_many_queues" if queue_count == "many" else "heads_of_few_queues").format(
        queues=_RANGES_SQL if ranged else "unnest(:queue_ids::bigint[]) as queue (line)",
        within=_WITHIN_RANGE_SQL if ranged else "",
    )


_cached_statement = lru_cache(64)(ClaimStatement)


def claim_statement(request: ClaimRequest, queue_ids: Sequence[int], *, ranged: bool = False) -> ClaimStatement:
    """Return the statement for this claim from these queues."""
    count: QueueCount = "one" if len(queue_ids) == 1 else "few" if len(queue_ids) <= MANY_QUEUES else "many"
    return _cached_statement(request.template, count, ranged)


async def claim_rows(
    connection: Any,
    request: ClaimRequest,
    lease_ids: Sequence[LeaseIds],
    queue_ids: list[int],
    max_heads: int,
    clock: int | None,
    ranges: Sequence[IndexRange] = (),
) -> list[Any]:
    """Claim up to one row per lease id and return the statement's result.

    Of several queues at most `max_heads` heads are read. With `ranges` only these parts of the queues are read.
    """
    statement = claim_statement(request, queue_ids, ranged=bool(ranges))
    values = [*claim_arguments(request, lease_ids), *([max_heads] if statement.limits_heads else ())]
    if ranges:
        queue_ids = [part.key for part in ranges]
        values += [[part.low[0] for part in ranges], [part.low[1] for part in ranges]]
        values += [[part.high[0] for part in ranges], [part.high[1] for part in ranges]]
    result: list[Any] = await connection.fetch(statement.sql, clock, queue_ids, len(lease_ids), *values)
    return result


@lru_cache(16)
def _renew_statement(template: RowTemplate) -> str:
    condition = template.condition or Condition({})
    given = {name: f'given."{name}"' for name in LeaseRef.__struct_fields__}
    read = columns_read([*template.fields.values(), *template.event.values()])
    columns = dict.fromkeys(["execution_id", *read, *condition.future])
    passed_on = {name: f'm."given {name}"' for name in given}
    new_values = {name: f'm."{name}"' for name in columns} | {
        name: value_sql(value, "m", "c.now", passed_on) for name, value in template.fields.items()
    }
    equal = {name: value_sql(value, "e", "c.now", given) for name, value in condition.equal.items()}
    statement = _STATEMENTS["renew_leases"].format(
        given=", ".join(f'{sql} as "given {name}"' for name, sql in given.items()),
        columns=column_list(columns, "e."),
        equal=" and ".join(f'e."{name}" is not distinct from {value}' for name, value in equal.items()) or "true",
        clock=_NOW,
        new_values=", ".join(f'{value} as "{name}"' for name, value in new_values.items()),
        future=" and ".join(f'm."{name}" > c.now' for name in condition.future) or "true",
        settings=", ".join(f'"{name}" = l."{name}"' for name in template.fields),
        next_batch_id=NEXT_BATCH_ID_SQL,
        event=template_event_sql(template, "l"),
    )
    arrays = ("execution_ids", "attempt_indexes", "attempt_ids", "lease_ids", "lease_epochs", "ttls")
    return number_parameters(statement, ("clock", "ordinals", *arrays))


async def renew(
    connection: Any, leases: Sequence[LeaseRef], template: RowTemplate, clock: int | None
) -> list[int | None]:
    """Renew leases; return, per lease, its new expiry, or None if it was refused."""
    # Sorted by id, so that concurrent renewals lock rows in the same order.
    ordinals = sorted(range(len(leases)), key=lambda ordinal: leases[ordinal].execution_id)
    columns = [list(column) for column in zip(*(astuple(leases[ordinal]) for ordinal in ordinals), strict=True)]
    expiries: list[int | None] = [None] * len(leases)
    for ordinal, expires_at in await connection.fetch(_renew_statement(template), clock, ordinals, *columns):
        expiries[ordinal] = expires_at
    return expiries
