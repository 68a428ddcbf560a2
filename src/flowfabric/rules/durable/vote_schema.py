"""What an approval asks for: told by its execution in a tag, and looked at before a vote counts.

A vote that its run cannot read would be the end of that run, so one of another kind than was asked for is refused,
whichever way it came. Waitpoints of suspensions ask for nothing: any signal is good enough for them.
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
from flowfabric.rules.durable.json_schema import find_violation
from flowfabric.rules.execution import tags as tag_rules


def schema_tag(name: str) -> str:
    """The tag under which an execution keeps what its approval of this name wants to hear, as a JSON schema."""
    return f"{schema_limits.SCHEMA_TAG_PREFIX}{ids.digest8(name)}"


def approval_name(waitpoint_key: str) -> str:
    """The name of the approval that a waitpoint belongs to."""
    return waitpoint_key.rpartition(".")[0] or waitpoint_key


def vote_schema(tags: Mapping[str, str], waitpoint_key: str) -> dict[str, Any] | None:
    """What an execution wants to hear at a waitpoint, when it said so."""
    text = tags.get(schema_tag(approval_name(waitpoint_key)))
    try:
        schema = None if text is None else json_limits.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return schema if isinstance(schema, dict) else None


def check_vote(row: Execution, waitpoint: Waitpoint, payload: bytes | None) -> FabricError | None:
    """Why a vote of this value would be of no use to the function that asked; None when it can be read."""
    if waitpoint.gate is None:
        return None
    try:
        schema = vote_schema(tag_rules.decode_tags(row.tags), waitpoint.waitpoint_key)
    except Corruption:
        schema = None
    if schema is None:
        return None
    try:
        wrong = find_violation(json_limits.decode(payload or b"null"), schema)
    except json_limits.NumberTooLong as fault:
        wrong = f"value: {fault}"
    except msgspec.DecodeError:
        wrong = "value: not JSON"
    except RecursionError:
        wrong = "value: nested too deeply"
    return None if wrong is None else InvalidInput(wrong)
