"""sibling_cancel: split from flowfabric.rules.cancel."""

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

# Born with another one: what is known of both by the birth of one. Who waits for it is known from its edge.
CREATION_COLUMNS = ("lane_id", "flow_id", "created_at", "terms")
EXPECTED_AS_CREATED = Expected(UNSTARTED_FIELDS, per_row=(*CREATION_COLUMNS, "successors"))
_born = attrgetter(*CREATION_COLUMNS)


def cancel_without_load(
    edges: Iterable[Dependency], inbound: int, other: Execution, reason: str
) -> list[tuple[Change, Execution]]:
    """What `cancel` says of the upstreams of these edges if they are as they were born, with `other`; stores prove it.

    Each comes with the row of which that is said, where `Own` stands for what is not known. None come when they would
    need a look. `inbound` counts the edges that lead to the downstream.

    One thing is left out: the ends are not noted on the edges. The downstream's group has fired and is in no hurry to
    know of them; whoever cancels them counts them together, and their purge notes what nobody has counted.
    """
    if reason not in SIBLING_REASONS or decode_terms(other.terms).quota_policy_ids:
        return []
    kept_ms, born = transitions.retention_ms(other), _born(other)
    form = sibling_template(kept_ms, reason, other.flow_id is not None)
    model = msgspec.structs.replace(_unseen_sibling(kept_ms), **dict(zip(CREATION_COLUMNS, born, strict=True)))
    found = []
    for edge in edges:
        name, waits = edge.upstream_execution_id, successors.encode_only_successor(edge, inbound)
        row = msgspec.structs.replace(model, execution_id=name, successors=waits)
        guard = expect(Execution, EXPECTED_AS_CREATED, name, expected_values=(*born, waits))
        found.append((Change((guard,), template=form), row))
    return found


@lru_cache(maxsize=256)
def _unseen_sibling(kept_ms: int) -> Execution:
    return transitions.template_row(UNSTARTED_FIELDS, kept_ms, is_member=True)
