"""`ff --store http://…`: the same commands against a server, with a token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfabric import Budget, Context, Engine, Fabric
from flowfabric.errors import Unauthorized
from flowfabric.model.api_token import ApiScope
from flowfabric.server import ServerSettings
from flowfabric.settings import Secret
from tests.cli.terminal import Terminal
from tests.client.serving import Serving, serving
from tests.sdk.conftest import running_worker, wait_until

ROOT = "a-long-secret-that-nobody-guesses"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(f"sqlite:///{tmp_path}/ff.db", ServerSettings(api_token=Secret(ROOT))) as server:
        yield server


@pytest.fixture
def direct(server: Serving) -> Terminal:
    """A terminal on the store behind the server."""
    return Terminal(server.store_url)


@pytest.fixture
def ff(server: Serving, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal on the server."""
    monkeypatch.setenv("FLOWFABRIC_TOKEN", ROOT)
    return Terminal(server.url)


def test_executions_are_submitted_listed_shown_cancelled_and_replayed(ff: Terminal, direct: Terminal) -> None:
    execution_id = ff.submit("--payload", "hi", "--tag", "shop.a=b", "--delay", "1h")

    assert ff.document("ls", "--tag", "shop.a=b") == direct.document("ls", "--tag", "shop.a=b")
    assert ff.document("explain", execution_id) == direct.document("explain", execution_id)
    assert "is cancelled" in ff.says("cancel", execution_id)
    assert "is waiting" in ff.says("replay", execution_id)

    async def complete(engine: Engine) -> None:
        held = await engine.claim("default", worker_id="w", worker_instance_id="w-1")
        assert held is not None
        await engine.append_frame(held.handle, b"out", frame_type="log")
        await engine.complete(held.handle, result=b"\xff\x00")

    direct.engine(complete)
    shown = ff.document("show", execution_id)
    assert shown == direct.document("show", execution_id)
    assert shown["result"] == {"bytes": 2, "base64": "/wA="}
    assert ff.says("tail", execution_id) == direct.says("tail", execution_id) == "out"


def test_what_is_not_there_is_told_like_on_a_store(ff: Terminal, direct: Terminal) -> None:
    unknown = "{fp:7}:550e8400-e29b-41d4-a716-446655440000"
    for command in ("show", "cancel", "replay", "explain", "tail"):
        assert ff.refuses(command, unknown).splitlines()[-1] == direct.refuses(command, unknown).splitlines()[-1]


def test_budgets_and_workers_are_listed(ff: Terminal, direct: Terminal) -> None:
    async def declare(engine: Engine) -> None:
        for name in ("one", "two"):
            budget = Budget(name, {"tokens": 9}).id("default")
            await engine.create_budget(budget, dimensions=["tokens"], hard_limits=[9], soft_limits=[5])
            await engine.report_usage_admin(budget, dimensions=["tokens"], deltas=[3])
        await engine.register_worker(
            worker_instance_id="w:1", worker_id="w", lanes=["mail"], liveness_ttl_ms=60_000, capabilities=["gpu"]
        )

    assert ff.says("budgets") == "No budgets.\n"
    direct.engine(declare)

    assert ff.document("budgets") == direct.document("budgets")
    first = ff.document("budgets", "--limit", "1")
    assert ff.document("budgets", "--limit", "1", "--cursor", first["next_cursor"])["budgets"] != first["budgets"]
    assert ff.document("budgets", first["next_cursor"])["budgets"] == first["budgets"]
    assert ff.document("workers") == direct.document("workers")


def test_doctor_looks_through_the_server_at_its_store(ff: Terminal, direct: Terminal) -> None:
    found = {one["check"]: one for one in ff.document("doctor")["checks"]}

    assert [*found] == ["server", "store", "schema", "latency", "clock", "keystore"]
    assert all(one["ok"] for one in found.values())
    assert found["store"]["says"] == "SQLite answers, behind the server"
    behind = {one["check"]: one["says"] for one in direct.document("doctor")["checks"]}
    assert found["keystore"]["says"] == behind["keystore"]
    assert found["schema"]["says"].split(",")[0] == behind["schema"].split(",")[0]


def test_doctor_tells_of_a_server_that_is_away_and_of_a_wrong_token(
    ff: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Terminal("http://127.0.0.1:9").run("doctor", "--json")
    assert away.exit_code == 1
    assert "store_unavailable" in away.stdout or "server" in away.stdout

    monkeypatch.setenv("FLOWFABRIC_TOKEN", "wrong")
    refused = ff.run("doctor")
    assert refused.exit_code == 1
    assert "missing or invalid Authorization header" in refused.stdout
    assert "FLOWFABRIC_TOKEN" in refused.stdout


def test_a_token_that_is_not_good_for_a_command_is_told_so(
    ff: Terminal, direct: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution_id = ff.submit()

    async def reading(engine: Engine) -> str:
        return (await engine.make_api_token("reader", [ApiScope.READ])).token

    monkeypatch.setenv("FLOWFABRIC_TOKEN", direct.engine(reading))
    said = ff.refuses("cancel", execution_id)
    assert "token lacks scope: operate" in said
    assert "FLOWFABRIC_TOKEN" in said
    assert ff.document("doctor")["healthy"]


@pytest.mark.parametrize("token", ["wrong", None])
def test_an_app_with_a_wrong_token_or_none_is_told_where_it_comes_from(
    server: Serving, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    monkeypatch.delenv("FLOWFABRIC_TOKEN", raising=False)
    app = Fabric(server.url, token=token)

    @app.task
    async def send(ctx: Context) -> None: ...

    with pytest.raises(Unauthorized, match="FLOWFABRIC_TOKEN"):
        asyncio.run(send.submit())


@pytest.mark.parametrize(
    ("command", "words"),
    [("migrate", "brings its store up to date when it starts"), ("serve", "serve the store that is behind it")],
)
def test_commands_that_need_the_store_itself_say_so(command: str, words: str) -> None:
    assert words in Terminal("http://127.0.0.1:9").refuses(command)


def test_links_lead_to_the_server_that_is_asked(ff: Terminal, server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    app = Fabric(server.url)

    @app.task
    async def deploy(ctx: Context) -> None:
        gate = await ctx.approval("approve", bool)
        await ctx.progress({"links": list(map(str, gate.links))})
        await gate

    async def suspended() -> list[str]:
        async with app, running_worker(app):
            run = await deploy.submit()

            async def waits() -> bool:
                return await run.state() == "suspended"

            await wait_until(waits)
            links: list[str] = (await run.progress())["links"]
            return links

    [link] = asyncio.run(suspended())
    assert link.startswith(f"{server.url}/v1/waitpoints/")
    [listed] = ff.document("approvals", "--links")["approvals"]
    assert listed["links"] == [link]
    monkeypatch.setenv("FF_PUBLIC_URL", "https://ff.example/")
    assert app.public_url == "https://ff.example"
    monkeypatch.delenv("FF_PUBLIC_URL")
    assert Fabric("https://ana:secret@ff.example/flows/").public_url == "https://ff.example/flows"
