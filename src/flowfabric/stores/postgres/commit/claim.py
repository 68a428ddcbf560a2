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

from flowfabric.model.change import Change, Copies, Insert, Patch, Put
from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.claim_result import replaced
from flowfabric.stores.claims import Take
from flowfabric.stores.codec import LineOf
from flowfabric.stores.postgres.claim_result import TAKER, claimed, given, part
from flowfabric.stores.postgres.commit.fragments import Patched
from flowfabric.stores.postgres.commit.parameters import joined, list_words
from flowfabric.stores.postgres.sql import Parameters

UNLESS_HANDED = " and not (select so from lone)"  # added to the writes that would put the rows into their line


class Hand(NamedTuple):
    """The part of a statement that hands over."""

    becomes: tuple[str, ...]
    held_back: int  # which of the writes would put the rows into their line

    def words(self, parameters: Parameters) -> str:
        """Table expressions; `handed` has the rows."""
        words = part("hand").format(
            execution_ids=list_words("text", ":execution_ids"),
            numbers=list_words("int", ":numbers"),
            acquired=part("acquired").format(rows="handed"),
            **claimed(self.becomes),
        )
        names = ["lines", "execution_ids", "numbers", *TAKER, *(f"value_{name}" for name in self.becomes)]
        return parameters.named(words, names)


def handing(
    changes: Sequence[Change], writes: Sequence[tuple[Any, list[Any]]], take: Take, lines: list[int], line_of: LineOf
) -> tuple[Hand, list[Any]] | None:
    """How these changes hand over what they put into the lines of a take, if they can; `writes` are their pieces."""
    becomes = tuple(take.becomes)
    freed: list[tuple[int, str]] = []
    shapes: set[tuple[str, ...]] = set()
    for no, change in enumerate(changes, start=1):
        for write in change.writes:
            if type(write) is Patch:
                if write.row is Execution and "line" in write.fields:
                    if write.fields["line"] not in take.lines or write.unless is not None:
                        return None
                    freed.append((no, write.key[0]))
                    shapes.add(tuple(write.fields))
            elif (isinstance(write, Insert | Put | Copies) and getattr(write.row, "line", None) is not None) or (
                type(write) is Put and type(write.row) is Payload
            ):
                return None
    if not freed or len(freed) > len(take.stamps) or len(shapes) > 1:
        return None
    (names,) = shapes
    if not replaced(becomes).issuperset(names):
        return None
    pieces = [
        place
        for place, (piece, _) in enumerate(writes)
        if type(piece) is Patched and piece.row is Execution and piece.columns == (*names, "revision")
    ]
    numbers, ids = zip(*freed, strict=True)
    text = joined(ids)
    if len(pieces) != 1 or text is None:
        return None
    stamps = take.stamps[: len(freed)]
    values = [lines, text, " ".join(map(str, numbers)), *given(take, stamps, line_of)]
    return Hand(becomes, pieces[0]), values
