"""`ff serve` as a process."""

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

from tests.processes import free_port

FF = [sys.executable, "-c", "from flowfabric.cli import main; main()", "serve"]


@contextmanager
def run_serve(folder: Path, **environ: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a server on a new store; it is killed at the end."""
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


def get_json(port: int, path: str, timeout_s: float = 30) -> Any:
    """Return the JSON of a path, as soon as the server answers."""
    until = time.monotonic() + timeout_s
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
    with run_serve(tmp_path, FF_API_TOKEN="s3cret-token") as (process, port):
        assert get_json(port, "/healthz") == {"status": "ok"}
        process.send_signal(number)
        _, output = process.communicate(timeout=30)

    assert process.returncode == 0, output
    lines = [json.loads(line) for line in output.splitlines()]
    assert "listening" in [line["event"] for line in lines]
    assert lines[-1]["event"] == "stopping: requests in flight are finished"
    assert {line["target"] for line in lines} == {"flowfabric.server"}
    assert "bearer tokens are required" in [line["event"] for line in lines]
    assert "s3cret-token" not in output


def test_a_server_without_a_token_logs_a_warning(tmp_path: Path) -> None:
    with run_serve(tmp_path) as (process, port):
        get_json(port, "/readyz")
        process.terminate()
        _, output = process.communicate(timeout=30)

    assert "no FF_API_TOKEN is set" in output


@pytest.mark.parametrize(
    ("arguments", "environ", "text"),
    [
        (["--host", "0.0.0.0"], {}, "refusing to listen on 0.0.0.0 without a token"),
        ([], {"FF_FLOW_PARTITIONS": "many"}, "invalid value for FF_FLOW_PARTITIONS: 'many' is not a whole number"),
        ([], {"FF_WAITPOINT_HMAC_SECRET": "5ecre7x"}, "invalid value for FF_WAITPOINT_HMAC_SECRET: must be"),
    ],
)
def test_invalid_settings_stop_the_start(
    tmp_path: Path, arguments: list[str], environ: dict[str, str], text: str
) -> None:
    command = [*FF, "--store", f"sqlite:///{tmp_path}/ff.db", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environ)

    assert ended.returncode == 1
    assert text in ended.stderr
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
    with run_serve(tmp_path) as (process, port):
        get_json(port, "/healthz")
        process.terminate()
        process.communicate(timeout=30)

    with run_serve(tmp_path, FF_FLOW_PARTITIONS="64") as (process, _):
        _, output = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "partition_mismatch: num_flow_partitions: stored=256, config=64" in output
    assert "FF_FLOW_PARTITIONS" in output.partition("Hint: ")[2]


def test_plain_logs_can_be_configured(tmp_path: Path) -> None:
    with run_serve(tmp_path, FF_LOG_FORMAT="plain") as (process, port):
        get_json(port, "/healthz")
        process.terminate()
        _, output = process.communicate(timeout=30)

    assert f"url=http://127.0.0.1:{port}" in output
    assert "{" not in output


def test_an_unknown_log_format_stops_the_start(tmp_path: Path) -> None:
    with run_serve(tmp_path, FF_LOG_FORMAT="xml") as (process, _):
        _, output = process.communicate(timeout=30)

    assert process.returncode == 1
    assert "invalid value for FF_LOG_FORMAT: 'xml' is not one of auto, json, plain" in output
