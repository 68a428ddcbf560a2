"""Claim and renew: the server computes the new values itself, for many rows in one round trip.

A claim equals `ClaimRequest.fields_for`; the contract tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Literal

from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.claims import ClaimRequest, LeaseIds, LeaseRef
from flowfabric.stores.codec import QueueDecoder, QueueEncoder
from flowfabric.stores.postgres.claim_result import (
    CLAIM_PARAMETERS,
    JOIN_PAYLOADS,
    claim_arguments,
    claim_fragments,
    decode_claim_result,
    fragment,
    result_columns,
)
from flowfabric.stores.postgres.commit.fragments import CLOCK_SQL, NEXT_BATCH_ID_SQL
from flowfabric.stores.postgres.dead_entries import IndexRange
from flowfabric.stores.postgres.reads import ENTRIES_READ_TEMPLATE
from flowfabric.stores.postgres.sql import load_statements, number_parameters

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
HEADS_PER_ROW_ON_RETRY = 8  # the same after concurrent claims had locked so many heads that too few were left


class ClaimStatement:
    """The statement of a claim that sets these shared fields, and the decoder of its result."""

    def __init__(self, shared_fields: tuple[str, ...], queue_count: QueueCount, ranged: bool) -> None:
        """`ranged` claims read only given ranges of positions in each queue."""
        one = queue_count == "one" and not ranged
        heads = "" if one else _heads_sql(queue_count, ranged)
        statement = _STATEMENTS["claim_rows"].format(
            clock=_NOW,
            entries=ENTRIES_READ_SQL,
            locked=fragment("lock_heads_of_one_queue") if one else fragment("lock_heads_of_queues").format(heads=heads),
            more="" if one else "(select count(*) from heads) = :max_heads or ",
            next_batch_id=NEXT_BATCH_ID_SQL,
            claim_events=fragment("claim_events").format(rows="claimed"),
            result_columns=result_columns(shared_fields),
            join_payloads=JOIN_PAYLOADS,
            **claim_fragments(shared_fields),
        )
        self.limits_heads = not one
        names = ["clock", "queue_ids", "max_rows", *CLAIM_PARAMETERS, *(f"value_{name}" for name in shared_fields)]
        names += ["max_heads"] if self.limits_heads else []
        self.sql = number_parameters(statement, [*names, *RANGE_PARAMETERS] if ranged else names)

    def decode(
        self, result: list[Any], request: ClaimRequest, lease_ids: Sequence[LeaseIds], decode_queue: QueueDecoder
    ) -> list[tuple[Execution, Payload]]:
        """Decode the claimed rows of the statement's result."""
        return decode_claim_result(result, 3, request, lease_ids, decode_queue)


def _heads_sql(queue_count: QueueCount, ranged: bool) -> str:
    return fragment("heads_of_many_queues" if queue_count == "many" else "heads_of_few_queues").format(
        queues=_RANGES_SQL if ranged else "unnest(:queue_ids::bigint[]) as queue (line)",
        within=_WITHIN_RANGE_SQL if ranged else "",
    )


_cached_statement = cache(ClaimStatement)


def claim_statement(request: ClaimRequest, queue_ids: Sequence[int], *, ranged: bool = False) -> ClaimStatement:
    """Return the statement for this claim from these queues."""
    count: QueueCount = "one" if len(queue_ids) == 1 else "few" if len(queue_ids) <= MANY_QUEUES else "many"
    return _cached_statement(tuple(request.shared_fields), count, ranged)


async def claim_rows(
    connection: Any,
    request: ClaimRequest,
    lease_ids: Sequence[LeaseIds],
    queue_ids: list[int],
    max_heads: int,
    clock: int | None,
    encode_queue: QueueEncoder,
    ranges: Sequence[IndexRange] = (),
) -> list[Any]:
    """Claim up to one row per lease id and return the statement's result.

    Of several queues at most `max_heads` heads are read. With `ranges` only these parts of the queues are read.
    """
    statement = claim_statement(request, queue_ids, ranged=bool(ranges))
    values = [
        *claim_arguments(request, lease_ids, encode_queue),
        *([max_heads] if statement.limits_heads else ()),
    ]
    if ranges:
        queue_ids = [part.key for part in ranges]
        values += [[part.low[0] for part in ranges], [part.low[1] for part in ranges]]
        values += [[part.high[0] for part in ranges], [part.high[1] for part in ranges]]
    result: list[Any] = await connection.fetch(statement.sql, clock, queue_ids, len(lease_ids), *values)
    return result


_RENEW = number_parameters(
    _STATEMENTS["renew_leases"].format(clock=_NOW, next_batch_id=NEXT_BATCH_ID_SQL),
    ("clock", "ordinals", "execution_ids", "attempt_indexes", "attempt_ids", "lease_ids", "lease_epochs", "ttls"),
)


async def renew(connection: Any, leases: Sequence[LeaseRef], clock: int | None) -> list[int | None]:
    """Renew leases; return, per lease, its new expiry, or None if it was refused."""
    # Sorted by id, so that concurrent renewals lock rows in the same order.
    ordinals = sorted(range(len(leases)), key=lambda ordinal: leases[ordinal].execution_id)
    ordered = [leases[ordinal] for ordinal in ordinals]
    fields = ("execution_id", "attempt_index", "attempt_id", "lease_id", "lease_epoch", "lease_ttl_ms")
    columns = [list(map(attrgetter(field), ordered)) for field in fields]
    expiries: list[int | None] = [None] * len(leases)
    for ordinal, expires_at in await connection.fetch(_RENEW, clock, ordinals, *columns):
        expiries[ordinal] = expires_at
    return expiries
