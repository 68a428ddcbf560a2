"""Claiming and renewing: the two verbs whose arithmetic the server does itself, for many rows in one trip.

The rule that a take equals is `Take.fields` in the port; the contract tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, Literal

import msgspec

from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.base import Held, Stamp, Take, Unstorable
from flowfabric.stores.codec import CODEC, LineAt, LineOf, encode
from flowfabric.stores.postgres.commit import CLOCK
from flowfabric.stores.postgres.habits import joined, list_words
from flowfabric.stores.postgres.pieces import NUMBER, POINTER
from flowfabric.stores.postgres.sql import column_type, numbered, pieces, quoted
from flowfabric.stores.taking import PAYLOAD, rare, taken, usual

_STATEMENTS = pieces("take.sql")
_NOW = CLOCK.format(given=":clock::bigint")
_GIVEN = ["clock", "lines", "wanted", "lease_ids", "attempt_ids", "revisions"]
_GIVEN += ["worker_id", "worker_instance_id", "lease_ttl_ms"]

Lines = Literal["one", "few", "many"]

MANY = 16  # lines
REACH = 2  # how many heads are looked at for each row that is wanted
LONG_REACH = 8  # and when others held so many of them that too few were left


class Claim:
    """A take with the given fields in `becomes`: its statement, and how its answer becomes rows."""

    def __init__(self, becomes: tuple[str, ...], lines: Lines) -> None:
        columns = CODEC[Execution].column
        one = lines == "one"
        words = _STATEMENTS["take"].format(
            clock=_NOW,
            locked=_part("locked_in_one") if one else _part("locked_in_some").format(heads=_part(f"heads_of_{lines}")),
            more="" if one else "(select count(*) from heads) = :reach or ",
            number=NUMBER,
            told=POINTER.format(row="e"),
            lease_ids=list_words("text", ":lease_ids"),
            attempt_ids=list_words("text", ":attempt_ids"),
            revisions=list_words("bigint", ":revisions"),
            becomes="".join(f'"{name}" = :value_{name}::{column_type(columns[name])}, ' for name in becomes),
            rare=quoted(rare(becomes), "e."),
            columns=quoted(usual(becomes), "e."),
            heard=quoted(usual(becomes), "t."),
            payload=quoted(PAYLOAD, "p."),
        )
        self.reaches = not one
        values = [f"value_{name}" for name in becomes]
        self.words = numbered(words, [*_GIVEN, *values, "reach"] if self.reaches else [*_GIVEN, *values])

    def rows(
        self, answer: list[Any], take: Take, stamps: Sequence[Stamp], line_at: LineAt
    ) -> list[tuple[Execution, Payload]]:
        """The rows of the server's answer."""
        if answer[0]["place"] is None:
            return []
        answer.sort(key=itemgetter(2))
        (now, *_), _, places, listed, *columns = zip(*answer, strict=True)
        rarities = [one and msgspec.json.decode(one) for one in listed]
        return taken(take, [stamps[place - 1] for place in places], now, rarities, columns, line_at)


def _part(name: str) -> str:
    """A part of a statement, without the line that says what it is for."""
    return _STATEMENTS[name].partition("\n")[2]


_claim = cache(Claim)


def claim(take: Take, lines: list[int]) -> Claim:
    """How to do this take from these lines."""
    return _claim(tuple(take.becomes), "one" if len(lines) == 1 else "few" if len(lines) <= MANY else "many")


def _text(names: list[str]) -> str:
    """The names as one text."""
    text = joined(names)
    if text is None:
        raise Unstorable("a stamp that the server could not tell from others")
    return text


async def take(
    connection: Any,
    take: Take,
    stamps: Sequence[Stamp],
    lines: list[int],
    reach: int,
    clock: int | None,
    line_of: LineOf,
) -> list[Any]:
    """Claim up to one row a stamp, of several lines not looking at more heads than `reach`; the server's answer."""
    how = claim(take, lines)
    answer: list[Any] = await connection.fetch(
        how.words,
        clock,
        lines,
        len(stamps),
        _text([stamp.lease_id for stamp in stamps]),
        _text([stamp.attempt_id for stamp in stamps]),
        " ".join([str(stamp.revision) for stamp in stamps]),
        take.worker_id,
        take.worker_instance_id,
        take.lease_ttl_ms,
        *(encode(value, line_of) for value in take.becomes.values()),
        *([reach] if how.reaches else ()),
    )
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
