"""All engines fit `EngineAPI`: on a store, on a server, and on another event loop."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from flowfabric.client import RemoteEngine
from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.engine_protocol import EngineAPI
from flowfabric.sdk.engine_provider import CrossLoopEngine

OPERATIONS = sorted(name for name, _ in inspect.getmembers(EngineAPI, inspect.isfunction) if name[0] != "_")
ATTRIBUTES = sorted(name for name, value in vars(EngineAPI).items() if isinstance(value, property))


def fits(local: Engine, remote: RemoteEngine, elsewhere: CrossLoopEngine) -> list[EngineAPI]:
    """Return the three as `EngineAPI`: mypy compares their members with the protocol."""
    engines: list[EngineAPI] = [local, remote, elsewhere]
    return engines


def parameters(operation: Any) -> list[tuple[str, Any, bool]]:
    return [
        (each.name, each.kind, each.default is inspect.Parameter.empty)
        for each in inspect.signature(operation).parameters.values()
        if each.name != "self"
    ]


@pytest.mark.parametrize("name", OPERATIONS)
async def test_every_engine_has_the_operation_with_the_same_parameters(name: str) -> None:
    declared = getattr(EngineAPI, name)
    async with await open_engine("memory://") as local:
        elsewhere: Any = CrossLoopEngine(local, asyncio.get_running_loop())  # type: ignore[abstract]
        for operation in (getattr(local, name), getattr(RemoteEngine, name), getattr(elsewhere, name)):
            if operation.__name__ != "<lambda>":  # a plain function that is sent to the loop of the engine
                assert parameters(operation) == parameters(declared)
                assert inspect.iscoroutinefunction(operation) == inspect.iscoroutinefunction(declared)


async def test_every_engine_has_the_attributes() -> None:
    async with await open_engine("memory://") as local:
        elsewhere = CrossLoopEngine(local, asyncio.get_running_loop())  # type: ignore[abstract]
        for engine in fits(local, RemoteEngine("http://nowhere"), elsewhere):
            assert [name for name in ATTRIBUTES if not hasattr(engine, name)] == []
