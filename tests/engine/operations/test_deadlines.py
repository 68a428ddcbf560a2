"""How soon a silent connection is abandoned: settings, URL options and socket options."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from flowfabric import Deadlines, Fabric, Settings, connect, errors
from flowfabric.connector import open_store, parse_postgres_url, postgres_deadlines
from flowfabric.sdk.worker.worker import Worker
from flowfabric.stores.postgres import PostgresStore
from tests.client.server_thread import run_server

URL = "postgresql://u@h:1/d"


def test_a_url_sets_deadlines_with_the_names_of_libpq() -> None:
    url = (
        f"{URL}?connect_timeout=3&command_timeout=1.5&keepalives_idle=9&sslmode=disable&keepalives_interval=4"
        "&keepalives_count=2&tcp_user_timeout=700"
    )
    assert postgres_deadlines(url) == Deadlines(
        connect_s=3.0,
        command_s=1.5,
        keepalives_idle_s=9,
        keepalives_interval_s=4,
        keepalives_count=2,
        tcp_user_timeout_ms=700,
    )
    assert parse_postgres_url(url) == (f"{URL}?sslmode=disable", None), "the driver hears of its own options only"


def test_deadlines_that_a_url_does_not_set_come_from_the_settings() -> None:
    given = Deadlines(command_s=3.0, connect_s=2.0)
    assert postgres_deadlines(f"{URL}?command_timeout=4", given) == Deadlines(command_s=4.0, connect_s=2.0)
    assert postgres_deadlines(URL, given) == given


@pytest.mark.parametrize(
    "option",
    ["command_timeout=soon", "command_timeout=", "command_timeout=-1", "command_timeout=nan", "keepalives_idle=1.5"],
)
def test_a_deadline_without_a_positive_value_is_refused(option: str) -> None:
    with pytest.raises(errors.InvalidInput, match=option.partition("=")[0]):
        open_store(f"{URL}?{option}")


@pytest.mark.parametrize(
    ("own", "limit", "expected"), [(10.0, 4.0, 4.0), (3.0, 4.0, 3.0), (0.0, 4.0, 4.0), (10.0, 0.1, 1.0)]
)
def test_a_worker_shortens_a_deadline_and_never_lengthens_it(own: float, limit: float, expected: float) -> None:
    assert Deadlines(command_s=own).limited(limit).command_s == expected


def test_a_disabled_deadline_sets_no_option() -> None:
    off = Deadlines(command_s=0, connect_s=0, keepalives_idle_s=0, keepalives_interval_s=0, keepalives_count=0)
    assert [name for _, name, _ in off.socket_options()] == [socket.TCP_USER_TIMEOUT]
    assert off.server_limits() == {}
    assert list(off.server_settings()) == ["tcp_user_timeout"]


async def test_postgres_sockets_use_keepalive_on_both_ends(database: str) -> None:
    store = PostgresStore(database, deadlines=Deadlines(keepalives_idle_s=7, tcp_user_timeout_ms=4321))
    await store.open(migrate=False)

    async def read_socket_options(connection: object) -> tuple[int, int, int, str]:
        found = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined]
        on = found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, unanswered = (
            found.getsockopt(socket.IPPROTO_TCP, one) for one in (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT)
        )
        return on, idle, unanswered, await connection.fetchval("show tcp_keepalives_idle")  # type: ignore[attr-defined]

    assert await store._pool.read(read_socket_options) == (1, 7, 4321, "7")
    await store.close()


async def test_a_client_reads_its_timeout_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_server(f"sqlite:///{tmp_path / 'app.db'}") as server:
        monkeypatch.setenv("FLOWFABRIC_TIMEOUT", "2.5")
        async with await connect(server.url) as engine:
            assert engine.transport.deadlines == Deadlines(command_s=2.5)  # type: ignore[attr-defined]
        monkeypatch.setenv("FLOWFABRIC_TIMEOUT", "long")
        with pytest.raises(errors.InvalidInput, match="FLOWFABRIC_TIMEOUT"):
            await connect(server.url)


async def test_a_worker_limits_commands_to_less_than_its_lease(database: str) -> None:
    app = Fabric(database, settings=Settings(deadlines=Deadlines(command_s=60)))

    @app.task
    async def nothing() -> None: ...

    async with app:
        await Worker(app, lease_ttl="9s")._start()
        assert (await app.engine()).store._pool.deadlines.command_s == 6.0  # type: ignore[attr-defined]
