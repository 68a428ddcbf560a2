"""The engine elsewhere looks like the engine: same verbs, same signatures, same errors."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import flowfabric.sdk
from flowfabric import errors
from flowfabric.client import RemoteEngine
from flowfabric.engine.engine import Engine
from flowfabric.server import create_app
from flowfabric.settings import Secret
from flowfabric.stores.memory.store import MemoryStore

SDK = Path(flowfabric.sdk.__file__).parent
OF_STORES_ONLY = {"ensure_signing_key"}  # asked for when there is no server
OWN = {"connect"}
EXECUTION = "{fp:7}:550e8400-e29b-41d4-a716-446655440000"


def verbs() -> list[str]:
    """What both have."""
    return sorted(name for name in vars_of(RemoteEngine) if callable(getattr(Engine, name, None)))


def vars_of(kind: type) -> set[str]:
    return {name for base in kind.__mro__[:-1] for name in vars(base) if not name.startswith("_")}


@pytest.mark.parametrize("name", verbs())
def test_a_verb_has_the_engines_own_signature(name: str) -> None:
    here, there = (inspect.signature(getattr(kind, name)) for kind in (RemoteEngine, Engine))

    def shapes(given: inspect.Signature) -> list[tuple[str, Any, str]]:
        defaults = [repr(one.default).partition(" at 0x")[0] for one in given.parameters.values()]
        # A default that is a function is compared by having one.
        plain = ["<function>" if one.startswith("<function") else one for one in defaults]
        return [(one.name, one.kind, plain[place]) for place, one in enumerate(given.parameters.values())]

    assert shapes(here) == shapes(there)
    assert inspect.iscoroutinefunction(getattr(RemoteEngine, name)) == inspect.iscoroutinefunction(
        getattr(Engine, name)
    )


def test_it_has_nothing_of_its_own_that_applications_could_come_to_use() -> None:
    assert {name for name in vars_of(RemoteEngine) if inspect.isfunction(getattr(RemoteEngine, name))} - vars_of(
        Engine
    ) <= OWN


def test_it_has_everything_that_the_sdk_asks_of_an_engine() -> None:
    engine = RemoteEngine("http://nowhere")
    used = {name for page in SDK.glob("*.py") for name in asked_of_engines(ast.parse(page.read_text()))}

    assert {"create", "claim_from_lanes", "open_gate"} & used, "the search finds something"
    assert {name for name in used - OF_STORES_ONLY if not has(engine, name)} == set()


def has(engine: RemoteEngine, name: str) -> bool:
    try:
        return hasattr(engine, name)
    except errors.Unavailable:
        return False


def asked_of_engines(tree: ast.AST) -> Iterator[str]:
    """Attributes of whatever is called engine, or is the result of asking an app for its engine."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner: Any = node.value.value if isinstance(node.value, ast.Await) else node.value
        owner = owner.func if isinstance(owner, ast.Call) else owner
        called = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if called.lstrip("_") == "engine" and node.attr not in ("asks", "engine", "flows", "gates", "pulling", "reads"):
            yield node.attr


async def test_what_no_route_offers_is_refused_by_its_name() -> None:
    engine: Any = RemoteEngine("http://nowhere")

    with pytest.raises(errors.Unavailable) as refused:
        await engine.sweep_once("lease_expiry")
    assert refused.value.op == "sweep_once"
    with pytest.raises(AttributeError):
        engine.never_heard_of()


@pytest.mark.parametrize("url", ["http://", "http://h?x=1", "http://name:secret@h", "ftp://h"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(errors.InvalidInput, match="url: "):
        RemoteEngine(url)


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "ä"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(errors.InvalidInput, match="token: ") as refused:
        RemoteEngine("http://nowhere", token=Secret(token))
    assert token not in str(refused.value)


async def test_a_server_joins_no_transaction() -> None:
    with pytest.raises(errors.InvalidInput, match="using: "):
        await RemoteEngine("http://nowhere").create_within(object(), [])


# ---------------------------------------------------------------------------------------------------------------
# Errors

FACTS: dict[str, dict[str, object]] = {
    "StoreUnavailable": {"source": "auth", "backend": "SQLite", "in_doubt": True},
    "SchemaTooNew": {"op": "open", "found": 9, "known": 8},
    "OperationTimeout": {"op": "cancel_flow", "elapsed_ms": 7},
    "UnknownKid": {"kid": "k7"},
}


def every_error() -> Iterator[errors.FabricError]:
    for kind in dict.fromkeys(errors.by_kind.values()):
        if issubclass(kind, errors.StreamDisconnected | errors.ResourceExhausted):
            continue  # the first belongs to subscriptions, the second is asked again
        if kind is errors.NotFound:
            yield from (errors.NotFound(entity, execution_id=EXECUTION) for entity in errors.ENTITIES)
            continue
        try:
            facts = FACTS.get(kind.__name__, {"execution_id": EXECUTION, "lease_epoch": 3})
            yield kind(detail="some words: ä", **facts)
        except TypeError:
            given = inspect.signature(kind).parameters.values()
            needed = {one.name: "x" for one in given if one.default is one.empty and one.kind is one.KEYWORD_ONLY}
            yield kind(**needed)


# A server that is too old for its store is away until its successor has come (tests/client/test_foreign_answers.py).
VERDICTS = [error for error in every_error() if not isinstance(error, errors.SchemaTooNew)]


@pytest.mark.parametrize("error", VERDICTS, ids=lambda error: error.kind)
async def test_every_error_arrives_as_it_was(error: errors.FabricError, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    await store.open(migrate=True)
    engine = Engine(store)

    async def refuse(execution_id: str) -> None:
        raise error

    monkeypatch.setattr(engine, "attempt_history", refuse)
    async with RemoteEngine("http://ff", transport=httpx2.ASGITransport(app=create_app(engine))) as remote:
        with pytest.raises(errors.FabricError) as raised:
            await remote.attempt_history(EXECUTION)
    assert raised.value == error
    assert raised.value.retryable == error.retryable
    await engine.close()


@pytest.mark.parametrize(
    "url", ["http://", "http://:80", "https://[::1", "http://host:99999", "http://host:0/", "http://h?a=b"]
)
def test_an_address_that_cannot_be_read_is_refused_before_anybody_is_asked(url: str) -> None:
    with pytest.raises(errors.InvalidInput, match="url: "):
        RemoteEngine(url)
