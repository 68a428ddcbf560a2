"""`ff worker`, as a process: it finds the app, works, drains on SIGTERM, and starts anew when the code changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowfabric.cli.reload import modification_times
from tests.cli.terminal import Terminal
from tests.postgres_install import ROOT

CODE = """
import asyncio
from pathlib import Path
from flowfabric import Fabric

app = Fabric()

@app.task(name="say", lane="{lane}")
async def say(word: str) -> str:
    Path("began").touch()
    while Path("hold").exists():
        await asyncio.sleep(0.01)
    return "{version} " + word
"""


class Yard:
    """A folder with an app, and a worker process in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ff = Terminal(f"sqlite:///{folder}/ff.db")
        self.process: subprocess.Popen[bytes] | None = None
        self.write("old")

    def write(self, version: str, lane: str = "default") -> None:
        (self.folder / "shop.py").write_text(CODE.format(version=version, lane=lane))

    def start(self, *arguments: str, url: str = "sqlite:///ff.db") -> None:
        command = [sys.executable, "-m", "flowfabric.cli", "worker", "shop:app", *arguments]
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FLOWFABRIC_URL": url}
        self.log = (self.folder / "log").open("w")
        self.process = subprocess.Popen(command, cwd=self.folder, env=environ, stderr=self.log, stdout=self.log)

    def said(self) -> str:
        return (self.folder / "log").read_text()

    def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.02)

    def submit(self, word: str) -> str:
        return self.ff.submit("--kind", "say", "--payload", f'{{"word": "{word}"}}')

    def result(self, execution: str) -> str | None:
        found = self.ff.document("show", execution)["result"]
        return found and str(found["text"])

    def end(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        self.log.close()


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path)
    yard.ff.says("migrate")
    yield yard
    yard.close()


def test_sigterm_drains_a_worker(yard: Yard) -> None:
    (yard.folder / "hold").touch()
    yard.start("--slots", "1", "--lanes", "default", "--capabilities", "gpu,cpu")
    running, waiting = yard.submit("hello"), yard.submit("again")
    yard.until((yard.folder / "began").exists)

    assert yard.process is not None
    yard.process.send_signal(signal.SIGTERM)
    yard.until(lambda: "draining" in yard.said())  # before, the next one would still be taken
    (yard.folder / "hold").unlink()

    assert yard.process.wait(30) == 0, yard.said()
    states = {one: yard.ff.document("show", one)["execution"]["public_state"] for one in (running, waiting)}
    assert sorted(states.values()) == ["completed", "waiting"]
    assert "1 task, lane default, 1 slot\n" in yard.said()
    assert "stopped after" in yard.said()


def test_a_lane_without_tasks_is_reported(yard: Yard) -> None:
    yard.start("--lanes", "default,defualt")
    yard.until(lambda: "lanes default, defualt" in yard.said())
    yard.until(lambda: "no task of the app is in lane defualt" in yard.said())
    assert yard.end() == 0, yard.said()


def test_the_store_option_overrides_the_store_of_the_app(yard: Yard) -> None:
    yard.start("--store", yard.ff.store, url="sqlite:///unused.db")
    execution = yard.submit("hello")
    yard.until(lambda: yard.result(execution) is not None)

    assert yard.end() == 0
    assert not (yard.folder / "unused.db").exists()


def test_a_second_sigterm_releases_work_without_costing_an_attempt(yard: Yard) -> None:
    (yard.folder / "hold").touch()
    yard.start("--grace", "1h")
    execution = yard.submit("hello")
    yard.until((yard.folder / "began").exists)

    assert yard.process is not None
    yard.process.send_signal(signal.SIGTERM)
    yard.until(lambda: "draining" in yard.said())  # two signals of one number at the same instant are one
    yard.process.send_signal(signal.SIGTERM)

    assert yard.process.wait(30) == 0, yard.said()
    found = yard.ff.document("show", execution)
    assert len(found["attempts"]) == 1
    assert found["execution"]["public_state"] in ("waiting", "delayed")


@pytest.mark.slow
def test_reload_restarts_the_worker_with_the_new_code(yard: Yard) -> None:
    yard.start("--reload")
    first = yard.submit("one")
    yard.until(lambda: yard.result(first) is not None)
    assert yard.result(first) == '"old one"'

    (yard.folder / "shop.py").write_text("this is no Python")
    yard.until(lambda: "SyntaxError" in yard.said())
    yard.write("new")
    second = yard.submit("two")
    yard.until(lambda: yard.result(second) is not None)

    assert yard.result(second) == '"new two"'
    assert yard.said().count("↻ shop.py changed") == 2
    assert yard.end() == 0, yard.said()


@pytest.mark.slow
def test_a_worker_whose_reloader_was_killed_drains(yard: Yard) -> None:
    yard.start("--reload")
    first = yard.submit("one")
    yard.until(lambda: yard.result(first) is not None)

    assert yard.process is not None
    yard.process.kill()
    yard.process.wait()

    end = time.monotonic() + 20
    while "stopped after" not in yard.said():
        assert time.monotonic() < end, yard.said()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("nowhere:app", "there is no module 'nowhere' here"),
        ("json.nowhere:app", "there is no module 'json.nowhere' here"),
        ("json:wrong", "json has no Fabric named 'wrong'; it has none"),
        ("json", "say which Fabric of json is meant, as in json:app; it has none"),
        (":app", "':app' is not MODULE:APP"),
        ("./shop.py:app", "'./shop.py:app' is not MODULE:APP, as in shop.tasks:app; a module is named as an import"),
        ("shop.py", "'shop.py' is not MODULE:APP"),
        (".shop:app", "'.shop:app' is not MODULE:APP"),
    ],
)
def test_a_missing_app_is_reported(ff: Terminal, target: str, text: str) -> None:
    assert text in ff.refuses("worker", target)


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("wrong_way", "app.task(retry=3)(print)", "retry: 3 is no Retry; write retry=Retry(max=3)"),
        ("wrong_import", "import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("wrong_value", "int('x')", "ValueError: invalid literal"),
        ("wrong_words", "def (", "SyntaxError: invalid syntax"),
    ],
)
def test_an_app_that_does_not_load_is_reported_with_the_failing_line(
    ff: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: str, told: str
) -> None:
    (tmp_path / f"{name}.py").write_text(f"from flowfabric import Fabric\napp = Fabric()\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    answer = ff.run("worker", f"{name}:app")
    assert answer.exit_code == 1
    assert f'{name}.py", line 3' in answer.stderr
    assert told in answer.stderr
    assert "importlib" not in answer.stderr


def test_python_files_are_watched_for_changes(tmp_path: Path) -> None:
    for name in ("a.py", "deep/b.py", "notes.txt", ".venv/c.py", "__pycache__/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    assert {name for name, _ in modification_times(tmp_path)} == {"a.py", "deep/b.py"}
    before = modification_times(tmp_path)
    os.utime(tmp_path / "a.py", ns=(1, 1))
    assert modification_times(tmp_path) != before
