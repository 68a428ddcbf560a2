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

from flowfabric.model.change import RowTemplate
from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.claim_result import PAYLOAD_COLUMNS, claim_columns, decode_claimed_rows
from flowfabric.stores.claims import ROW_PARAMETERS, SHARED_PARAMETERS, ClaimRequest, LeaseIds
from flowfabric.stores.codec import QueueDecoder
from flowfabric.stores.postgres.commit.fragments import (
    APPEND_POINTER_SQL,
    columns_read,
    template_event_sql,
    value_sql,
)
from flowfabric.stores.postgres.commit.parameters import array_from_text, join_texts
from flowfabric.stores.postgres.sql import column_list, load_statements
from flowfabric.stores.verdicts import Unstorable

# The parameters of `claim_arguments`.
CLAIM_PARAMETERS = ("lease_ids", "attempt_ids", "revisions", *SHARED_PARAMETERS)
_PARAMETERS_SQL = {name: f"s.{name}" for name in ROW_PARAMETERS} | {
    "worker_id": ":worker_id::text",
    "worker_instance_id": ":worker_instance_id::text",
    "lease_ttl_ms": ":lease_ttl_ms::bigint",
}


def fragment(name: str) -> str:
    """Return a fragment of claim.sql without its leading comment."""
    return "\n".join(dropwhile(lambda line: line.startswith("--"), load_statements("claim.sql")[name].splitlines()))


JOIN_PAYLOADS = fragment("join_payloads")


def claim_fragments(template: RowTemplate) -> dict[str, str]:
    """Return the fragments that every claiming statement contains, by placeholder."""
    columns = claim_columns(template)
    returned = dict.fromkeys([*columns.dense, *columns_read(template.event.values())])
    fields = {name: value_sql(value, "e", "c.now", _PARAMETERS_SQL) for name, value in template.fields.items()}
    return {
        "claim_set": fragment("claim_set").format(
            fields=",\n           ".join(f'"{name}" = {value}' for name, value in fields.items()),
            pointer=APPEND_POINTER_SQL.format(row="e"),
        ),
        "returning": fragment("claim_returning").format(
            sparse=column_list(columns.sparse, "e."), columns=column_list(returned, "e.")
        ),
        "claim_events": fragment("claim_events").format(event=template_event_sql(template, "t")),
        "lease_ids": array_from_text("text", ":lease_ids"),
        "attempt_ids": array_from_text("text", ":attempt_ids"),
        "revisions": array_from_text("bigint", ":revisions"),
    }


def result_columns(template: RowTemplate) -> str:
    """Return the columns of claimed rows `t` and their payloads `p`."""
    dense = column_list(claim_columns(template).dense, "t.")
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


def claim_arguments(request: ClaimRequest, lease_ids: Sequence[LeaseIds]) -> tuple[Any, ...]:
    """Return the arguments for `CLAIM_PARAMETERS`."""
    return (
        _joined([ids.lease_id for ids in lease_ids]),
        _joined([ids.attempt_id for ids in lease_ids]),
        " ".join([str(ids.revision) for ids in lease_ids]),
        *request.parameters.values(),
    )


def _joined(ids: list[str]) -> str:
    text = join_texts(ids)
    if text is None:
        raise Unstorable("a lease or attempt id contains a separator character")
    return text
