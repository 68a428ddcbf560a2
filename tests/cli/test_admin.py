"""`ff admin`: commands for operators of a deployment."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flowfabric import Engine
from flowfabric.cli import app
from flowfabric.ids import LaneId, PartitionCounts, solo_partition
from tests.cli.terminal import Terminal


def run(lanes: str, partitions: int | str = 256, *arguments: str) -> Result:
    environ = {"FF_LANES": lanes, "FF_FLOW_PARTITIONS": str(partitions)}
    return CliRunner().invoke(app, ["admin", "partition-collisions", *arguments], env=environ)


def test_lanes_that_share_a_partition_are_listed_with_a_verdict() -> None:
    answer = run("a, b,c", 1)

    assert answer.exit_code == 0
    assert "a, b, c" in answer.stdout
    assert "Remediate: 3 of 3 lanes share a partition with another (3 lanes, 1 partition)" in answer.stdout
    assert json.loads(run("a,b,c", 1, "--json").stdout) == {
        "lanes": 3,
        "partitions": 1,
        "collisions": [{"partition": 0, "lanes": ["a", "b", "c"]}],
        "verdict": "Remediate",
    }


def test_a_single_lane_is_reported_as_clean() -> None:
    assert run("a", 256).stdout == "Clean: no lanes share a partition (1 lane, 256 partitions)\n"


@pytest.mark.parametrize(
    ("count", "pairs", "verdict"), [(10, 0, "Clean"), (50, 1, "Watch"), (40, 1, "Elevated"), (20, 2, "Remediate")]
)
def test_the_verdict_depends_on_the_share_of_colliding_lanes(count: int, pairs: int, verdict: str) -> None:
    by_partition: dict[int, list[str]] = {}
    for number in range(2000):
        lane = f"lane-{number}"
        by_partition.setdefault(solo_partition(LaneId(lane), PartitionCounts()), []).append(lane)
    groups = [*by_partition.values()]
    alone = [group[0] for group in groups[pairs : pairs + count - 2 * pairs]]
    lanes = alone + [lane for group in groups[:pairs] for lane in group[:2]]
    answer = json.loads(run(",".join(lanes), 256, "--json").stdout)
    assert (answer["lanes"], sum(len(one["lanes"]) for one in answer["collisions"])) == (count, 2 * pairs)
    assert answer["verdict"] == verdict


@pytest.mark.parametrize(
    ("lanes", "partitions", "text"),
    [
        ("a,b,a", 256, "named twice: a"),
        ("é", 256, "lane_id"),
        ("a", 0, "is not within"),
        ("a", "x", "FF_FLOW_PARTITIONS: 'x' is not a whole number within 1..65535"),
        (",", 1, "at least one"),
    ],
)
def test_invalid_lanes_or_partitions_exit_with_2(lanes: str, partitions: int | str, text: str) -> None:
    answer = run(lanes, partitions)
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert text in answer.stderr


def test_an_unknown_command_exits_with_2() -> None:
    assert CliRunner().invoke(app, ["admin", "nonsense"]).exit_code == 2


# -- the signing key ----------------------------------------------------------------------------------------------


def test_a_new_key_signs_and_the_previous_one_still_verifies(ff: Terminal) -> None:
    first = ff.stdout("admin", "rotate-secret", "k1")
    second = ff.stdout(
        "admin", "rotate-secret", "k2", "--secret-file", "-", "--grace", "1h", stdin=b"aabbccdd" * 8 + b"\n"
    )

    assert (first, second) == ("✓ k1 signs\n", "✓ k2 signs; k1 verifies for 1h more\n")
    again = ff.run("rotate-secret", "k2", "--secret-file", "-", "--json", stdin=b"AABBCCDD" * 8)
    assert json.loads(again.stdout) == {"rotated": 1, "failed": [], "new_kid": "k2", "previous_kid": None}

    async def kids(engine: Engine) -> Any:
        return await engine.list_waitpoint_hmac_kids()

    known = ff.engine(kids)
    assert (known.current_kid, [one.kid for one in known.verifying]) == ("k2", ["k1"])
    assert "k2 signs; tokens of 1 other key are still valid" in ff.stdout("doctor")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["k1"], "rotation_conflict — This key id exists with another secret. (kid=k1)"),
        (["a:b"], "invalid_kid: a:b"),
        (["k2", "--grace", "soon"], "grace: 'soon' is no length of time"),
        (["k2", "--store", "http://127.0.0.1:1"], "ask it: POST /v1/admin/rotate-waitpoint-secret"),
    ],
)
def test_a_refused_rotation_changes_nothing(ff: Terminal, arguments: list[str], text: str) -> None:
    ff.stdout("admin", "rotate-secret", "k1")
    store = [] if "--store" in arguments else ["--store", ff.store]
    refused = CliRunner().invoke(app, ["admin", "rotate-secret", *arguments, *store])

    assert (refused.exit_code, refused.stdout) == (1, "")
    assert text in refused.stderr
    assert "k1 signs" in ff.stdout("doctor")


def test_the_version_option_prints_the_same_as_the_command() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == CliRunner().invoke(app, ["version"]).stdout


def test_a_key_id_in_use_is_refused_with_a_hint(ff: Terminal) -> None:
    ff.stdout("admin", "rotate-secret", "k1")
    error = ff.refuses("admin", "rotate-secret", "k1")

    assert "rotation_conflict" in error
    assert "Hint: give the new key a name of its own, or the secret that it had: --secret-file" in error
