"""The demo checks its claims, and succeeds only if they hold."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from flowfabric.connector import open_engine
from flowfabric.demo import release
from flowfabric.demo.checks import DemoState, check_claims
from flowfabric.demo.orders import LANE, ORDERS, receipt
from flowfabric.demo.scenario import submit
from flowfabric.demo.screen import OrderStatus, Screen, render_table
from tests.executions import claim_one

HELD = [
    "each order completed exactly once: 8 completions, 8 orders",
    "order-2 failed and was retried: attempt 1: the payment service did not answer",
    r"order-4 was taken over from worker-[ab]: worker-[ab] started \d\.\d s after the kill, without an operator",
    "a write with the dead worker's lease was refused: refused with ",
    "lease epochs only increased: by one with each lease",
    "the flow continued without the failed branch: enrich failed, so alert ran and archive was skipped, each once",
    "publish ran when two of three were done: clean and rank were enough",
    "publish waited for its approval without a worker: suspended, signalled and resumed in the same attempt",
]


@pytest.mark.slow
def test_the_demo_kills_a_worker_and_checks_that_nothing_was_lost(tmp_path: Path) -> None:
    demo = [sys.executable, "-m", "flowfabric.demo"]

    done = subprocess.run(demo, capture_output=True, text=True, cwd=tmp_path, timeout=90)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for claim in HELD:
        assert re.search(f"^✓ {claim}", done.stdout, re.MULTILINE), claim
    assert "gets SIGKILL at" in done.stdout
    assert re.search(r"publish +suspended +attempt 1$", done.stdout, re.MULTILINE)
    assert re.search(r"order-2 +delayed +attempt 1", done.stdout)
    assert "order-2 failed (the payment service did not answer) and will be retried" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_demo_prints_its_claims_as_json(tmp_path: Path) -> None:
    demo = [sys.executable, "-m", "flowfabric.cli", "demo", "--json"]

    done = subprocess.run(demo, capture_output=True, text=True, cwd=tmp_path, timeout=90)

    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["proven"]
    claims = [f"{one['claim']}: {one['detail']}" for one in document["claims"] if one["held"]]
    assert len(claims) == len(document["claims"]) == len(HELD)
    assert all(re.match(claim, output) for claim, output in zip(HELD, claims, strict=True))
    assert "gets SIGKILL at" in done.stderr


@pytest.mark.slow
def test_the_demo_ends_with_a_console_on_what_it_did(tmp_path: Path) -> None:
    demo = [sys.executable, "-m", "flowfabric.cli", "demo", "--ui"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}

    with subprocess.Popen(demo, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environ) as running:
        assert running.stdout is not None
        try:
            link = next(found[1] for line in running.stdout if (found := re.search(r"the console is at (\S+)", line)))
            with urllib.request.urlopen(f"{link}/runs.json", timeout=30) as answer:
                runs = json.load(answer)["runs"]
        finally:
            running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0
    assert len([run for run in runs if run["state"] == "completed"]) >= len(ORDERS)
    assert list(tmp_path.iterdir()) == []


async def test_a_demo_without_retry_and_takeover_fails_its_checks(capsys: pytest.CaptureFixture[str]) -> None:
    async with await open_engine("memory://") as engine:
        demo = DemoState(await submit(engine), {})
        for _ in ORDERS:
            claimed = await claim_one(engine, LANE)
            name = next(name for name, execution_id in demo.ids.items() if execution_id == claimed.execution_id)
            await engine.complete(claimed.handle, result=receipt(name))

        demo.flow = await release.submit(engine)
        assert not await check_claims(engine, demo, Screen())

    output = capsys.readouterr().out
    assert "✓ each order completed exactly once" in output
    assert output.count("✗") == 7
    assert "something did not hold" in output


async def test_a_wrong_result_fails_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    async with await open_engine("memory://") as engine:
        demo = DemoState(await submit(engine), {})
        for _ in ORDERS:
            claimed = await claim_one(engine, LANE)
            await engine.complete(claimed.handle, result=b"something else")

        demo.flow = await release.submit(engine)
        assert not await check_claims(engine, demo, Screen())

    assert "✗ each order completed exactly once" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupted_demo_prints_that_it_stopped_and_leaves_no_files(tmp_path: Path) -> None:
    # A shell starts background processes with SIGINT ignored, and tests may run in one: enable it for the demo.
    enable = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    demo = subprocess.Popen(
        [sys.executable, "-c", f"{enable}runpy.run_module('flowfabric.demo', run_name='__main__')"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert demo.stdout is not None
    output = ""
    while "worker-b starts" not in output:
        output += (line := demo.stdout.readline())
        assert line, output

    demo.send_signal(signal.SIGINT)
    output += demo.communicate(timeout=60)[0]

    assert demo.returncode == 130
    assert output.endswith("stopped\n")
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


def test_a_narrow_terminal_does_not_cut_names_and_states() -> None:
    out = io.StringIO()
    statuses = [OrderStatus("order-4", "active", 2, "worker-b", 25), OrderStatus("extract", "completed", 1, "", 100)]

    Console(file=out, width=40, color_system=None).print(render_table(statuses))

    assert max(map(len, out.getvalue().splitlines())) <= 40
    for status in statuses:
        assert re.search(rf"^{status.name} +{status.state} ", out.getvalue(), re.MULTILINE)


def test_a_dumb_terminal_gets_lines_instead_of_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stdout for a terminal
    screen = Screen()
    assert screen.console.is_terminal

    with screen.live_table():
        screen.show([OrderStatus("order-4", "active", 2, "worker-b", 25)])
        assert re.search(r"order-4 +active +attempt 2 +by worker-b$", capsys.readouterr().out.rstrip())
