"""`ff priority`: one execution, or all that a filter finds; and what a token for reading may do."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowfabric import Engine
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server import ServerSettings
from flowfabric.settings import Secret
from tests.cli.terminal import Terminal
from tests.client.server_thread import run_server


@pytest.fixture
def ff(ff_or_server: Terminal) -> Terminal:
    return ff_or_server


def priorities(ff: Terminal, *executions: str) -> list[int]:
    async def read(engine: Engine) -> list[int]:
        found = [await engine.describe_execution(execution) for execution in executions]
        return [-1 if one is None else one.priority for one in found]

    return ff.engine(read)


def test_the_priority_of_one_execution_is_changed(ff: Terminal) -> None:
    first, second = ff.submit(), ff.submit()

    assert f"{first} has priority 7" in ff.stdout("priority", first, "--to", "7")
    assert ff.document("priority", second, "--to", "3") == {"execution_id": second, "priority": 3}

    assert priorities(ff, first, second) == [7, 3]


def test_the_priority_of_all_that_a_filter_finds_is_changed(ff: Terminal) -> None:
    mail, other = [ff.submit("--lane", "mail") for _ in range(3)], ff.submit()

    preview = ff.document("priority", "--where", "lane=mail", "--to", "9", "--dry-run")
    assert (preview["count"], priorities(ff, *mail)) == (3, [0, 0, 0])
    done = ff.document("priority", "--where", "lane=mail", "--to", "9", "--yes", "--reason", "a big customer")

    assert (done["changed"], done["refused"], done["state"]) == (3, 0, "completed")
    assert priorities(ff, *mail, other) == [9, 9, 9, 0]


def test_either_an_execution_or_a_filter_is_named(ff: Terminal) -> None:
    assert ff.run("priority", "--to", "1").exit_code == 2
    assert ff.run("priority", ff.submit(), "--where", "lane=mail", "--to", "1").exit_code == 2


def test_a_token_for_reading_shows_an_execution_and_changes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Terminal(f"sqlite:///{tmp_path}/read.db")
    store.stdout("migrate")
    execution = store.submit()

    async def make_token(engine: Engine) -> str:
        return (await engine.make_api_token("reader", [ApiScope.READ])).token

    token = store.engine(make_token)
    with run_server(store.store, ServerSettings(api_token=Secret("root"))) as server:
        reader = Terminal(server.url, store.store)
        monkeypatch.setenv("FF_API_TOKEN", token)
        assert reader.document("show", execution)["execution"]["execution_id"] == execution
        assert execution in reader.stdout("ls")
        assert "token lacks scope: operate" in reader.refuses("priority", execution, "--to", "1")
    assert priorities(store, execution) == [0]
