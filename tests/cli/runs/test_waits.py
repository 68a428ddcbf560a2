"""`ff signal`, `approvals`, `explain` and `tail`, on a store with a worker."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from flowfabric import Context, Engine, Fabric, Fatal, Run
from tests.cli.terminal import Terminal
from tests.sdk.conftest import running_worker


@dataclass
class Decision:
    ok: bool


class Shop:
    """An app on the terminal's store, whose worker runs on request."""

    def __init__(self, store: str) -> None:
        self.app = Fabric(store)

        @self.app.task(name="deploy")
        async def deploy(ctx: Context, version: str) -> str:
            gate = await ctx.approval("approve", Decision, need=2, expires="3d", show={"version": version})
            votes = await gate
            return "deployed" if all(vote.value.ok for vote in votes) else "rejected"

        @self.app.task(name="receive_twice")
        async def receive_twice(ctx: Context) -> list[str]:
            first = await ctx.receive("steer", str)
            second = await ctx.receive("steer", str)
            return [str(first), str(second)]

        @self.app.task(name="ask")
        async def ask(ctx: Context, fails: bool) -> str:
            out = ctx.stream("answer")
            await out.write("forty")
            await ctx.stream("log").write("thinking\n")
            await ctx.progress("almost there", pct=90)
            if fails:
                raise Fatal("no idea")
            await out.write("-two\n")
            return out.text()

        self.deploy, self.receive_twice, self.ask = deploy, receive_twice, ask

    def work(self, condition: Callable[[], Awaitable[object]]) -> None:
        """Run a worker until the condition holds."""

        async def run_worker() -> None:
            async with self.app, asyncio.timeout(30), running_worker(self.app, lease_ttl="5s"):
                while not await condition():  # noqa: ASYNC110 - polls the store
                    await asyncio.sleep(0.01)

        asyncio.run(run_worker())

    def submit(self, submit: Callable[[], Awaitable[Run[Any]]]) -> str:
        async def submit_run() -> str:
            async with self.app:
                return (await submit()).id

        return asyncio.run(submit_run())

    def work_until(self, run_id: str, *states: str) -> None:
        async def reached() -> bool:
            engine = await self.app.engine()
            return str(await engine.read_execution_state(run_id)) in states

        self.work(reached)


@pytest.fixture
def ff(ff_or_server: Terminal) -> Terminal:
    return ff_or_server


@pytest.fixture
def shop(ff: Terminal) -> Shop:
    return Shop(ff.store)


def test_approvals_are_listed_and_votes_are_sent_with_their_links(ff: Terminal, shop: Shop) -> None:
    run = shop.submit(lambda: shop.deploy.submit("v7"))
    assert ff.stdout("approvals") == "Nothing waits for an answer.\n"
    shop.work_until(run, "suspended")

    [asked] = ff.document("approvals")["approvals"]
    assert (asked["execution_id"], asked["name"], asked["answers"], asked["need"]) == (run, "approve", 0, 2)
    assert asked["expires_at"] - asked["opened_at"] == 3 * 86_400_000
    assert (json.loads(asked["about"]), asked["links"]) == ({"version": "v7"}, [])

    [listed] = ff.document("approvals", "--links", "--public-url", "https://ff.example/")["approvals"]
    first, second = listed["links"]
    assert first.startswith(f"https://ff.example/v1/waitpoints/{quote(run, safe=':')}/")
    assert ff.stdout("signal", first, "--value", '{"ok": true}', "--by", "ana") == "✓ voted: more answers are needed\n"
    again = ff.refuses("signal", first, "--value", '{"ok": false}', "--by", "ana")
    assert "not counted: this link has voted before, and the first vote counts" in again
    output = ff.stdout("approvals", "--links")
    assert re.search(rf"{re.escape(run)} +approve +1 of 2 ", output)
    assert second.rpartition("?")[2] in output

    voted = ff.stdout("signal", second, "--value", '{"ok": true}', "--by", "bo")
    assert voted == "✓ voted: the approval is complete, and the run resumes\n"
    shop.work_until(run, "completed")
    assert ff.document("show", run)["result"]["text"] == '"deployed"'
    assert ff.document("approvals")["approvals"] == []


def test_a_signal_is_received_by_the_function(ff: Terminal, shop: Shop) -> None:
    run = shop.submit(lambda: shop.receive_twice.submit())

    send = ("signal", run, "steer", "--value", '"left"', "--key", "k1")
    assert ff.stdout(*send) == "✓ sent: kept until the run receives it\n"
    assert ff.stdout(*send) == "✓ sent before, and delivered once\n"
    assert ff.document("signal", run, "steer", "--value", '"right"')["signal_id"]
    shop.work_until(run, "completed")

    assert json.loads(ff.document("show", run)["result"]["text"]) == ["left", "right"]


def test_an_invalid_signal_is_refused(ff: Terminal, shop: Shop) -> None:
    run = shop.submit(lambda: shop.deploy.submit("v7"))
    shop.work_until(run, "suspended")
    [listed] = ff.document("approvals", "--links")["approvals"]
    forged = listed["links"][0].replace("token=", "token=x")

    assert "invalid_token" in ff.refuses("signal", forged, "--value", '{"ok": true}')
    assert "value: an object is needed" in ff.refuses("signal", listed["links"][0])
    assert "link: not one of an approval" in ff.refuses("signal", "http://x/v1/waitpoints/nonsense")
    for arguments, text in (
        ((run,), "NAME is missing"),
        (("http://x/elsewhere",), "no link of an approval"),
        ((listed["links"][0], "vote"), "leave NAME out"),
        ((run, "steer", "--value", "left"), "a text needs quotes"),
    ):
        answer = ff.run("signal", *arguments)
        assert (answer.exit_code, text in " ".join(answer.stderr.split())) == (2, True), answer.stderr
    [asked] = ff.document("approvals")["approvals"]
    assert asked["answers"] == 0


def test_explain_reports_the_obstacle(ff: Terminal, shop: Shop) -> None:
    run = shop.submit(lambda: shop.deploy.submit("v7"))
    later = ff.submit("--delay", "1h")

    assert ff.document("explain", run)["obstacle"] == "NoWorker"
    shop.work_until(run, "suspended")
    found, delayed = ff.document("explain", run), ff.document("explain", later)

    assert (found["obstacle"], found["public_state"]) == ("Suspended", "suspended")
    assert found["facts"]["waits_on"] == ["approval:approve#0"]
    assert delayed["obstacle"] == "Delayed"
    output = ff.stdout("explain", later)
    assert f"{later} is delayed." in output
    assert re.search(r"delayed until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z", output)
    assert str(delayed["facts"]["until"]) not in output


def test_show_explains_what_the_execution_waits_for(ff: Terminal, shop: Shop) -> None:
    run = shop.submit(lambda: shop.deploy.submit("v7"))
    shop.work_until(run, "suspended")

    shown, listed = ff.stdout("show", run), ff.stdout("ls")

    assert re.search(r"why +It waits until \d{4}-\d\d-\d\d .*Z for an answer to approve\.", shown)
    assert "suspended: waiting for an answer to approve" in listed
    for internal in ("ff.ask", "ff.show", "$ref", "waiting_for_", "tags"):
        assert internal not in shown + listed
    assert "ff.show" in ff.document("show", run)["execution"]["tags"]  # the JSON document has all tags


def test_tail_explains_why_there_is_no_output(ff: Terminal, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.cli.commands.tail.BLOCK_MS", 50)
    run = shop.submit(lambda: shop.ask.submit(False))
    answer = ff.run_until_explained(monkeypatch, lambda: shop.work_until(run, "completed"), "tail", run)

    assert "· No live worker serves lane default of namespace default: start one with `ff worker`.\n" in answer.stderr
    assert answer.stdout == "fortythinking\n-two\n"


def test_tail_prints_the_output_and_the_outcome(ff: Terminal, shop: Shop) -> None:
    good, bad = shop.submit(lambda: shop.ask.submit(False)), shop.submit(lambda: shop.ask.submit(True))
    shop.work_until(good, "completed")
    shop.work_until(bad, "failed")

    answer = ff.run("tail", good)
    assert (answer.exit_code, answer.stdout) == (0, "fortythinking\n-two\n")
    assert "· ━━━━━━━━━━━━━━━━━━╌╌ 90 %, almost there" in answer.stderr
    assert "━━╌╌ 90 %, almost there" in ff.stdout("show", good)
    assert answer.stderr.endswith("· success\n")
    assert ff.stdout("tail", good, "--name", "answer") == "forty-two\n"

    output = ff.document("tail", good)
    assert [one["text"] for one in output["frames"] if one["name"] == "answer"] == ["forty", "-two\n"]
    assert output["progress"] == {"message": "almost there", "pct": 90}
    assert (output["execution_id"], output["ended"], output["reason"]) == (good, "success", None)

    lines = [json.loads(line) for line in ff.stdout("tail", good, "--json-lines").splitlines()]
    assert [line["text"] for line in lines if line.get("name") == "answer"] == ["forty", "-two\n"]
    assert lines[-1] == {"ended": "success", "reason": None}

    failed = ff.run("tail", bad)
    assert failed.exit_code == 1
    assert failed.stdout == "fortythinking\n"
    assert ff.run("tail", bad, "--json").exit_code == 1
    assert "· failed: Fatal: no idea" in failed.stderr


def test_tail_follows_until_the_end(ff: Terminal, shop: Shop) -> None:
    run = shop.submit(lambda: shop.ask.submit(False))
    assert ff.stdout("tail", run, "--no-follow") == ""
    results: list[str] = []

    following = threading.Thread(target=lambda: results.append(ff.stdout("tail", run, "--name", "answer")))
    following.start()
    shop.work_until(run, "completed")
    following.join(30)

    assert results == ["forty-two\n"]


def test_workers_and_budgets_are_listed(ff: Terminal) -> None:
    assert ff.stdout("workers") == "No live workers in namespace default.\n"
    assert ff.stdout("budgets") == "No budgets.\n"

    async def prepare(engine: Engine) -> str:
        await engine.register_worker(
            worker_instance_id="w-1", worker_id="w", lanes={"mail"}, capabilities={"smtp"}, liveness_ttl_ms=60_000
        )
        budget = engine.minter.uuid()
        await engine.create_budget(
            budget, dimensions=["tokens", "usd"], hard_limits=[2000, 0], soft_limits=[1500, 0], on_hard_limit="suspend"
        )
        await engine.report_usage_admin(budget, dimensions=["tokens"], deltas=[500])
        return budget

    budget = ff.engine(prepare)
    [live] = ff.document("workers")["workers"]
    [known] = ff.document("budgets")["budgets"]

    assert (live["worker_instance_id"], live["lanes"], live["capabilities"]) == ("w-1", ["mail"], ["smtp"])
    assert re.search(r"w-1 +mail +smtp ", ff.stdout("workers"))
    assert ff.document("workers", "--namespace", "other")["workers"] == []
    assert (known["budget_id"], known["usage"]["tokens"], known["hard_limits"]["tokens"]) == (budget, 500, 2000)
    assert re.search(rf"{budget} +tokens +500 \(25 %\) +1,500 +2,000 +suspend", ff.stdout("budgets", budget))
    assert "`ff budgets` shows" in ff.refuses("budgets", "6c1f2c2e-3a51-4a3c-9b1e-0d8a8f6f0000")


@pytest.mark.parametrize("command", [("explain", "nonsense"), ("tail", "nonsense"), ("signal", "nonsense", "x")])
def test_an_invalid_id_is_refused_with_a_hint(ff: Terminal, command: tuple[str, ...], tmp_path: Path) -> None:
    assert "Hint: an execution id looks like" in ff.refuses(*command)
    unknown = "{fp:1}:1a255fe9-f16a-4af0-8cb6-6085de2ea47d"
    assert "execution_not_found" in ff.refuses(command[0], unknown, *command[2:])
