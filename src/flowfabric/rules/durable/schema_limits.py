"""Limits of an approval schema: bytes, nodes, depth and expanded references.

Anyone who may set tags can write a schema, and the server reads it. So every schema is checked against these limits
when it is stored. A schema that an older release stored beyond them is still read, by readers that count their own
steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from flowfabric import json_limits
from flowfabric.errors import InvalidInput

SCHEMA_TAG_PREFIX: Final = "ff.ask."
"""The prefix of tags that store schemas."""

MAX_BYTES: Final = 32 * 1024
MAX_NODES: Final = 2000
MAX_DEPTH: Final = 32
MAX_EXPANDED: Final = 20_000
"""Entries of all nodes with every reference expanded; a reference to an enclosing node is not followed."""

Schema = Mapping[str, Any]


def check_schema(text: str) -> InvalidInput | None:
    """Return which limit the schema of a tag exceeds; a text that is not a schema is accepted and ignored."""
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
    for entries in _expanded_sizes(schema):
        expanded += entries
        if expanded > MAX_EXPANDED:
            return InvalidInput(f"schema: more than {MAX_EXPANDED} entries once its references are expanded")
    return None


def resolve_reference(schema: Schema, root: Schema) -> Schema:
    """Follow a chain of references to its schema; empty if it is undefined or cyclic."""
    definitions = root.get("$defs")
    known = definitions if isinstance(definitions, dict) else {}
    seen: set[str] = set()
    while "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        definition = known.get(name)
        if name in seen or not isinstance(definition, dict):
            return {}
        seen.add(name)
        schema = definition
    return schema


def _depths(schema: Any) -> Iterator[int]:
    """Yield the depth of every object and list."""
    stack = [(schema, 1)]
    while stack:
        node, depth = stack.pop()
        yield depth
        children = node.values() if isinstance(node, dict) else node
        stack += [(child, depth + 1) for child in children if isinstance(child, dict | list)]


def _expanded_sizes(schema: Schema) -> Iterator[int]:
    """Follow references and yield the number of entries of each node; a cycle is followed once."""
    stack: list[tuple[Any, frozenset[int]]] = [(schema, frozenset())]
    while stack:
        node, enclosing = stack.pop()
        yield 1 + len(node)
        if isinstance(node, dict) and "$ref" in node:
            target = resolve_reference(node, schema)
            if id(target) not in enclosing:
                stack.append((target, enclosing | {id(target)}))
            continue
        children = (child for key, child in node.items() if key != "$defs") if isinstance(node, dict) else node
        stack += [(child, enclosing) for child in children if isinstance(child, dict | list)]
