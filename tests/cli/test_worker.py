"""`ff worker` as a process: it loads the app, drains on SIGTERM, and restarts when the code changes."""

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


class WorkerProcess:
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

    def log_text(self) -> str:
        return (self.folder / "log").read_text()

    def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, self.log_text()
            assert time.monotonic() < end, self.log_text()
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
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(tmp_path)
    worker.ff.stdout("migrate")
    yield worker
    worker.close()


def test_sigterm_drains_a_worker(worker: WorkerProcess) -> None:
    (worker.folder / "hold").touch()
    worker.start("--slots", "1", "--lanes", "default", "--capabilities", "gpu,cpu")
    running, waiting = worker.submit("hello"), worker.submit("again")
    worker.until((worker.folder / "began").exists)

    assert worker.process is not None
    worker.process.send_signal(signal.SIGTERM)
    worker.until(lambda: "draining" in worker.log_text())  # before that, the next execution would still be claimed
    (worker.folder / "hold").unlink()

    assert worker.process.wait(30) == 0, worker.log_text()
    states = {one: worker.ff.document("show", one)["execution"]["public_state"] for one in (running, waiting)}
    assert sorted(states.values()) == ["completed", "waiting"]
    assert "1 task, lane default, 1 slot\n" in worker.log_text()
    assert "stopped after" in worker.log_text()


def test_a_lane_without_tasks_is_reported(worker: WorkerProcess) -> None:
    worker.start("--lanes", "default,defualt")
    worker.until(lambda: "lanes default, defualt" in worker.log_text())
    worker.until(lambda: "no task of the app is in lane defualt" in worker.log_text())
    assert worker.end() == 0, worker.log_text()


def test_the_store_option_overrides_the_store_of_the_app(worker: WorkerProcess) -> None:
    worker.start("--store", worker.ff.store, url="sqlite:///unused.db")
    execution = worker.submit("hello")
    worker.until(lambda: worker.result(execution) is not None)

    assert worker.end() == 0
    assert not (worker.folder / "unused.db").exists()


def test_a_second_sigterm_releases_work_without_costing_an_attempt(worker: WorkerProcess) -> None:
    (worker.folder / "hold").touch()
    worker.start("--grace", "1h")
    execution = worker.submit("hello")
    worker.until((worker.folder / "began").exists)

    assert worker.process is not None
    worker.process.send_signal(signal.SIGTERM)
    worker.until(lambda: "draining" in worker.log_text())  # two equal signals at the same instant are delivered once
    worker.process.send_signal(signal.SIGTERM)

    assert worker.process.wait(30) == 0, worker.log_text()
    found = worker.ff.document("show", execution)
    assert len(found["attempts"]) == 1
    assert found["execution"]["public_state"] in ("waiting", "delayed")


@pytest.mark.slow
def test_reload_restarts_the_worker_with_the_new_code(worker: WorkerProcess) -> None:
    worker.start("--reload")
    first = worker.submit("one")
    worker.until(lambda: worker.result(first) is not None)
    assert worker.result(first) == '"old one"'

    (worker.folder / "shop.py").write_text("this is no Python")
    worker.until(lambda: "SyntaxError" in worker.log_text())
    worker.write("new")
    second = worker.submit("two")
    worker.until(lambda: worker.result(second) is not None)

    assert worker.result(second) == '"new two"'
    assert worker.log_text().count("↻ shop.py changed") == 2
    assert worker.end() == 0, worker.log_text()


@pytest.mark.slow
def test_a_worker_whose_reloader_was_killed_drains(worker: WorkerProcess) -> None:
    worker.start("--reload")
    first = worker.submit("one")
    worker.until(lambda: worker.result(first) is not None)

    assert worker.process is not None
    worker.process.kill()
    worker.process.wait()

    end = time.monotonic() + 20
    while "stopped after" not in worker.log_text():
        assert time.monotonic() < end, worker.log_text()
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
    ("name", "line", "error"),
    [
        ("wrong_option", "app.task(retry=3)(print)", "retry: 3 is no Retry; write retry=Retry(max=3)"),
        ("wrong_import", "import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("wrong_value", "int('x')", "ValueError: invalid literal"),
        ("wrong_syntax", "def (", "SyntaxError: invalid syntax"),
    ],
)
def test_an_app_that_does_not_load_is_reported_with_the_failing_line(
    ff: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: str, error: str
) -> None:
    (tmp_path / f"{name}.py").write_text(f"from flowfabric import Fabric\napp = Fabric()\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    answer = ff.run("worker", f"{name}:app")
    assert answer.exit_code == 1
    assert f'{name}.py", line 3' in answer.stderr
    assert error in answer.stderr
    assert "importlib" not in answer.stderr


def test_python_files_are_watched_for_changes(tmp_path: Path) -> None:
    for name in ("a.py", "deep/b.py", "notes.txt", ".venv/c.py", "__pycache__/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    assert {name for name, _ in modification_times(tmp_path)} == {"a.py", "deep/b.py"}
    before = modification_times(tmp_path)
    os.utime(tmp_path / "a.py", ns=(1, 1))
    assert modification_times(tmp_path) != before
