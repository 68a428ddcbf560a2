"""Commands on Valkey, as on every store; and what `ff doctor` says about its servers."""

from __future__ import annotations

import json

import msgspec
import pytest
from typer.testing import CliRunner

from flowfabric import Engine
from flowfabric.cli import app
from flowfabric.ids import DEFAULT_PARTITIONS, LaneId, solo_partition
from flowfabric.model.deployment import NodeLoad
from flowfabric.stores.valkey import durability
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.node_load import measure_nodes
from tests.cli.terminal import Terminal

MAIL = LaneId("mail")


@pytest.fixture
def ff(valkey_url: str) -> Terminal:
    """A terminal on an empty database of the server."""
    return migrated(valkey_url)


def migrated(url: str) -> Terminal:
    terminal = Terminal(url)
    terminal.stdout("migrate")
    return terminal


def checks_of(ff: Terminal) -> dict[str, dict[str, object]]:
    return {one["check"]: one for one in json.loads(ff.run("doctor", "--json").stdout)["checks"]}


def test_the_environment_names_the_server(ff: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFABRIC_URL", ff.store)

    answer = CliRunner().invoke(app, ["submit", "--payload", "hi", "--lane", MAIL, "--key", "k"])

    assert answer.exit_code == 0, answer.stderr
    assert answer.stdout.strip() in ff.stdout("ls", "--lane", MAIL)
    assert ff.submit("--payload", "hi", "--lane", MAIL, "--key", "k") == answer.stdout.strip()


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("valkey_url", "", durability.EVERY_SECOND),
        ("valkey_url", "?durability=fsync", durability.ON_DISK),
        ("valkey_cluster_url", "", f"{durability.EVERY_SECOND}; {durability.FAILOVER_LOSES}"),
        ("valkey_cluster_url", "?wait=1", f"{durability.EVERY_SECOND}; {durability.FAILOVER_SAFE}"),
    ],
)
def test_the_doctor_says_what_acknowledged_writes_survive(
    url: str, options: str, says: str, request: pytest.FixtureRequest
) -> None:
    found = checks_of(migrated(request.getfixturevalue(url) + options))

    assert found["durable"] == {"check": "durable", "ok": True, "says": says, "hint": None}
    assert "servers" not in found


def test_the_doctor_names_a_lane_that_fills_its_server(
    valkey_cluster_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ff, home = migrated(valkey_cluster_url), solo_partition(MAIL, DEFAULT_PARTITIONS)
    assert checks_of(ff)["lanes"]["ok"], "no server is busy"

    async def submit(engine: Engine) -> None:
        for lane in (MAIL, MAIL, MAIL, "other"):
            await engine.create_execution(execution_id=engine.new_execution_id(lane), lane_id=lane)

    async def busy(client: ValkeyClient, partitions: int) -> list[NodeLoad]:
        loads = await measure_nodes(client, partitions)
        return [msgspec.structs.replace(one, cpu=0.9 if home in one.partitions else 0.1) for one in loads]

    ff.engine(submit)
    monkeypatch.setattr(durability, "measure_nodes", busy)

    found = checks_of(ff)["lanes"]

    assert not found["ok"]
    assert f"lane {MAIL} has " in str(found["says"])
    assert "which uses 90% of a core" in str(found["says"])
    assert f"ff lanes {MAIL} --spread 8" in str(found["hint"])
