"""The remote engine is like the engine: same operations, same signatures, same errors."""

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
STORE_ONLY = {"ensure_signing_key"}  # called only on a store
OWN = {"connect"}
EXECUTION = "{fp:7}:550e8400-e29b-41d4-a716-446655440000"


def operations() -> list[str]:
    """Return the operations that both engines have."""
    return sorted(name for name in vars_of(RemoteEngine) if callable(getattr(Engine, name, None)))


def vars_of(kind: type) -> set[str]:
    return {name for base in kind.__mro__[:-1] for name in vars(base) if not name.startswith("_")}


@pytest.mark.parametrize("name", operations())
def test_an_operation_has_the_signature_of_the_engine(name: str) -> None:
    remote, local = (inspect.signature(getattr(kind, name)) for kind in (RemoteEngine, Engine))

    def shapes(signature: inspect.Signature) -> list[tuple[str, Any, str]]:
        return [(one.name, one.kind, default_text(one)) for one in signature.parameters.values()]

    def default_text(parameter: inspect.Parameter) -> str:
        text = repr(parameter.default).partition(" at 0x")[0]
        return "<function>" if text.startswith("<function") else text

    assert shapes(remote) == shapes(local)
    assert inspect.iscoroutinefunction(getattr(RemoteEngine, name)) == inspect.iscoroutinefunction(
        getattr(Engine, name)
    )


def test_the_remote_engine_adds_no_public_function_but_connect() -> None:
    assert {name for name in vars_of(RemoteEngine) if inspect.isfunction(getattr(RemoteEngine, name))} - vars_of(
        Engine
    ) <= OWN


def test_the_remote_engine_has_everything_that_the_sdk_calls() -> None:
    engine = RemoteEngine("http://nowhere")
    used = {name for page in SDK.glob("*.py") for name in engine_attributes(ast.parse(page.read_text()))}

    assert {"create", "claim_from_lanes", "open_gate"} & used, "the search finds something"
    assert {name for name in used - STORE_ONLY if not has(engine, name)} == set()


def has(engine: RemoteEngine, name: str) -> bool:
    try:
        return hasattr(engine, name)
    except errors.Unavailable:
        return False


def engine_attributes(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes of variables called engine, and of awaited calls of `engine()`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner: Any = node.value.value if isinstance(node.value, ast.Await) else node.value
        owner = owner.func if isinstance(owner, ast.Call) else owner
        called = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if called.lstrip("_") == "engine" and node.attr not in ("asks", "engine", "flows", "gates", "pulling", "reads"):
            yield node.attr


async def test_an_operation_without_a_route_is_unavailable() -> None:
    engine: Any = RemoteEngine("http://nowhere")

    with pytest.raises(errors.Unavailable) as refused:
        await engine.sweep_once("lease_expiry")
    assert refused.value.op == "sweep_once"
    with pytest.raises(AttributeError):
        engine.never_heard_of()


@pytest.mark.parametrize(
    "url",
    [
        *("http://", "http://h?x=1", "http://name:secret@h", "ftp://h"),
        *("http://:80", "https://[::1", "http://host:99999", "http://host:0/"),
    ],
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(errors.InvalidInput, match="url: "):
        RemoteEngine(url)


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "ä"])
def test_a_token_that_is_no_header_value_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(errors.InvalidInput, match="token: ") as refused:
        RemoteEngine("http://nowhere", token=Secret(token))
    assert token not in str(refused.value)


async def test_a_create_within_a_transaction_is_refused() -> None:
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
            continue  # the first belongs to subscriptions, the second is retried
        if kind is errors.NotFound:
            yield from (errors.NotFound(entity, execution_id=EXECUTION) for entity in errors.ENTITIES)
            continue
        try:
            facts = FACTS.get(kind.__name__, {"execution_id": EXECUTION, "lease_epoch": 3})
            yield kind(detail="some text: ä", **facts)
        except TypeError:
            given = inspect.signature(kind).parameters.values()
            needed = {one.name: "x" for one in given if one.default is one.empty and one.kind is one.KEYWORD_ONLY}
            yield kind(**needed)


# A server that is too old for its store counts as unavailable (tests/client/test_foreign_answers.py).
ERRORS = [error for error in every_error() if not isinstance(error, errors.SchemaTooNew)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.kind)
async def test_every_error_is_the_same_after_the_round_trip(
    error: errors.FabricError, monkeypatch: pytest.MonkeyPatch
) -> None:
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
