"""Claiming and renewing: the two verbs whose arithmetic the server does itself, for many rows in one trip.

The rule that a take equals is `Take.fields` in the port; the contract tests compare the two.
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
_IN_RANGES = (
    "unnest(:lines::bigint[], :low_ranks::bigint[], :low_ids::text[], :high_ranks::bigint[], :high_ids::text[])"
    " as wanted (line, low_rank, low_id, high_rank, high_id)"
)
_WITHIN_RANGE = (
    " and (e.rank, e.execution_id) > (wanted.low_rank, wanted.low_id)"
    " and (e.rank, e.execution_id) <= (wanted.high_rank, wanted.high_id)"
)
MANY_QUEUES = 16  # lines
HEADS_PER_ROW = 2  # how many heads are looked at for each row that is wanted
HEADS_PER_ROW_ON_RETRY = 8  # and when others held so many of them that too few were left


class ClaimStatement:
    """A take with the given fields in `becomes`: its statement, and how its answer becomes rows."""

    def __init__(self, becomes: tuple[str, ...], lines: QueueCount, ranged: bool) -> None:
        """Lines that are `ranged` are read within ranges of positions."""
        one = lines == "one" and not ranged
        words = _STATEMENTS["take"].format(
            clock=_NOW,
            entries=ENTRIES_READ_SQL,
            locked=fragment("locked_in_one") if one else fragment("locked_in_some").format(heads=_heads(lines, ranged)),
            more="" if one else "(select count(*) from heads) = :reach or ",
            number=NEXT_BATCH_ID_SQL,
            acquired=fragment("acquired").format(rows="taken"),
            told=result_columns(becomes),
            payloads=JOIN_PAYLOADS,
            **claim_fragments(becomes),
        )
        self.limits_heads = not one
        names = ["clock", "lines", "wanted", *CLAIM_PARAMETERS, *(f"value_{name}" for name in becomes)]
        names += ["reach"] if self.limits_heads else []
        self.sql = number_parameters(words, [*names, *RANGE_PARAMETERS] if ranged else names)

    def decode(
        self, answer: list[Any], take: ClaimRequest, stamps: Sequence[LeaseIds], line_at: QueueDecoder
    ) -> list[tuple[Execution, Payload]]:
        """The rows of the server's answer."""
        return decode_claim_result(answer, 3, take, stamps, line_at)


def _heads(lines: QueueCount, ranged: bool) -> str:
    return fragment("heads_of_many" if lines == "many" else "heads_of_few").format(
        wanted=_IN_RANGES if ranged else "unnest(:lines::bigint[]) as wanted (line)",
        within=_WITHIN_RANGE if ranged else "",
    )


_claim = cache(ClaimStatement)


def claim_statement(take: ClaimRequest, lines: Sequence[int], *, ranged: bool = False) -> ClaimStatement:
    """How to do this take from these lines."""
    count: QueueCount = "one" if len(lines) == 1 else "few" if len(lines) <= MANY_QUEUES else "many"
    return _claim(tuple(take.shared_fields), count, ranged)


async def claim_rows(
    connection: Any,
    take: ClaimRequest,
    stamps: Sequence[LeaseIds],
    lines: list[int],
    reach: int,
    clock: int | None,
    line_of: QueueEncoder,
    ranges: Sequence[IndexRange] = (),
) -> list[Any]:
    """Claim up to one row a stamp, of several lines not looking at more heads than `reach`; the server's answer.

    With `ranges` only these parts of the lines are read.
    """
    how = claim_statement(take, lines, ranged=bool(ranges))
    values = [*claim_arguments(take, stamps, line_of), *([reach] if how.limits_heads else ())]
    if ranges:
        lines = [part.key for part in ranges]
        values += [[part.low[0] for part in ranges], [part.low[1] for part in ranges]]
        values += [[part.high[0] for part in ranges], [part.high[1] for part in ranges]]
    answer: list[Any] = await connection.fetch(how.sql, clock, lines, len(stamps), *values)
    return answer


_RENEW = number_parameters(
    _STATEMENTS["renew"].format(clock=_NOW, number=NEXT_BATCH_ID_SQL),
    ("clock", "places", "execution_ids", "attempt_indexes", "attempt_ids", "lease_ids", "lease_epochs", "ttls"),
)


async def renew(connection: Any, leases: Sequence[LeaseRef], clock: int | None) -> list[int | None]:
    """Per lease its new end, or None."""
    places = sorted(range(len(leases)), key=lambda place: leases[place].execution_id)
    ordered = [leases[place] for place in places]
    fields = ("execution_id", "attempt_index", "attempt_id", "lease_id", "lease_epoch", "lease_ttl_ms")
    columns = [list(map(attrgetter(field), ordered)) for field in fields]
    ends: list[int | None] = [None] * len(leases)
    for place, until in await connection.fetch(_RENEW, clock, places, *columns):
        ends[place] = until
    return ends
