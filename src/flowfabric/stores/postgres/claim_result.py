"""SQL fragments that claim rows and return them, and the decoder of the returned rows.

A claim (claim.py) finds its rows in queues. A commit-and-claim (commit/claim.py) knows its rows by id. Both share the
fragments and the decoder of this page.
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

# The parameters of `claim_arguments` without the shared fields.
CLAIM_PARAMETERS = ("lease_ids", "attempt_ids", "revisions", "worker_id", "worker_instance_id", "lease_ttl_ms")


def fragment(name: str) -> str:
    """Return a fragment of claim.sql without its leading comment."""
    return "\n".join(dropwhile(lambda line: line.startswith("--"), load_statements("claim.sql")[name].splitlines()))


JOIN_PAYLOADS = fragment("join_payloads")


def claim_fragments(shared_fields: tuple[str, ...]) -> dict[str, str]:
    """Return the fragments that every claiming statement contains, by placeholder."""
    columns = CODEC[Execution].column
    return {
        "claim_set": fragment("claim_set").format(
            shared_fields="".join(
                f'"{name}" = :value_{name}::{column_type(columns[name])}, ' for name in shared_fields
            ),
            pointer=APPEND_POINTER_SQL.format(row="e"),
        ),
        "returning": fragment("claim_returning").format(
            sparse=column_list(sparse_columns(shared_fields), "e."),
            columns=column_list(dense_columns(shared_fields), "e."),
        ),
        "lease_ids": array_from_text("text", ":lease_ids"),
        "attempt_ids": array_from_text("text", ":attempt_ids"),
        "revisions": array_from_text("bigint", ":revisions"),
    }


def result_columns(shared_fields: tuple[str, ...]) -> str:
    """Return the columns of claimed rows `t` and their payloads `p`."""
    dense = column_list(dense_columns(shared_fields), "t.")
    return f"t.ordinal, t.sparse, {dense}, {column_list(PAYLOAD_COLUMNS, 'p.')}"


def decode_claim_result(
    result: list[Any],
    first_column: int,
    request: ClaimRequest,
    lease_ids: Sequence[LeaseIds],
    decode_queue: QueueDecoder,
) -> list[tuple[Execution, Payload]]:
    """Decode a result that has the time in its first column and the claimed rows from `first_column` on."""
    if result[0][first_column] is None:
        return []
    result.sort(key=itemgetter(first_column))
    now = result[0][0]
    ordinals, sparse_lists, *columns = list(zip(*result, strict=True))[first_column:]
    sparse = [values and msgspec.json.decode(values) for values in sparse_lists]
    ids = [lease_ids[ordinal - 1] for ordinal in ordinals]
    return decode_claimed_rows(request, ids, now, sparse, columns, decode_queue)


def claim_arguments(
    request: ClaimRequest, lease_ids: Sequence[LeaseIds], encode_queue: QueueEncoder
) -> tuple[Any, ...]:
    """Return the arguments for `CLAIM_PARAMETERS` and the shared fields."""
    return (
        _joined([ids.lease_id for ids in lease_ids]),
        _joined([ids.attempt_id for ids in lease_ids]),
        " ".join([str(ids.revision) for ids in lease_ids]),
        request.worker_id,
        request.worker_instance_id,
        request.lease_ttl_ms,
        *(encode(value, encode_queue) for value in request.shared_fields.values()),
    )


def _joined(ids: list[str]) -> str:
    text = join_texts(ids)
    if text is None:
        raise Unstorable("a lease or attempt id contains a separator character")
    return text
