"""`ff --store http://…`: the same commands against a server, with a token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfabric import Budget, Context, Engine, Fabric
from flowfabric.errors import Unauthorized
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server import ServerSettings
from flowfabric.settings import Secret
from tests.cli.terminal import Terminal
from tests.client.server_thread import ServerThread, run_server
from tests.executions import claim_one
from tests.sdk.conftest import running_worker, wait_until

ROOT = "a-long-secret-that-nobody-guesses"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerThread]:
    with run_server(f"sqlite:///{tmp_path}/ff.db", ServerSettings(api_token=Secret(ROOT))) as server:
        yield server


@pytest.fixture
def direct(server: ServerThread) -> Terminal:
    """A terminal on the store behind the server."""
    return Terminal(server.store_url)


@pytest.fixture
def ff(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal on the server."""
    monkeypatch.setenv("FLOWFABRIC_TOKEN", ROOT)
    return Terminal(server.url)


def test_executions_are_submitted_listed_shown_cancelled_and_replayed(ff: Terminal, direct: Terminal) -> None:
    execution_id = ff.submit("--payload", "hi", "--tag", "shop.a=b", "--delay", "1h")

    assert ff.document("ls", "--tag", "shop.a=b") == direct.document("ls", "--tag", "shop.a=b")
    assert ff.document("explain", execution_id) == direct.document("explain", execution_id)
    assert "is cancelled" in ff.stdout("cancel", execution_id)
    assert "is waiting" in ff.stdout("replay", execution_id)

    async def complete(engine: Engine) -> None:
        held = await claim_one(engine)
        await engine.append_frame(held.handle, b"out", frame_type="log")
        await engine.complete(held.handle, result=b"\xff\x00")

    direct.engine(complete)
    shown = ff.document("show", execution_id)
    assert shown == direct.document("show", execution_id)
    assert shown["result"] == {"bytes": 2, "base64": "/wA="}
    assert ff.stdout("tail", execution_id) == direct.stdout("tail", execution_id) == "out"


def test_an_unknown_execution_is_reported_as_on_a_store(ff: Terminal, direct: Terminal) -> None:
    unknown = "{fp:7}:550e8400-e29b-41d4-a716-446655440000"
    for command in ("show", "cancel", "replay", "explain", "tail"):
        assert ff.refuses(command, unknown).splitlines()[-1] == direct.refuses(command, unknown).splitlines()[-1]


def test_a_lane_is_spread_and_listed(ff: Terminal, direct: Terminal) -> None:
    ff.submit("--payload", "hi", "--lane", "mail")

    changed = ff.document("lanes", "mail", "--spread", "4")["lanes"]

    assert [(lane["lane_id"], lane["spread"], lane["next_spread"]) for lane in changed] == [("mail", 1, 4)]
    assert ff.document("lanes") == direct.document("lanes") == {"lanes": changed}
    assert "mail" in ff.stdout("lanes")


def test_budgets_and_workers_are_listed(ff: Terminal, direct: Terminal) -> None:
    async def declare(engine: Engine) -> None:
        for name in ("one", "two"):
            budget = Budget(name, {"tokens": 9}).id("default")
            await engine.create_budget(budget, dimensions=["tokens"], hard_limits=[9], soft_limits=[5])
            await engine.report_usage_admin(budget, dimensions=["tokens"], deltas=[3])
        await engine.register_worker(
            worker_instance_id="w:1", worker_id="w", lanes=["mail"], liveness_ttl_ms=60_000, capabilities=["gpu"]
        )

    assert ff.stdout("budgets") == "No budgets.\n"
    direct.engine(declare)

    assert ff.document("budgets") == direct.document("budgets")
    first = ff.document("budgets", "--limit", "1")
    assert ff.document("budgets", "--limit", "1", "--cursor", first["next_cursor"])["budgets"] != first["budgets"]
    assert ff.document("budgets", first["next_cursor"])["budgets"] == first["budgets"]
    assert ff.document("workers") == direct.document("workers")


def test_doctor_checks_the_store_behind_a_server(ff: Terminal, direct: Terminal) -> None:
    found = {one["check"]: one for one in ff.document("doctor")["checks"]}

    assert [*found] == ["server", "store", "schema", "latency", "clock", "held", "keystore"]
    assert all(one["ok"] for one in found.values())
    assert found["store"]["says"] == "SQLite answers, behind the server"
    behind = {one["check"]: one["says"] for one in direct.document("doctor")["checks"]}
    assert found["keystore"]["says"] == behind["keystore"]
    assert found["schema"]["says"].split(",")[0] == behind["schema"].split(",")[0]


def test_doctor_reports_an_unreachable_server_and_a_wrong_token(ff: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = Terminal("http://127.0.0.1:9").run("doctor", "--json")
    assert unreachable.exit_code == 1
    assert "store_unavailable" in unreachable.stdout or "server" in unreachable.stdout

    monkeypatch.setenv("FLOWFABRIC_TOKEN", "wrong")
    refused = ff.run("doctor")
    assert refused.exit_code == 1
    assert "missing or invalid Authorization header" in refused.stdout
    assert "FLOWFABRIC_TOKEN" in refused.stdout


def test_a_token_without_the_scope_of_a_command_is_refused_with_a_hint(
    ff: Terminal, direct: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution_id = ff.submit()

    async def reading(engine: Engine) -> str:
        return (await engine.make_api_token("reader", [ApiScope.READ])).token

    monkeypatch.setenv("FLOWFABRIC_TOKEN", direct.engine(reading))
    error = ff.refuses("cancel", execution_id)
    assert "token lacks scope: operate" in error
    assert "FLOWFABRIC_TOKEN" in error
    assert ff.document("doctor")["healthy"]


@pytest.mark.parametrize("token", ["wrong", None])
def test_an_app_with_a_wrong_or_missing_token_is_refused_with_the_variable(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    monkeypatch.delenv("FLOWFABRIC_TOKEN", raising=False)
    app = Fabric(server.url, token=token)

    @app.task
    async def send(ctx: Context) -> None: ...

    with pytest.raises(Unauthorized, match="FLOWFABRIC_TOKEN"):
        asyncio.run(send.submit())


@pytest.mark.parametrize(
    ("command", "text"),
    [("migrate", "brings its store up to date when it starts"), ("serve", "serve the store that is behind it")],
)
def test_commands_that_need_a_store_refuse_a_server(command: str, text: str) -> None:
    assert text in Terminal("http://127.0.0.1:9").refuses(command)


def test_approval_links_point_to_the_server_in_use(
    ff: Terminal, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
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
