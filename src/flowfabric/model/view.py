"""Views: structs with most of the fields of another one, such as what readers see of a row, or the row of a request."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

import msgspec

V = TypeVar("V", bound=msgspec.Struct)


def view_of(kind: type[V], source: msgspec.Struct, /, **fields: Any) -> V:
    """Return a view: these fields as they are given, and the others as the fields of the same name in the source."""
    shared = {name: getattr(source, name) for name in _shared_names(kind, type(source))}
    return kind(**(shared | fields))


@lru_cache
def _shared_names(kind: type[msgspec.Struct], source: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name in source.__struct_fields__)
