"""Cancel siblings without loading them.

A fired join often cancels many siblings that never started. They were created together with a sibling whose row is
known, so their rows can be predicted. The change carries the prediction as a guard, and the store refuses it if the row
differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from operator import attrgetter

import msgspec

from flowfabric.model.change import Change, Expected, expect
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Dependency
from flowfabric.rules.execution import transitions
from flowfabric.rules.execution.cancel import SIBLING_REASONS, UNSTARTED_FIELDS, sibling_template
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.flow import successors

# Columns that siblings created together share. The successors of each follow from its edge.
CREATION_COLUMNS = ("lane_id", "flow_id", "created_at", "terms")
EXPECTED_AS_CREATED = Expected(UNSTARTED_FIELDS, per_row=(*CREATION_COLUMNS, "successors"))
_creation_values = attrgetter(*CREATION_COLUMNS)


def cancel_without_load(
    edges: Iterable[Dependency], inbound: int, other: Execution, reason: str
) -> list[tuple[Change, Execution]]:
    """Return what `cancel` decides for the upstreams of these edges if they are as they were created with `other`.

    Each change comes with the predicted row, in which `ColumnRef` stands for unknown columns. The list is empty if the
    siblings have to be loaded. `inbound` is the number of edges into the downstream.

    Outcomes are not recorded on the edges. The group has fired already; the canceller counts all siblings together, and
    their purge records what nobody has counted.
    """
    if reason not in SIBLING_REASONS or decode_terms(other.terms).quota_policy_ids:
        return []
    retention_ms, creation_values = transitions.retention_ms(other), _creation_values(other)
    template = sibling_template(retention_ms, reason, other.flow_id is not None)
    predicted = msgspec.structs.replace(
        _predicted_row(retention_ms), **dict(zip(CREATION_COLUMNS, creation_values, strict=True))
    )
    cancels = []
    for edge in edges:
        name, successor_text = edge.upstream_execution_id, successors.encode_only_successor(edge, inbound)
        row = msgspec.structs.replace(predicted, execution_id=name, successors=successor_text)
        guard = expect(Execution, EXPECTED_AS_CREATED, name, expected_values=(*creation_values, successor_text))
        cancels.append((Change((guard,), template=template), row))
    return cancels


@lru_cache(maxsize=256)
def _predicted_row(retention_ms: int) -> Execution:
    return transitions.template_row(UNSTARTED_FIELDS, retention_ms, is_member=True)
