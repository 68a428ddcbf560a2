"""Pages without anything on them teach: their code is what it says, and leads to something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import unescape
from typing import Any

import pytest
import pytest_asyncio

from flowfabric import Budget, Context, Engine, Fabric, Limit
from flowfabric.sdk.worker.worker import Worker
from flowfabric.server import ServerSettings, create_app
from tests.console.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="module")

EMPTY = ("", "/runs", "/approvals", "/flows", "/budgets", "/events", "/bulk", "/lanes")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app() -> AsyncIterator[Fabric]:
    """An application on an empty store."""
    async with Fabric("memory://") as app:
        yield app


@asynccontextmanager
async def working(app: Fabric, lane: str) -> AsyncIterator[None]:
    """Work off a lane."""
    worker = Worker(app, lanes=[lane])
    work = asyncio.create_task(worker.work())
    try:
        yield
    finally:
        worker.stop()
        await work


async def code_of(app: Fabric, path: str) -> list[str]:
    """Return the code on a page."""
    engine = await app.engine()
    assert isinstance(engine, Engine)
    text = (await Visitor(create_app(engine, ServerSettings())).get(path)).text
    return [unescape(part.partition(">")[2].partition("</pre>")[0]) for part in text.split("<pre")[1:]]


async def run_code(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run code of a page as the body of a coroutine; return its names."""
    body = "".join(f"    {line}\n" for line in code.splitlines())
    exec(f"async def go(app, ctx, globals=globals):\n{body}    return locals()\n", names)
    found: dict[str, Any] = await names["go"](names.get("app"), names.get("ctx"))
    return found


async def test_every_empty_page_says_what_would_be_there(app: Fabric) -> None:
    engine = await app.engine()
    assert isinstance(engine, Engine)
    visitor = Visitor(create_app(engine, ServerSettings()))
    for path in EMPTY:
        text = (await visitor.get(path)).text.partition("<main")[2]
        assert 'class="empty"' in text or "A lane exists from its first run on" in text, path


async def test_the_code_of_the_first_run_makes_a_task_that_a_worker_runs(app: Fabric) -> None:
    (code,) = await code_of(app, "/runs")
    names: dict[str, Any] = {}
    exec(code.replace("Fabric()", 'Fabric("memory://")'), names)
    async with names["app"] as shop, working(shop, "default"):
        run = await names["purchase"].submit("3 apples")
        assert await run.result(timeout=30) == "bought 3 apples"


async def test_the_code_of_a_flow_submits_one(app: Fabric) -> None:
    @app.task(name="encode")
    async def encode(number: int) -> int:
        return number

    @app.task(name="publish")
    async def publish() -> None: ...

    (code,) = await code_of(app, "/flows")
    found = await run_code(code, {"app": app, "encode": encode, "publish": publish})
    assert (len(found["parts"]), len(found["film"].nodes)) == (3, 4)


async def test_the_code_of_limits_declares_a_budget_and_quotas(app: Fabric) -> None:
    budget, limits = await code_of(app, "/budgets")
    names = {"app": app, "Budget": Budget, "Limit": Limit, "Context": Context}
    assert (await run_code(budget, dict(names)))["llm"].limits == {"tokens": 100_000}
    await run_code(limits, dict(names))


async def test_the_code_of_an_approval_asks_and_waits(app: Fabric) -> None:
    (code,) = await code_of(app, "/approvals")
    names: dict[str, Any] = {}

    @app.task(name="ask", lane="people")
    async def ask(ctx: Context) -> None:
        await run_code(code, names | {"ctx": ctx})

    engine = await app.engine()
    async with working(app, "people"):
        run = await ask.submit()
        async with asyncio.timeout(30):
            while await run.state() != "suspended":  # noqa: ASYNC110 - the state lies in a store
                await asyncio.sleep(0.01)
    [question] = (await engine.list_approvals()).approvals
    assert (question.name, question.need, len(question.approvers)) == ("deploy", 2, 3)
    assert question.shown == {"version": "1.4"}
    await run.cancel("only asked")
