"""Claiming and renewing: the two verbs whose arithmetic the server does itself, for many rows in one trip.

The rule that a take equals is `Take.fields` in the port; the contract tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Literal

from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.claims import Held, Stamp, Take
from flowfabric.stores.codec import LineAt, LineOf
from flowfabric.stores.postgres.claim_result import PAYLOADS, TAKER, claimed, given, part, rows_told, told
from flowfabric.stores.postgres.commit.fragments import CLOCK, NUMBER
from flowfabric.stores.postgres.dead_entries import Range
from flowfabric.stores.postgres.reads import COUNTER
from flowfabric.stores.postgres.sql import numbered, pieces

_STATEMENTS = pieces("take.sql")
_NOW = CLOCK.format(given=":clock::bigint")

Lines = Literal["one", "few", "many"]

ENTRIES = COUNTER.format(index="ff_exec_core_line")
RANGES = ("low_ranks", "low_ids", "high_ranks", "high_ids")
_IN_RANGES = (
    "unnest(:lines::bigint[], :low_ranks::bigint[], :low_ids::text[], :high_ranks::bigint[], :high_ids::text[])"
    " as wanted (line, low_rank, low_id, high_rank, high_id)"
)
_WITHIN_RANGE = (
    " and (e.rank, e.execution_id) > (wanted.low_rank, wanted.low_id)"
    " and (e.rank, e.execution_id) <= (wanted.high_rank, wanted.high_id)"
)
MANY = 16  # lines
REACH = 2  # how many heads are looked at for each row that is wanted
LONG_REACH = 8  # and when others held so many of them that too few were left


class Claim:
    """A take with the given fields in `becomes`: its statement, and how its answer becomes rows."""

    def __init__(self, becomes: tuple[str, ...], lines: Lines, ranged: bool) -> None:
        """Lines that are `ranged` are read within ranges of positions."""
        one = lines == "one" and not ranged
        words = _STATEMENTS["take"].format(
            clock=_NOW,
            entries=ENTRIES,
            locked=part("locked_in_one") if one else part("locked_in_some").format(heads=_heads(lines, ranged)),
            more="" if one else "(select count(*) from heads) = :reach or ",
            number=NUMBER,
            acquired=part("acquired").format(rows="taken"),
            told=told(becomes),
            payloads=PAYLOADS,
            **claimed(becomes),
        )
        self.reaches = not one
        names = ["clock", "lines", "wanted", *TAKER, *(f"value_{name}" for name in becomes)]
        names += ["reach"] if self.reaches else []
        self.words = numbered(words, [*names, *RANGES] if ranged else names)

    def rows(
        self, answer: list[Any], take: Take, stamps: Sequence[Stamp], line_at: LineAt
    ) -> list[tuple[Execution, Payload]]:
        """The rows of the server's answer."""
        return rows_told(answer, 3, take, stamps, line_at)


def _heads(lines: Lines, ranged: bool) -> str:
    return part("heads_of_many" if lines == "many" else "heads_of_few").format(
        wanted=_IN_RANGES if ranged else "unnest(:lines::bigint[]) as wanted (line)",
        within=_WITHIN_RANGE if ranged else "",
    )


_claim = cache(Claim)


def claim(take: Take, lines: Sequence[int], *, ranged: bool = False) -> Claim:
    """How to do this take from these lines."""
    count: Lines = "one" if len(lines) == 1 else "few" if len(lines) <= MANY else "many"
    return _claim(tuple(take.becomes), count, ranged)


async def take(
    connection: Any,
    take: Take,
    stamps: Sequence[Stamp],
    lines: list[int],
    reach: int,
    clock: int | None,
    line_of: LineOf,
    ranges: Sequence[Range] = (),
) -> list[Any]:
    """Claim up to one row a stamp, of several lines not looking at more heads than `reach`; the server's answer.

    With `ranges` only these parts of the lines are read.
    """
    how = claim(take, lines, ranged=bool(ranges))
    values = [*given(take, stamps, line_of), *([reach] if how.reaches else ())]
    if ranges:
        lines = [part.line for part in ranges]
        values += [[part.low[0] for part in ranges], [part.low[1] for part in ranges]]
        values += [[part.high[0] for part in ranges], [part.high[1] for part in ranges]]
    answer: list[Any] = await connection.fetch(how.words, clock, lines, len(stamps), *values)
    return answer


_RENEW = numbered(
    _STATEMENTS["renew"].format(clock=_NOW, number=NUMBER),
    ("clock", "places", "execution_ids", "attempt_indexes", "attempt_ids", "lease_ids", "lease_epochs", "ttls"),
)


async def renew(connection: Any, leases: Sequence[Held], clock: int | None) -> list[int | None]:
    """Per lease its new end, or None."""
    places = sorted(range(len(leases)), key=lambda place: leases[place].execution_id)
    ordered = [leases[place] for place in places]
    fields = ("execution_id", "attempt_index", "attempt_id", "lease_id", "lease_epoch", "lease_ttl_ms")
    columns = [list(map(attrgetter(field), ordered)) for field in fields]
    ends: list[int | None] = [None] * len(leases)
    for place, until in await connection.fetch(_RENEW, clock, places, *columns):
        ends[place] = until
    return ends
