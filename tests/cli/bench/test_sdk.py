"""`ff bench sdk` measures tasks through a worker process, and a peer if it can be installed."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from flowfabric.bench import peers
from flowfabric.bench.peers import DRAMATIQ, HUEY, PeerMissing
from flowfabric.bench.peers.starts import count, per_second
from flowfabric.bench.sdk import PeerReport, SdkReport, _peer, sdk
from tests.cli.terminal import Terminal
from tests.valkey_servers import valkey

REPORT = SdkReport(
    store="sqlite",
    durability="WAL",
    versions={"python": "3"},
    cores=2,
    load=3.5,
    rounds=1,
    jobs=10,
    payload_bytes=1000,
    slots=100,
    drain_per_s=5000,
    submit_to_done_p50_ms=3.5,
    submit_to_done_p99_ms=9.5,
    durable_steps=10,
    durable_in_flight=16,
    durable_per_s=300.5,
    peer=PeerReport("huey", "3", "little", 10, 1000),
    drain_ratio=5.0,
)


def assert_sensible(report: SdkReport) -> None:
    assert report.drain_per_s > 0
    assert report.durable_per_s > 0
    assert 0 < report.submit_to_done_p50_ms <= report.submit_to_done_p99_ms


@pytest.fixture
def other_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Installed peers, which only start jobs one after the other; returns which store they got, and how many jobs."""
    scripts, used = tmp_path / "scripts", tmp_path / "used"
    scripts.mkdir()
    for peer in (HUEY, DRAMATIQ):
        home = tmp_path / "peers" / f"{peer.name}-{peer.version}"
        (home / "bin").mkdir(parents=True)
        (home / "complete").touch()
        (home / "bin" / "python").symlink_to(sys.executable)
        (scripts / f"with_{peer.name}.py").write_text(
            "import sys, time\n"
            f"sys.path.insert(0, {str(peers.HERE)!r})\n"
            "from pathlib import Path\n"
            "from starts import note\n"
            f"used = Path({str(used)!r})\n"
            "if sys.argv[1] == 'submit': used.write_text(' '.join(sys.argv[2:]))\n"
            "else:\n"
            "    for _ in range(int(used.read_text().split()[1])): note()\n"
            "    time.sleep(60)\n"
        )
    monkeypatch.setattr(peers, "HERE", scripts)
    monkeypatch.setenv(peers.HOME_VARIABLE, str(tmp_path / "peers"))
    return used.read_text


@pytest.mark.slow
async def test_a_drain_is_compared_with_that_of_the_peer(tmp_path: Path, other_queues: Callable[[], str]) -> None:
    report = await sdk(f"sqlite:///{tmp_path}/app.db", jobs=80, samples=5, functions=4, rounds=1)

    assert_sensible(report)
    assert report.peer is not None
    assert (report.peer.name, report.peer.version, report.peer.jobs) == ("huey", HUEY.version, 20)
    assert report.drain_ratio == pytest.approx(report.drain_per_s / report.peer.drain_per_s, abs=0.02)
    assert report.peer_missing is None
    assert other_queues().startswith(f"{tmp_path}/")


@pytest.mark.slow
async def test_a_drain_on_valkey_is_compared_with_dramatiq_and_with_several_workers(
    other_queues: Callable[[], str],
) -> None:
    report = await sdk(valkey("bench").url(), jobs=80, samples=5, functions=4, rounds=1, workers=2)

    assert_sensible(report)
    assert report.peer is not None
    assert (report.peer.name, report.peer.jobs) == ("dramatiq", 40)
    assert re.fullmatch(r"redis://127\.0\.0\.1:\d+/\d+ 40", other_queues())
    assert report.workers == 2
    assert report.workers_ratio == pytest.approx((report.drain_by_workers_per_s or 0) / report.drain_per_s, abs=0.02)
    assert report.server_us_per_drained is not None
    assert report.server_us_per_drained > 0


async def test_the_rate_counts_from_the_moment_when_every_process_works(tmp_path: Path) -> None:
    stamp, starts = struct.Struct("<qq").pack, tmp_path / "starts"
    second = 1_000_000_000
    alone = [stamp(number * second, 1) for number in range(8)]
    together = [stamp(8 * second + number * second // 4, 1 + number % 2) for number in range(1, 9)]
    starts.write_bytes(b"".join([*alone, *together]))

    assert count(str(starts)) == 16
    assert per_second(str(starts)) == 4


async def test_a_cluster_has_no_peer(valkey_cluster_url: str) -> None:
    assert _peer(valkey_cluster_url) == (None, "dramatiq cannot use a cluster")


@pytest.mark.slow
async def test_tasks_are_measured_on_a_server(database: str) -> None:
    report = await sdk(database, jobs=60, slots=30, samples=5, functions=4, rounds=1, with_peer=False)

    assert_sensible(report)
    assert report.slots == 30
    assert (report.peer, report.drain_ratio, report.peer_missing) == (None, None, "not asked for")


def test_a_peer_that_cannot_be_installed_is_an_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(peers.HOME_VARIABLE, str(tmp_path / "peers"))
    for variable in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1/nothing")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_NO_CACHE", "1")

    with pytest.raises(PeerMissing, match=f"huey {HUEY.version} could not be installed .*FF_BENCH_PEERS names"):
        HUEY.python()
    assert not list((tmp_path / "peers").glob("*"))


@pytest.mark.parametrize("missing", [None, "huey could not be installed"])
def test_the_command_prints_a_table_and_a_missing_peer(missing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(url: str, **_: object) -> SdkReport:
        return REPORT if missing is None else msgspec.structs.replace(REPORT, peer=None, peer_missing=missing)

    monkeypatch.setattr("flowfabric.bench.sdk.sdk", measured)
    answer = Terminal("sqlite:///unused.db").run("bench", "sdk")

    assert answer.exit_code == 0, answer.stderr
    assert re.search(r"functions of 10 steps, 16 in flight +300.5/s", answer.stdout)
    assert "10 jobs of 1000 bytes, 100 slots, 1 round, 2 cores" in answer.stdout
    assert "its load was 3.5 before" in answer.stdout
    assert ("huey 3" in answer.stdout) == (missing is None)
    assert answer.stderr == ("" if missing is None else f"ff: no peer: {missing}\n")


def test_an_interpreter_without_venv_is_a_missing_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.HOME_VARIABLE, str(tmp_path / "peers"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    with pytest.raises(PeerMissing, match="could not be installed"):
        HUEY.python()
    assert not (tmp_path / "peers" / f"huey-{HUEY.version}").exists()


def test_a_memory_store_is_refused(tmp_path: Path) -> None:
    error = Terminal("memory://").refuses("bench", "sdk", "--no-peer")

    assert "a worker in another process cannot use it" in error
