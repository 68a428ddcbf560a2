"""The library of server functions: the Lua files of this folder with the catalog before them.

The library and its functions carry a hash of the whole text. So two releases run side by side, each with its own
functions, and a correction of the Lua code alone is a new library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.valkey.rows.codec import VALKEY_TABLES, ValkeyTable

PREFIX = "ff_"  # begins the names of all our libraries

_FILES = ("numbers", "rows", "templates", "packed", "alike", "commit", "claim", "reads", "feed")
_WRITERS = {"commit": "commit", "claim": "claim", "renew": "renew", "number": "number", "rewind": "rewind"}
_READERS = {
    "load": "load",
    "due": "due",
    "range": "range",
    "values": "values",
    "kinds": "kinds",
    "count": "count",
    "heads": "queue_heads",
    "history": "history",
    "tail": "tail",
}
_WITH_HISTORY = {"ff_exec_core", "ff_flow_core"}
_NAMED_PLACES = ("attempt_id", "lease_id", "lease_epoch", "lease_expires_at", "granted_until")


class Library(msgspec.Struct, frozen=True):
    """The text of a library, its name, and the names of its functions."""

    name: str
    text: str
    functions: Mapping[str, str]


@cache
def library() -> Library:
    """Return the library of this release."""
    folder = Path(__file__).with_name("lua")
    return make_library("\n".join(folder.joinpath(f"{name}.lua").read_text() for name in _FILES))


def make_library(body: str) -> Library:
    """Return the library with this code behind the catalog."""
    text = "\n".join([_catalog(), body])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    functions = {name: f"{PREFIX}{digest}_{name}" for name in (*_WRITERS, *_READERS)}
    registered = [f"redis.register_function('{functions[name]}', {lua})" for name, lua in _WRITERS.items()]
    registered += [
        f"redis.register_function{{ function_name = '{functions[name]}', callback = {lua}, flags = {{ 'no-writes' }} }}"
        for name, lua in _READERS.items()
    ]
    return Library(PREFIX + digest, "\n".join([f"#!lua name={PREFIX}{digest}", text, *registered, ""]), functions)


def _catalog() -> str:
    tables = ",\n".join(f"  {_lua(_table(table))}" for table in VALKEY_TABLES.values())
    numbers = f"local EXECUTIONS, PAYLOADS = {VALKEY_TABLES[Execution].number}, {VALKEY_TABLES[Payload].number}"
    return f"{numbers}\nlocal TABLES = {{\n{tables}\n}}\n"


def _table(table: ValkeyTable) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": table.name,
        "width": table.width,
        "listed": table.is_listed,
        "history": table.table.name in _WITH_HISTORY,
        "revision": table.revision_place,
        "bytes": table.bytes_place,
        "indexes": [
            {
                "name": index.suffix,
                "place": index.place,
                "parts": index.key_parts or None,
                "score": index.is_score,
                "rank": index.rank_place,
            }
            for index in table.indexes.values()
        ],
    }
    if table.table.row is Execution:
        described |= {name: table.place[name] for name in _NAMED_PLACES}
    if table.table.row is Payload:
        described["execution_kind"] = table.place["execution_kind"]
    return described


def _lua(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_lua(one)}" for name, one in value.items() if one is not None) + " }"
    if isinstance(value, list):
        return "{ " + ", ".join(map(_lua, value)) + " }" if value else "{}"
    return json.dumps(value).replace('"', "'")
