"""`ff serve` as an operator runs it: a process that starts, answers, and stops when told."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FF = [sys.executable, "-c", "from flowfabric.cli import main; main()", "serve"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def serving(folder: Path, **environ: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server on a store of its own; killed when a test forgets it."""
    port = free_port()
    command = [*FF, "--store", f"sqlite:///{folder}/ff.db", "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environ)
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def got(port: int, path: str, patience_s: float = 30) -> Any:
    """The JSON behind a path, as soon as the server answers."""
    until = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return json.loads(answer.read())
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_server_starts_and_stops_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path, FF_API_TOKEN="s3cret-token") as (process, port):
        assert got(port, "/healthz") == {"status": "ok"}
        process.send_signal(number)
        _, said = process.communicate(timeout=30)

    assert process.returncode == 0, said
    lines = [json.loads(line) for line in said.splitlines()]
    assert "listening" in [line["event"] for line in lines]
    assert lines[-1]["event"] == "stopping: requests in flight are finished"
    assert {line["target"] for line in lines} == {"flowfabric.server"}
    assert "bearer tokens are required" in [line["event"] for line in lines]
    assert "s3cret-token" not in said


def test_a_server_without_a_token_logs_a_warning(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, port):
        got(port, "/readyz")
        process.terminate()
        _, said = process.communicate(timeout=30)

    assert "no FF_API_TOKEN is set" in said


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["--host", "0.0.0.0"], {}, "refusing to listen on 0.0.0.0 without a token"),
        ([], {"FF_FLOW_PARTITIONS": "many"}, "invalid value for FF_FLOW_PARTITIONS: 'many' is not a whole number"),
        ([], {"FF_WAITPOINT_HMAC_SECRET": "5ecre7x"}, "invalid value for FF_WAITPOINT_HMAC_SECRET: must be"),
    ],
)
def test_invalid_settings_stop_the_start(
    tmp_path: Path, arguments: list[str], environ: dict[str, str], words: str
) -> None:
    command = [*FF, "--store", f"sqlite:///{tmp_path}/ff.db", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environ)

    assert ended.returncode == 1
    assert words in ended.stderr
    assert "5ecre7x" not in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "ff.db").exists()


def test_an_address_in_use_stops_the_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [*FF, "--store", f"sqlite:///{tmp_path}/ff.db", "--port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert ended.returncode == 1
    assert f"ff: cannot listen on 127.0.0.1:{port}: " in ended.stderr
    assert "address already in use" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_store_with_another_partition_count_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, port):
        got(port, "/healthz")
        process.terminate()
        process.communicate(timeout=30)

    with serving(tmp_path, FF_FLOW_PARTITIONS="64") as (process, _):
        _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "partition_mismatch: num_flow_partitions: stored=256, config=64" in said
    assert "FF_FLOW_PARTITIONS" in said.partition("Hint: ")[2]


def test_plain_logs_can_be_configured(tmp_path: Path) -> None:
    with serving(tmp_path, FF_LOG_FORMAT="plain") as (process, port):
        got(port, "/healthz")
        process.terminate()
        _, said = process.communicate(timeout=30)

    assert f"url=http://127.0.0.1:{port}" in said
    assert "{" not in said


def test_an_unknown_log_format_stops_the_start(tmp_path: Path) -> None:
    with serving(tmp_path, FF_LOG_FORMAT="xml") as (process, _):
        _, said = process.communicate(timeout=30)

    assert process.returncode == 1
    assert "invalid value for FF_LOG_FORMAT: 'xml' is none of auto, json, plain" in said
