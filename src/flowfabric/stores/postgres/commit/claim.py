"""Handing over: a commit that claims the rows which it would put into lines, in the same statement.

Who tells ends and wants work is spared a trip, and each of these rows its stand in line: one write instead of two. It
is the take that would follow, done at once, and only where that is sure to be the same: when the rows that the take
would find first are these. So nothing else may stand in its lines or be put there, there must be a stamp for each row,
and of what a change would write to a row nothing may outlast its claim. An input that becomes another one is not told
by the statement that writes it, so it is left to a take, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flowfabric.model.change import BulkInsert, Change, Insert, Patch, Upsert
from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.claim_result import overwritten_columns
from flowfabric.stores.claims import ClaimRequest
from flowfabric.stores.codec import QueueEncoder
from flowfabric.stores.postgres.claim_result import CLAIM_PARAMETERS, claim_arguments, claim_fragments, fragment
from flowfabric.stores.postgres.commit.fragments import UpdateFragment
from flowfabric.stores.postgres.commit.parameters import array_from_text, join_texts
from flowfabric.stores.postgres.sql import ParameterNumbering

UNLESS_CLAIMED = " and not (select so from lone)"  # added to the writes that would put the rows into their line


class ClaimFragment(NamedTuple):
    """The part of a statement that hands over."""

    shared_fields: tuple[str, ...]
    replaced_write: int  # which of the writes would put the rows into their line

    def sql(self, parameters: ParameterNumbering) -> str:
        """Table expressions; `handed` has the rows."""
        words = fragment("hand").format(
            execution_ids=array_from_text("text", ":execution_ids"),
            numbers=array_from_text("int", ":numbers"),
            acquired=fragment("acquired").format(rows="handed"),
            **claim_fragments(self.shared_fields),
        )
        names = [
            "lines",
            "execution_ids",
            "numbers",
            *CLAIM_PARAMETERS,
            *(f"value_{name}" for name in self.shared_fields),
        ]
        return parameters.bind_names(words, names)


def plan_claim(
    changes: Sequence[Change],
    writes: Sequence[tuple[Any, list[Any]]],
    take: ClaimRequest,
    lines: list[int],
    line_of: QueueEncoder,
) -> tuple[ClaimFragment, list[Any]] | None:
    """How these changes hand over what they put into the lines of a take, if they can; `writes` are their pieces."""
    becomes = tuple(take.shared_fields)
    freed: list[tuple[int, str]] = []
    shapes: set[tuple[str, ...]] = set()
    for no, change in enumerate(changes, start=1):
        for write in change.writes:
            if type(write) is Patch:
                if write.row is Execution and "line" in write.fields:
                    if write.fields["line"] not in take.queues or write.unless_set is not None:
                        return None
                    freed.append((no, write.key[0]))
                    shapes.add(tuple(write.fields))
            elif (isinstance(write, Insert | Upsert | BulkInsert) and getattr(write.row, "line", None) is not None) or (
                type(write) is Upsert and type(write.row) is Payload
            ):
                return None
    if not freed or len(freed) > len(take.lease_ids) or len(shapes) > 1:
        return None
    (names,) = shapes
    if not overwritten_columns(becomes).issuperset(names):
        return None
    pieces = [
        place
        for place, (piece, _) in enumerate(writes)
        if type(piece) is UpdateFragment and piece.row is Execution and piece.columns == (*names, "revision")
    ]
    numbers, ids = zip(*freed, strict=True)
    text = join_texts(ids)
    if len(pieces) != 1 or text is None:
        return None
    stamps = take.lease_ids[: len(freed)]
    values = [lines, text, " ".join(map(str, numbers)), *claim_arguments(take, stamps, line_of)]
    return ClaimFragment(becomes, pieces[0]), values
