"""Tags: labels on an execution. A key is a lowercase namespace, a dot and a field; a value is any text.

Keys of the namespace `ff` are reserved: approvers see and trust what stands there. The engine, the server and the
holder of the lease set them, nobody else. All tags of an execution travel with its events, so their bytes are bounded;
reserved tags have a bound of their own, so that whoever labels an execution cannot keep it from asking its question.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from flowfabric import errors
from flowfabric.errors import InvalidInput, InvalidTagKey
from flowfabric.model.change import NOW, Change, LeaseCheck, Patch, seen
from flowfabric.model.execution import Execution
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import schema_limits

INSTANCE_TAG: Final = "cairn.instance_id"
"""The tag that travels with an execution's events, for filters."""

TRACE_TAG: Final = "ff.traceparent"
"""Where an execution was submitted; the one reserved tag that a create may carry, for the server."""

MAX_TAG_BYTES: Final = 128 * 1024

_RESERVED: Final = "ff."
_KEY = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_][a-z0-9_.]*").fullmatch


def is_tag_key(key: str) -> bool:
    """Whether a key has the form `namespace.field`; the field may hold more dots."""
    return _KEY(key) is not None


def check_tag_key(key: str) -> InvalidInput | None:
    """What is wrong with the key of a single set or get; looked at before the store is."""
    if not is_tag_key(key):
        return InvalidInput(f"invalid tag key: {key}")
    return None


def check_not_reserved(key: str) -> InvalidTagKey | None:
    """Refuse a key that only the engine, the server and the lease holder may set."""
    return _reserved(key) if is_reserved(key) else None


def is_reserved(key: str) -> bool:
    """Whether a key is of the namespace `ff`."""
    return key.startswith(_RESERVED)


def check_not_empty(tags: Mapping[str, str]) -> InvalidInput | None:
    """A batch without tags is refused before the store is asked."""
    return None if tags else InvalidInput("tags: empty")


def check_tags(tags: Mapping[str, str], *, allow_reserved: bool = False) -> InvalidTagKey | InvalidInput | None:
    """What is wrong with the tags of a batch: a bad key, a value that is no text, too large a schema.

    `reserved` lets reserved keys pass, for the holder of the lease.
    """
    for key, value in tags.items():
        if not is_tag_key(key):
            return InvalidTagKey(key)
        if not allow_reserved and is_reserved(key):
            return _reserved(key)
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            return InvalidInput(f"tags: value of {key} is not valid Unicode")
        if key.startswith(schema_limits.SCHEMA_TAG_PREFIX) and (odd := schema_limits.check_schema(value)):
            return InvalidInput(f"tags: {key}: {odd.detail}")
    return None


def check_created_tags(tags: Mapping[str, str]) -> InvalidTagKey | InvalidInput | None:
    """What is wrong with the tags of a create; the trace is the server's, which lets no caller set it."""
    given = {key: value for key, value in tags.items() if key != TRACE_TAG} if TRACE_TAG in tags else tags
    return check_tags(given) or check_tags_size(tags)


def check_tags_size(tags: Mapping[str, str]) -> InvalidInput | None:
    """Refuse the tags of an execution or a flow when they are too large, counted in bytes of keys and values."""
    sizes = {False: 0, True: 0}
    for key, value in tags.items():
        sizes[is_reserved(key)] += len(key) + (len(value) if value.isascii() else len(value.encode()))
    largest = max(sizes.values())
    return None if largest <= MAX_TAG_BYTES else InvalidInput(f"tags: {largest} bytes, the limit is {MAX_TAG_BYTES}")


def _reserved(key: str) -> InvalidTagKey:
    return InvalidTagKey(f"{key}: keys that begin with {_RESERVED} are reserved")


def set_tags(row: Execution | None, tags: Mapping[str, str], held: LeaseCheck | None = None) -> Decision[int]:
    """Upsert tags; events from now on carry them. `held` is a lease that has to run when they are written."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    merged = decode_tags(row.tags) | dict(tags)
    if too_large := check_tags_size(merged):
        return refuse(too_large)
    fields = {"tags": encode_tags(merged), "last_mutation_at": NOW}
    change = Change(guards=(seen(row, held),), writes=(Patch(Execution, (row.execution_id,), fields),))
    return Decision(len(tags), change)


def decode_tags(text: str | None) -> dict[str, str]:
    """Tags as a mapping, in key order; `Corruption` when what is kept are none."""
    try:
        return {} if text is None else msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as fault:
        raise errors.Corruption(f"exec_core: tags: {fault}") from fault


def encode_tags(tags: Mapping[str, str]) -> str | None:
    """Tags as the text that the sheet and its events keep; no tags are no text."""
    return msgspec.json.encode(dict(sorted(tags.items()))).decode() if tags else None
