"""Bounds of an approval's schema, checked wherever one enters: its bytes, nodes, depth and expanded references.

A schema is written by whoever may set tags and read by the server, so its reader must not do more work than these
bounds allow. What an older release stored beyond them is still read, by readers that count their own steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from flowfabric import json_limits
from flowfabric.errors import InvalidInput

SCHEMA_TAG_PREFIX: Final = "ff.ask."
"""The beginning of the tags that keep schemas."""

MAX_BYTES: Final = 32 * 1024
MAX_NODES: Final = 2000
MAX_DEPTH: Final = 32
MAX_EXPANDED: Final = 20_000
"""Entries of all nodes with every reference replaced by what it names; one to a node around it is not followed."""

Schema = Mapping[str, Any]


def check_schema(text: str) -> InvalidInput | None:
    """What is out of bounds in the schema that a tag shall keep; a text that is no schema asks for nothing."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        return InvalidInput(f"schema: {size} bytes, the limit is {MAX_BYTES}")
    try:
        schema = json_limits.decode(text)
    except RecursionError:
        return InvalidInput(f"schema: nested deeper than {MAX_DEPTH}")
    except json_limits.NumberTooLong as fault:
        return InvalidInput(f"schema: {fault}")
    except msgspec.DecodeError:
        return None
    if not isinstance(schema, dict):
        return None
    for nodes, depth in enumerate(_depths(schema), start=1):
        if depth > MAX_DEPTH:
            return InvalidInput(f"schema: nested deeper than {MAX_DEPTH}")
        if nodes > MAX_NODES:
            return InvalidInput(f"schema: more than {MAX_NODES} nodes")
    expanded = 0
    for entries in _expanded(schema):
        expanded += entries
        if expanded > MAX_EXPANDED:
            return InvalidInput(f"schema: more than {MAX_EXPANDED} entries once its references are expanded")
    return None


def resolve_reference(schema: Schema, root: Schema) -> Schema:
    """The schema that a chain of references ends at; an empty one when it names nothing, or only itself."""
    definitions = root.get("$defs")
    known = definitions if isinstance(definitions, dict) else {}
    seen: set[str] = set()
    while "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        found = known.get(name)
        if name in seen or not isinstance(found, dict):
            return {}
        seen.add(name)
        schema = found
    return schema


def _depths(schema: Any) -> Iterator[int]:
    """The depth of every object and list."""
    waiting = [(schema, 1)]
    while waiting:
        node, depth = waiting.pop()
        yield depth
        below = node.values() if isinstance(node, dict) else node
        waiting += [(one, depth + 1) for one in below if isinstance(one, dict | list)]


def _expanded(schema: Schema) -> Iterator[int]:
    """How many entries each node has that is met when references are followed; a circle is followed once."""
    waiting: list[tuple[Any, frozenset[int]]] = [(schema, frozenset())]
    while waiting:
        node, around = waiting.pop()
        yield 1 + len(node)
        if isinstance(node, dict) and "$ref" in node:
            found = resolve_reference(node, schema)
            if id(found) not in around:
                waiting.append((found, around | {id(found)}))
            continue
        below = (one for key, one in node.items() if key != "$defs") if isinstance(node, dict) else node
        waiting += [(one, around) for one in below if isinstance(one, dict | list)]
