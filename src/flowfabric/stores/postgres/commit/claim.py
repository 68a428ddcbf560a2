"""Commit-and-claim: a commit that claims the rows it would enqueue, in the same statement.

A worker that reports completions and wants more work saves a round trip, and each of these rows is written once instead
of twice. The result must equal a commit followed by a claim, so the commit claims only if that claim would return
exactly these rows first:

* The claim's queues are empty, and the batch enqueues nothing else.
* There are lease ids for all of these rows.
* The claim overwrites every column that the changes write to these rows.
* No payload is replaced: a statement does not see the payload that it writes itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flowfabric.model.change import BulkInsert, Change, Insert, Patch, RowTemplate, Upsert
from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.claim_result import claim_columns
from flowfabric.stores.claims import ClaimRequest
from flowfabric.stores.postgres.claim_result import CLAIM_PARAMETERS, claim_arguments, claim_fragments, fragment
from flowfabric.stores.postgres.commit.fragments import UpdateFragment
from flowfabric.stores.postgres.commit.parameters import array_from_text, join_texts
from flowfabric.stores.postgres.sql import ParameterNumbering

UNLESS_CLAIMED = " and not (select holds from queues_empty)"  # added to the writes that would enqueue the rows


class ClaimFragment(NamedTuple):
    """The CTEs of a commit that claim rows."""

    template: RowTemplate
    replaced_write: int  # the index of the write that would enqueue the rows

    def sql(self, parameters: ParameterNumbering) -> str:
        """Return CTEs; `claimed` has the rows and `claim_events` their events."""
        statement = fragment("claim_in_commit").format(
            execution_ids=array_from_text("text", ":execution_ids"),
            change_numbers=array_from_text("int", ":change_numbers"),
            **claim_fragments(self.template),
        )
        return parameters.bind_names(statement, ["queue_ids", "execution_ids", "change_numbers", *CLAIM_PARAMETERS])


def plan_claim(
    changes: Sequence[Change],
    writes: Sequence[tuple[Any, list[Any]]],
    request: ClaimRequest,
    queue_ids: list[int],
) -> tuple[ClaimFragment, list[Any]] | None:
    """Plan the claim of the rows that these changes enqueue; None if it could differ from a claim after the commit.

    `writes` are the fragments of the changes, with their arguments.
    """
    enqueued: list[tuple[int, str]] = []
    shapes: set[tuple[str, ...]] = set()
    for change_no, change in enumerate(changes, start=1):
        for write in change.writes:
            if type(write) is Patch:
                if write.row is Execution and "line" in write.fields:
                    if write.fields["line"] not in request.queues or write.unless_set is not None:
                        return None
                    enqueued.append((change_no, write.key[0]))
                    shapes.add(tuple(write.fields))
            elif (isinstance(write, Insert | Upsert | BulkInsert) and getattr(write.row, "line", None) is not None) or (
                type(write) is Upsert and type(write.row) is Payload
            ):
                return None
    if not enqueued or len(enqueued) > len(request.lease_ids) or len(shapes) > 1:
        return None
    (names,) = shapes
    if not claim_columns(request.template).overwritten >= set(names):
        return None
    updates = [
        index
        for index, (write, _) in enumerate(writes)
        if type(write) is UpdateFragment and write.row is Execution and write.columns == (*names, "revision")
    ]
    change_numbers, execution_ids = zip(*enqueued, strict=True)
    id_text = join_texts(execution_ids)
    if len(updates) != 1 or id_text is None:
        return None
    lease_ids = request.lease_ids[: len(enqueued)]
    claim = claim_arguments(request, lease_ids)
    return ClaimFragment(request.template, updates[0]), [queue_ids, id_text, " ".join(map(str, change_numbers)), *claim]
