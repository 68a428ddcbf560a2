"""A test client of the command line."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from typer.testing import CliRunner, Result

import flowfabric
from flowfabric.cli import app
from flowfabric.connector import open_engine
from tests.executions import claim_one

T = TypeVar("T")


class Terminal:
    """Runs commands on one store, or on a server and the store behind it."""

    def __init__(self, store: str, behind: str | None = None) -> None:
        self.store = store
        self._behind = behind or store

    def run(self, *arguments: str, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(app, [*arguments, "--store", self.store], input=stdin)

    def stdout(self, *arguments: str, stdin: bytes | None = None) -> str:
        """Run a command that has to succeed; return its output."""
        result = self.run(*arguments, stdin=stdin)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    def run_until_explained(
        self, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object], *arguments: str
    ) -> Result:
        """Run a command in a thread, call `work` once the command has explained an execution, and return its result."""
        explain, explained = flowfabric.Engine.explain, threading.Event()

        async def recorded(engine: flowfabric.Engine, execution_id: str) -> Any:
            answer = await explain(engine, execution_id)
            explained.set()
            return answer

        monkeypatch.setattr(flowfabric.Engine, "explain", recorded)
        with ThreadPoolExecutor() as threads:
            result = threads.submit(self.run, *arguments)
            assert explained.wait(30)
            work()
            return result.result(30)

    def document(self, *arguments: str) -> Any:
        """Run a command with `--json`; return the decoded document."""
        return json.loads(self.stdout(*arguments, "--json"))

    def refuses(self, *arguments: str) -> str:
        """Run a command that has to fail, without output and without a traceback; return its stderr."""
        result = self.run(*arguments)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        return result.stderr

    def submit(self, *arguments: str) -> str:
        """Submit an execution; return its id."""
        return self.stdout("submit", *arguments).strip()

    def end_one(self, lane: str = "default", category: str = "permanent", **options: Any) -> None:
        """Claim the only waiting execution of a lane; fail it for a `reason`, otherwise complete it."""

        async def end(engine: flowfabric.Engine) -> None:
            claimed = await claim_one(engine, lane)
            if "reason" in options:
                await engine.fail(claimed.handle, category=category, **options)
            else:
                await engine.complete(claimed.handle, **options)

        self.engine(end)

    def engine(self, work: Callable[[flowfabric.Engine], Awaitable[T]]) -> T:
        """Run a coroutine function on an engine of the same store."""

        async def connected() -> T:
            async with await open_engine(self._behind) as engine:
                return await work(engine)

        return asyncio.run(connected())
