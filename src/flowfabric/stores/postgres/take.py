"""Claiming and renewing: the two verbs whose arithmetic the server does itself, for many rows in one trip.

The rule that a take equals is `Take.fields` in the port; the contract tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any

from flowfabric.model.execution import Execution, LineKey, Payload
from flowfabric.stores.base import Held, Stamp, Take
from flowfabric.stores.codec import CODEC, LineAt, LineOf, encode, members
from flowfabric.stores.postgres.commit import CLOCK
from flowfabric.stores.postgres.sql import column_type, numbered, pieces, quoted

_STATEMENTS = pieces("take.sql")
_NOW = CLOCK.format(given=":clock::bigint")
_GIVEN = ["clock", "lines", "reach", "lease_ids", "attempt_ids", "revisions"]
_GIVEN += ["worker_id", "worker_instance_id", "lease_ttl_ms"]

MANY = 16  # lines
REACH = 2  # how many heads are looked at for each row that is wanted
LONG_REACH = 8  # and when others held so many of them that too few were left


class Claim:
    """A take with the given fields in `becomes`: its statement, and how its answer becomes rows."""

    def __init__(self, becomes: tuple[str, ...], many: bool) -> None:
        columns = CODEC[Execution].column
        told = {*becomes, *_stamped(Take((), (), "", "", 0, {}), (), 0)}
        self._heard = [name for name in columns if name not in told]
        cold = [name for name in CODEC[Payload].columns if name != "execution_id"]
        words = _STATEMENTS["take"].format(
            clock=_NOW,
            heads=_STATEMENTS["heads_of_many" if many else "heads_of_few"].partition("\n")[2],
            becomes="".join(f'"{name}" = :value_{name}::{column_type(columns[name])}, ' for name in becomes),
            columns=quoted(self._heard, "e."),
            payload=quoted(cold, "p."),
        )
        self.words = numbered(words, (*_GIVEN, *(f"value_{name}" for name in becomes)))

    def rows(
        self, answer: list[Any], take: Take, stamps: Sequence[Stamp], line_at: LineAt
    ) -> list[tuple[Execution, Payload]]:
        """The rows of the server's answer, a column at a time: what was heard, and what was told to all of them."""
        if answer[0]["place"] is None:
            return []
        answer.sort(key=itemgetter(2))
        (now, *_), _, places, *heard = zip(*answer, strict=True)
        own = [stamps[place - 1] for place in places]
        found: dict[str, Iterable[Any]] = {name: repeat(value) for name, value in take.becomes.items()}
        found |= _stamped(take, own, now)
        for name, values in zip(self._heard, heard, strict=False):
            found[name] = _decoded(name, values, line_at)
        rows = map(Execution, *(found[name] for name in Execution.__struct_fields__))
        payloads = map(Payload, found["execution_id"], *heard[len(self._heard) :])
        return list(zip(rows, payloads, strict=True))


def _stamped(take: Take, stamps: Sequence[Stamp], now: int) -> dict[str, Iterable[Any]]:
    """The columns that a take sets in the same way whatever the row, for each of its rows."""
    return {
        "lease_id": [stamp.lease_id for stamp in stamps],
        "worker_id": repeat(take.worker_id),
        "worker_instance_id": repeat(take.worker_instance_id),
        "lease_acquired_at": repeat(now),
        "lease_renewed_at": repeat(now),
        "lease_expires_at": repeat(now + take.lease_ttl_ms),
        "last_transition_at": repeat(now),
        "last_mutation_at": repeat(now),
        "revision": [stamp.revision for stamp in stamps],
    }


def _decoded(name: str, values: Sequence[Any], line_at: LineAt) -> Iterable[Any]:
    column = CODEC[Execution].column[name]
    if column.is_enum:
        kinds = members(column.kind)
        return [None if code is None else kinds[code] for code in values]
    if column.kind is LineKey:
        return [None if line is None else line_at(line) for line in values]
    return values


@cache
def _claim(becomes: tuple[str, ...], many: bool) -> Claim:
    return Claim(becomes, many)


def claim(take: Take) -> Claim:
    """How to do this take."""
    return _claim(tuple(take.becomes), len(take.lines) > MANY)


async def take(
    connection: Any,
    take: Take,
    stamps: Sequence[Stamp],
    lines: list[int],
    reach: int,
    clock: int | None,
    line_of: LineOf,
) -> list[Any]:
    """Claim up to one row a stamp; the server's answer, for `Claim.rows`."""
    answer: list[Any] = await connection.fetch(
        claim(take).words,
        clock,
        lines,
        reach,
        [stamp.lease_id for stamp in stamps],
        [stamp.attempt_id for stamp in stamps],
        [stamp.revision for stamp in stamps],
        take.worker_id,
        take.worker_instance_id,
        take.lease_ttl_ms,
        *(encode(value, line_of) for value in take.becomes.values()),
    )
    return answer


_RENEW = numbered(
    _STATEMENTS["renew"].format(clock=_NOW),
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
