"""`ff` as a script would use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from typer.testing import CliRunner, Result

import flowfabric
from flowfabric.cli import app
from flowfabric.connector import open_engine

T = TypeVar("T")


class Terminal:
    """Runs commands on one store, or on a server and the store behind it."""

    def __init__(self, store: str, behind: str | None = None) -> None:
        self.store = store
        self._behind = behind or store

    def run(self, *arguments: str, given: bytes | None = None) -> Result:
        """The whole answer."""
        return CliRunner().invoke(app, [*arguments, "--store", self.store], input=given)

    def says(self, *arguments: str, given: bytes | None = None) -> str:
        """What it printed; it has to succeed."""
        answer = self.run(*arguments, given=given)
        assert answer.exit_code == 0, answer.stderr
        return answer.stdout

    def document(self, *arguments: str) -> Any:
        """The document that it printed."""
        return json.loads(self.says(*arguments, "--json"))

    def refuses(self, *arguments: str) -> str:
        """What it had to say against it; it has to fail, without a document and without a traceback."""
        answer = self.run(*arguments)
        assert answer.exit_code == 1
        assert answer.stdout == ""
        assert "Traceback" not in answer.stderr
        return answer.stderr

    def submit(self, *arguments: str) -> str:
        """The id of a new execution."""
        return self.says("submit", *arguments).strip()

    def engine(self, work: Callable[[flowfabric.Engine], Awaitable[T]]) -> T:
        """Do something on the same store without the command line."""

        async def connected() -> T:
            async with await open_engine(self._behind) as engine:
                return await work(engine)

        return asyncio.run(connected())
