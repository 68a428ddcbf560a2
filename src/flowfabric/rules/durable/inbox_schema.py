"""Inbox schemas: a run may declare which messages it takes, and every message to it is checked against that.

The declaration is part of the policy, `{"inbox": {"add": {…}, "close": {"type": "null"}}}`, and never changes. The row
says only that there is one, so that runs without one pay nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from flowfabric import json_limits
from flowfabric.errors import InvalidInput
from flowfabric.model.text import join_some
from flowfabric.rules.durable.json_schema import find_payload_violation

Inbox: TypeAlias = Mapping[str, Mapping[str, Any]]  # JSON schemas by the name of the message


class NeedsInbox(msgspec.Struct, frozen=True):
    """The rule has to see what the run declares to take before it can decide."""


def parse_inbox(policy: str | None) -> Inbox:
    """Return what a stored policy declares; empty if it declares nothing."""
    try:
        document = {} if policy is None else json_limits.decode(policy)
    except (msgspec.DecodeError, json_limits.NumberTooLong, RecursionError):
        return {}
    inbox = document.get("inbox") if isinstance(document, dict) else None
    return {name: schema for name, schema in (inbox or {}).items() if isinstance(schema, dict)}


def check_message(inbox: Inbox, mailbox: str, payload: bytes | None) -> InvalidInput | None:
    """Return why the run does not take this message; None if it does."""
    schema = inbox.get(mailbox)
    if schema is None:
        return InvalidInput(f"mailbox: the run takes no {mailbox!r}; its inbox has {join_some(sorted(inbox))}")
    violation = find_payload_violation(payload, schema)
    return None if violation is None else InvalidInput(f"{mailbox}: {violation}")
