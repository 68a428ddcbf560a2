"""Tags: labels on an execution. A key is a lowercase namespace, a dot and a field; a value is any text.

Keys of the namespace `ff` are reserved, because approvers see and trust their values. Only the engine, the server and
the lease holder set them. Every event of an execution carries its tags, so their size is limited. Reserved tags have a
limit of their own, so that nobody can fill up the tags of an execution and keep it from asking its question.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from flowfabric import errors
from flowfabric.errors import InvalidInput, InvalidTagKey
from flowfabric.model.change import Change, LeaseCheck, Patch, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import schema_limits
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence

INSTANCE_TAG: Final = "cairn.instance_id"
"""A tag by which subscribers filter events."""

TRACE_TAG: Final = "ff.traceparent"
"""The trace context of the submit; the only reserved tag that a create may carry, set by the server."""

MAX_TAG_BYTES: Final = 128 * 1024

_RESERVED: Final = "ff."
_KEY = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_][a-z0-9_.]*").fullmatch


def is_tag_key(key: str) -> bool:
    """True if a key has the form `namespace.field`; the field may contain dots."""
    return _KEY(key) is not None


def check_tag_key(key: str) -> InvalidInput | None:
    """Return what is wrong with the key of a single set or get."""
    if not is_tag_key(key):
        return InvalidInput(f"invalid tag key: {key}")
    return None


def check_not_reserved(key: str) -> InvalidTagKey | None:
    """Refuse a key that only the engine, the server and the lease holder may set."""
    return _reserved_key_error(key) if is_reserved(key) else None


def is_reserved(key: str) -> bool:
    """True if a key belongs to the namespace `ff`."""
    return key.startswith(_RESERVED)


def check_not_empty(tags: Mapping[str, str]) -> InvalidInput | None:
    """Refuse a batch without tags."""
    return None if tags else InvalidInput("tags: empty")


def check_tags(tags: Mapping[str, str], *, allow_reserved: bool = False) -> InvalidTagKey | InvalidInput | None:
    """Return the first problem of a batch: a bad key, a value that is not valid Unicode, a schema that is too large.

    `allow_reserved` accepts reserved keys, for the lease holder.
    """
    for key, value in tags.items():
        if not is_tag_key(key):
            return InvalidTagKey(key)
        if not allow_reserved and is_reserved(key):
            return _reserved_key_error(key)
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            return InvalidInput(f"tags: value of {key} is not valid Unicode")
        if key.startswith(schema_limits.SCHEMA_TAG_PREFIX) and (invalid := schema_limits.check_schema(value)):
            return InvalidInput(f"tags: {key}: {invalid.detail}")
    return None


def check_created_tags(tags: Mapping[str, str]) -> InvalidTagKey | InvalidInput | None:
    """Return what is wrong with the tags of a create. The server sets the trace tag; callers cannot."""
    checked = {key: value for key, value in tags.items() if key != TRACE_TAG} if TRACE_TAG in tags else tags
    return check_tags(checked) or check_tags_size(tags)


def check_tags_size(tags: Mapping[str, str]) -> InvalidInput | None:
    """Refuse the tags of an execution or flow if keys and values have too many bytes together."""
    sizes = {False: 0, True: 0}
    for key, value in tags.items():
        sizes[is_reserved(key)] += len(key) + (len(value) if value.isascii() else len(value.encode()))
    largest = max(sizes.values())
    return None if largest <= MAX_TAG_BYTES else InvalidInput(f"tags: {largest} bytes, the limit is {MAX_TAG_BYTES}")


def _reserved_key_error(key: str) -> InvalidTagKey:
    return InvalidTagKey(f"{key}: keys that begin with {_RESERVED} are reserved")


def set_tags(row: Execution | None, tags: Mapping[str, str], held: LeaseCheck | None = None) -> Decision[int]:
    """Upsert tags, which later events carry. With `held`, that lease must be live when the tags are written."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    merged = decode_tags(row.tags) | dict(tags)
    if too_large := check_tags_size(merged):
        return refuse(too_large)
    fields = {"tags": encode_tags(merged), "last_mutation_at": NOW}
    change = Change(guards=(seen(row, held),), writes=(Patch(Execution, (row.execution_id,), fields),))
    return Decision(len(tags), change)


def decode_tags(text: str | None) -> dict[str, str]:
    """Decode stored tags, in key order. Raises `Corruption` if the text is not valid."""
    try:
        return {} if text is None else msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as fault:
        raise errors.Corruption(f"exec_core: tags: {fault}") from fault


def encode_tags(tags: Mapping[str, str]) -> str | None:
    """Encode tags as stored text, in key order; None for no tags."""
    return msgspec.json.encode(dict(sorted(tags.items()))).decode() if tags else None


def stored_fragment(key: str, value: str) -> str:
    """Return the text that stored tags contain if and only if they have this tag.

    A key holds no character that JSON escapes, and within a value a quote is escaped: so the text occurs nowhere else.
    """
    return msgspec.json.encode({key: value}).decode()[1:-1]


def set_tags_as_holder(row: Execution | None, fence: Fence, pairs: Mapping[str, str], now: int) -> Decision[int]:
    """Upsert tags, reserved ones included, for the holder of the current lease."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_lease(row, fence, now):
        return refused
    if invalid := check_tags(pairs, allow_reserved=True):
        return refuse(invalid)
    return set_tags(row, pairs, live(row))
