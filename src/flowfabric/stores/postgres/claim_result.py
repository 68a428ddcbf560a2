"""Claimed rows: the words that make them so and tell of them, and how an answer becomes rows.

A take (take.py) finds its rows in lines; a commit that hands over (hand.py) knows them by name. The rest is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile
from operator import itemgetter
from typing import Any

import msgspec

from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.claim_result import PAYLOAD, rare, taken, usual
from flowfabric.stores.claims import Stamp, Take
from flowfabric.stores.codec import CODEC, LineAt, LineOf, encode
from flowfabric.stores.port import Unstorable
from flowfabric.stores.postgres.commit.fragments import POINTER
from flowfabric.stores.postgres.commit.parameters import joined, list_words
from flowfabric.stores.postgres.sql import column_type, pieces, quoted

# The parameters of `given`, but for what becomes of all rows.
TAKER = ("lease_ids", "attempt_ids", "revisions", "worker_id", "worker_instance_id", "lease_ttl_ms")


def part(name: str) -> str:
    """A part of a statement, without the lines that say what it is for."""
    return "\n".join(dropwhile(lambda line: line.startswith("--"), pieces("take.sql")[name].splitlines()))


PAYLOADS = part("payloads")


def claimed(becomes: tuple[str, ...]) -> dict[str, str]:
    """What the words for claimed rows have in common."""
    columns = CODEC[Execution].column
    return {
        "claimed": part("claimed").format(
            becomes="".join(f'"{name}" = :value_{name}::{column_type(columns[name])}, ' for name in becomes),
            pointer=POINTER.format(row="e"),
        ),
        "heard": part("heard").format(rare=quoted(rare(becomes), "e."), columns=quoted(usual(becomes), "e.")),
        "lease_ids": list_words("text", ":lease_ids"),
        "attempt_ids": list_words("text", ":attempt_ids"),
        "revisions": list_words("bigint", ":revisions"),
    }


def told(becomes: tuple[str, ...]) -> str:
    """The columns in which an answer tells of claimed rows `t`."""
    return ", ".join(("t.place, t.rare", quoted(usual(becomes), "t."), quoted(PAYLOAD, "p.")))


def rows_told(
    answer: list[Any], before: int, take: Take, stamps: Sequence[Stamp], line_at: LineAt
) -> list[tuple[Execution, Payload]]:
    """The rows of an answer that begins with the time and has so many columns before those that tell of rows."""
    if answer[0][before] is None:
        return []
    answer.sort(key=itemgetter(before))
    now = answer[0][0]
    places, listed, *columns = list(zip(*answer, strict=True))[before:]
    rarities = [one and msgspec.json.decode(one) for one in listed]
    return taken(take, [stamps[place - 1] for place in places], now, rarities, columns, line_at)


def given(take: Take, stamps: Sequence[Stamp], line_of: LineOf) -> tuple[Any, ...]:
    """The stamps and the taker as the statements get them."""
    return (
        _text([stamp.lease_id for stamp in stamps]),
        _text([stamp.attempt_id for stamp in stamps]),
        " ".join([str(stamp.revision) for stamp in stamps]),
        take.worker_id,
        take.worker_instance_id,
        take.lease_ttl_ms,
        *(encode(value, line_of) for value in take.becomes.values()),
    )


def _text(names: list[str]) -> str:
    """The names as one text."""
    text = joined(names)
    if text is None:
        raise Unstorable("a stamp that the server could not tell from others")
    return text
