"""Vote schemas: an execution stores in a tag what its approval expects, and every vote is checked against it.

A vote that the function cannot decode would fail the run, so a vote of another type is refused, no matter how it was
sent. Waitpoints of suspensions have no schema and accept any signal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flowfabric import ids, json_limits
from flowfabric.errors import Corruption, FabricError, InvalidInput
from flowfabric.model.execution import Execution
from flowfabric.model.suspension import Waitpoint
from flowfabric.rules.durable import schema_limits
from flowfabric.rules.durable.json_schema import find_payload_violation
from flowfabric.rules.execution import tags as tag_rules


def schema_tag(name: str) -> str:
    """Return the tag under which an execution stores the JSON schema of an approval."""
    return f"{schema_limits.SCHEMA_TAG_PREFIX}{ids.digest8(name)}"


def approval_name(waitpoint_key: str) -> str:
    """Return the name of the approval that a waitpoint belongs to."""
    return waitpoint_key.rpartition(".")[0] or waitpoint_key


def vote_schema(tags: Mapping[str, str], waitpoint_key: str) -> dict[str, Any] | None:
    """Return the schema that an execution stored for a waitpoint; None if there is none."""
    text = tags.get(schema_tag(approval_name(waitpoint_key)))
    try:
        schema = None if text is None else json_limits.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return schema if isinstance(schema, dict) else None


def check_vote(row: Execution, waitpoint: Waitpoint, payload: bytes | None) -> FabricError | None:
    """Return why this value is not acceptable to the function that asked; None if it is."""
    if waitpoint.gate is None:
        return None
    try:
        schema = vote_schema(tag_rules.decode_tags(row.tags), waitpoint.waitpoint_key)
    except Corruption:
        schema = None
    if schema is None:
        return None
    violation = find_payload_violation(payload, schema)
    return None if violation is None else InvalidInput(violation)
