"""A submit is easy to follow: its calls pass few files, and docs/internals.md names each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from traceback import walk_stack
from typing import Any

import pytest
from asyncpg.connection import Connection

import flowfabric
from flowfabric import Context, Fabric
from flowfabric.bench.postgres import postgres_scratch_store
from tests.servers import postgres

PACKAGE = Path(flowfabric.__file__).parent
INTERNALS = Path(__file__).parents[3] / "docs" / "internals.md"
MAX_FILES = 12


def _files_in_calls(task: asyncio.Task[Any]) -> set[str]:
    """Return the project's files in the calls that a task waits in, or in those of the current task."""
    if task is asyncio.current_task():
        names = [frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe(1))]
    else:
        names = []
        awaited: object = task.get_coro()
        while (frame := getattr(awaited, "cr_frame", None)) is not None:
            names.append(frame.f_code.co_filename)
            awaited = getattr(awaited, "cr_await", None)
    return {Path(name).relative_to(PACKAGE).as_posix() for name in names if Path(name).is_relative_to(PACKAGE)}


async def test_a_submit_passes_at_most_twelve_files_and_the_internals_page_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: set[str] = set()
    send: Callable[..., Awaitable[Any]] = Connection._execute

    async def record_calls(connection: Connection, *arguments: Any, **options: Any) -> Any:
        sender = asyncio.current_task()
        assert sender is not None
        passed.update(_files_in_calls(submit), _files_in_calls(sender))
        return await send(connection, *arguments, **options)

    async with postgres_scratch_store(postgres().dsn()) as scratch:
        app = Fabric(scratch.url)

        @app.task
        async def hello(ctx: Context, name: str) -> str:
            return name

        async with app:
            await hello.submit("the lane is known from now on")
            monkeypatch.setattr(Connection, "_execute", record_calls)
            submit = asyncio.create_task(hello.submit("Ana"))
            await submit

    assert {"sdk/task.py", "engine/runtime/commit_queue.py", "stores/postgres/commit/statement.py"} <= passed
    assert len(passed) <= MAX_FILES
    text = INTERNALS.read_text()
    assert [name for name in sorted(passed) if f"`{name}`" not in text] == []
