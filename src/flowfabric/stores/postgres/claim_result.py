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
from flowfabric.stores.claim_result import PAYLOAD_COLUMNS, decode_claimed_rows, dense_columns, sparse_columns
from flowfabric.stores.claims import ClaimRequest, LeaseIds
from flowfabric.stores.codec import CODEC, QueueDecoder, QueueEncoder, encode
from flowfabric.stores.port import Unstorable
from flowfabric.stores.postgres.commit.fragments import APPEND_POINTER_SQL
from flowfabric.stores.postgres.commit.parameters import array_from_text, join_texts
from flowfabric.stores.postgres.sql import column_list, column_type, load_statements

# The parameters of `given`, but for what becomes of all rows.
CLAIM_PARAMETERS = ("lease_ids", "attempt_ids", "revisions", "worker_id", "worker_instance_id", "lease_ttl_ms")


def fragment(name: str) -> str:
    """A part of a statement, without the lines that say what it is for."""
    return "\n".join(dropwhile(lambda line: line.startswith("--"), load_statements("claim.sql")[name].splitlines()))


JOIN_PAYLOADS = fragment("payloads")


def claim_fragments(becomes: tuple[str, ...]) -> dict[str, str]:
    """What the words for claimed rows have in common."""
    columns = CODEC[Execution].column
    return {
        "claimed": fragment("claimed").format(
            becomes="".join(f'"{name}" = :value_{name}::{column_type(columns[name])}, ' for name in becomes),
            pointer=APPEND_POINTER_SQL.format(row="e"),
        ),
        "heard": fragment("heard").format(
            rare=column_list(sparse_columns(becomes), "e."), columns=column_list(dense_columns(becomes), "e.")
        ),
        "lease_ids": array_from_text("text", ":lease_ids"),
        "attempt_ids": array_from_text("text", ":attempt_ids"),
        "revisions": array_from_text("bigint", ":revisions"),
    }


def result_columns(becomes: tuple[str, ...]) -> str:
    """The columns in which an answer tells of claimed rows `t`."""
    return ", ".join(("t.place, t.rare", column_list(dense_columns(becomes), "t."), column_list(PAYLOAD_COLUMNS, "p.")))


def decode_claim_result(
    answer: list[Any], before: int, take: ClaimRequest, stamps: Sequence[LeaseIds], line_at: QueueDecoder
) -> list[tuple[Execution, Payload]]:
    """The rows of an answer that begins with the time and has so many columns before those that tell of rows."""
    if answer[0][before] is None:
        return []
    answer.sort(key=itemgetter(before))
    now = answer[0][0]
    places, listed, *columns = list(zip(*answer, strict=True))[before:]
    rarities = [one and msgspec.json.decode(one) for one in listed]
    return decode_claimed_rows(take, [stamps[place - 1] for place in places], now, rarities, columns, line_at)


def claim_arguments(take: ClaimRequest, stamps: Sequence[LeaseIds], line_of: QueueEncoder) -> tuple[Any, ...]:
    """The stamps and the taker as the statements get them."""
    return (
        _text([stamp.lease_id for stamp in stamps]),
        _text([stamp.attempt_id for stamp in stamps]),
        " ".join([str(stamp.revision) for stamp in stamps]),
        take.worker_id,
        take.worker_instance_id,
        take.lease_ttl_ms,
        *(encode(value, line_of) for value in take.shared_fields.values()),
    )


def _text(names: list[str]) -> str:
    """The names as one text."""
    text = join_texts(names)
    if text is None:
        raise Unstorable("a stamp that the server could not tell from others")
    return text
