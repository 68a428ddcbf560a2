"""The output of `ff worker` and `ff serve` on a terminal."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowfabric.cli.commands.worker import status_text
from flowfabric.cli.status import CLEAR, StatusLine
from tests.cli.pseudo_terminal import on_terminal
from tests.cli.terminal import Terminal

APP = """
from flowfabric import Fabric, Fatal

app = Fabric("sqlite:///ff.db")

@app.task(name="say")
async def say(word: str) -> str:
    print("said", word)
    if word == "no":
        raise Fatal("not allowed")
    return word
"""
STATUS = r"\d+ running · \d+ done · \d+ failed · \d+/s"


def test_a_worker_on_a_terminal_shows_a_status_line(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    ff = Terminal(f"sqlite:///{tmp_path}/ff.db")
    ff.stdout("migrate")
    with on_terminal("worker", "shop:app", folder=tmp_path) as worker:
        worker.until("0 running · 0 done · 0 failed · 0/s")
        for word in ("hello", "no"):
            ff.submit("--kind", "say", "--payload", json.dumps({"word": word}))
        worker.until("0 running · 1 done · 1 failed")
        text = worker.stop()

    assert worker.process.returncode == 0, text
    assert f"{CLEAR}said hello\r\n" in text, "the output of a handler has its own line"
    last = text.rpartition(CLEAR)[2]
    assert "stopped after 1 completed, 1 attempt failed" in last
    assert re.search(STATUS, last) is None


def test_a_worker_without_a_terminal_shows_no_status_line(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        APP.replace("return word", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    )
    ff = Terminal(f"sqlite:///{tmp_path}/ff.db")
    ff.stdout("migrate")
    ff.submit("--kind", "say", "--payload", '{"word": "hello"}')

    command = [sys.executable, "-m", "flowfabric.cli", "worker", "shop:app"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert ended.stdout == "said hello\n"
    assert "\x1b" not in ended.stderr
    assert re.search(STATUS, ended.stderr) is None


def test_the_status_text_contains_all_counters() -> None:
    assert status_text(3, 1200, 1, 40.4) == "3 running · 1,200 done · 1 failed · 40/s"


def test_the_status_line_stays_below_output_and_waits_for_complete_lines() -> None:
    screen = io.StringIO()
    status = StatusLine(screen)

    status.show("busy")
    status.write_above(screen, "half a ")
    status.show("idle")
    status.write_above(screen, "line\n")
    status.show("idle")
    status.close()
    status.close()

    assert screen.getvalue() == f"busy{CLEAR}half a line\nidle{CLEAR}"


@pytest.mark.parametrize(
    ("form", "is_plain"), [(None, True), ("auto", True), ("plain", True), ("json", False)], ids=str
)
def test_serve_logs_plain_text_on_a_terminal_by_default(tmp_path: Path, form: str | None, is_plain: bool) -> None:
    environ = {} if form is None else {"FF_LOG_FORMAT": form}
    with on_terminal("serve", "--port", "0", folder=tmp_path, environ=environ) as server:
        server.until("listening")
        server.until("url")
        text = server.stop()

    assert bool(re.search(r"\d\d:\d\d:\d\d info +listening  .*url=http://127\.0\.0\.1:\d+", text)) == is_plain
    assert ('"event":"listening"' in text) != is_plain
