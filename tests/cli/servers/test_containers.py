"""The container files are well formed and agree with the command line; no container engine is needed."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner

from flowfabric.cli import app
from flowfabric.connector import open_engine

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent  # where `ff` is installed
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
HEALTH_CONDITIONS = {"service_healthy", "service_completed_successfully"}


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile and their arguments."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_dockerfile_has_known_instructions_and_ends_as_a_user_without_rights() -> None:
    found = instructions()
    known = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"}

    assert {word for word, _ in found} <= known
    last_stage = max(number for number, (word, _) in enumerate(found) if word == "FROM")
    final = dict(found[last_stage:])
    assert final["USER"] == "flowfabric"
    assert final["ENTRYPOINT"] == '["ff"]'
    assert final["STOPSIGNAL"] == "SIGTERM"


def test_the_dockerfile_copies_files_that_exist() -> None:
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            *sources, _ = shlex.split(rest)
            assert [name for name in sources if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "build" in service])
def test_a_service_runs_a_command_of_ff_with_options_that_it_has(name: str) -> None:
    command, *arguments = SERVICES[name]["command"]

    help_text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output

    assert "Usage: " in help_text
    assert [word for word in arguments if word.startswith("--") and word not in help_text] == []


def test_long_running_services_have_health_checks_and_wait_for_each_other() -> None:
    for name, service in SERVICES.items():
        for other, wanted in service.get("depends_on", {}).items():
            assert other in SERVICES
            assert wanted["condition"] in HEALTH_CONDITIONS
            if wanted["condition"] == "service_healthy":
                assert SERVICES[other]["healthcheck"]["test"]
        if name != "migrate":
            check = service["healthcheck"]
            assert check["test"][0] in ("CMD", "CMD-SHELL")
            assert {"interval", "timeout", "retries"} <= check.keys()


async def test_the_worker_is_healthy_while_the_registry_has_one_of_its_container(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    kind, command = SERVICES["worker"]["healthcheck"]["test"]
    environ = {**os.environ, "FLOWFABRIC_URL": url, "HOSTNAME": "c0ffee", "PATH": f"{BIN}:{os.environ['PATH']}"}

    def check() -> int:
        return subprocess.run(["sh", "-c", command.replace("$$", "$")], env=environ, timeout=60).returncode

    assert kind == "CMD-SHELL"
    async with await open_engine(url) as engine:
        for host, healthy in (("decafbad", False), ("c0ffee", True)):
            await engine.register_worker(
                namespace="default",
                worker_instance_id=f"{host}:1:aa",
                worker_id=host,
                lanes=["default"],
                liveness_ttl_ms=60_000,
            )
            assert (await asyncio.to_thread(check) == 0) is healthy


def test_volumes_are_declared_and_mounted_folders_exist() -> None:
    for service in SERVICES.values():
        for mount in service.get("volumes", ()):
            source = mount.partition(":")[0]
            assert (ROOT / source).is_dir() if source.startswith(".") else source in COMPOSE["volumes"]


def test_the_worker_of_the_composition_finds_its_app() -> None:
    target = SERVICES["worker"]["command"][1]
    module, _, name = target.partition(":")

    assert f"{name} = Fabric(" in (ROOT / "examples" / f"{module}.py").read_text()
    assert SERVICES["server"]["environment"]["FF_API_TOKEN"].startswith("${FF_API_TOKEN:?")
