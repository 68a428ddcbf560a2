"""Tags: labels on an execution. A key is a lowercase namespace, a dot and a field; a value is any text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from flowfabric.errors import InvalidInput, InvalidTagKey
from flowfabric.rules import schemas

INSTANCE_TAG: Final = "cairn.instance_id"
"""The tag that travels with an execution's events, for filters."""

_KEY = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_][a-z0-9_.]*").fullmatch


def is_tag_key(key: str) -> bool:
    """Whether a key has the form `namespace.field`; the field may hold more dots."""
    return _KEY(key) is not None


def check_tag_key(key: str) -> InvalidInput | None:
    """What is wrong with the key of a single set or get; looked at before the store is."""
    return None if is_tag_key(key) else InvalidInput(f"invalid tag key: {key}")


def check_not_empty(tags: Mapping[str, str]) -> InvalidInput | None:
    """A batch without tags is refused before the store is asked."""
    return None if tags else InvalidInput("tags: empty")


def check_tags(tags: Mapping[str, str]) -> InvalidTagKey | InvalidInput | None:
    """What is wrong with the tags of a batch or a create: a bad key, a value that is no text, too large a schema."""
    for key, value in tags.items():
        if not is_tag_key(key):
            return InvalidTagKey(key)
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            return InvalidInput(f"tags: value of {key} is not valid Unicode")
        if key.startswith(schemas.ASK) and (odd := schemas.check_schema(value)):
            return InvalidInput(f"tags: {key}: {odd.detail}")
    return None
