"""Ids may be shortened where they are unique, on a store and through a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowfabric import Engine
from tests.cli.terminal import Terminal
from tests.client.server_thread import run_server

ONE = "{fp:86}:0197aaaa-0000-7000-8000-000000000001"
TWO = "{fp:86}:0197aaaa-1111-7000-8000-000000000002"


@pytest.fixture(params=["store", "server"])
def ff(ff: Terminal, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """A terminal with two executions, on their store or on a server in front of it."""

    async def create(engine: Engine) -> None:
        for execution_id, kind in ((ONE, "send"), (TWO, "bill")):
            await engine.create_execution(execution_id=execution_id, lane_id="default", execution_kind=kind)

    ff.engine(create)
    if request.param == "store":
        yield ff
    else:
        with run_server(ff.store) as server:
            yield Terminal(server.url, ff.store)


@pytest.mark.parametrize("short", ["86:0197aaaa-0", "{fp:86}:0197aaaa-0", "0197aaaa-0000", "0197AAAA00"])
def test_every_command_accepts_a_unique_prefix(ff: Terminal, short: str) -> None:
    assert ff.document("show", short)["execution"]["execution_id"] == ONE
    assert ff.document("explain", short)["execution_id"] == ONE
    assert ff.document("tail", short, "--no-follow")["execution_id"] == ONE
    assert ff.says("signal", short, "go").startswith("✓ sent")
    assert ff.says("cancel", short) == f"✓ {ONE} is cancelled\n"
    assert ff.run("result", short).exit_code == 3
    assert ff.says("replay", short) == f"✓ {ONE} is waiting\n"


@pytest.mark.parametrize("command", [("show",), ("cancel",), ("result",), ("explain",)])
def test_an_ambiguous_prefix_lists_the_matches_and_changes_nothing(ff: Terminal, command: tuple[str]) -> None:
    said = ff.refuses(*command, "0197aaaa")

    assert "more than one begins with '0197aaaa'; give more of it:" in said
    assert said.splitlines()[1:] == [f"  {ONE}  send", f"  {TWO}  bill"]
    assert {one["public_state"] for one in ff.document("ls")["executions"]} == {"waiting"}


def test_a_prefix_without_a_match_is_reported(ff: Terminal) -> None:
    said = ff.refuses("cancel", "0197b")

    assert "execution_not_found: no id begins with '0197b'" in said
    assert "Hint: `ff ls` shows which executions there are" in said


def test_budgets_are_found_by_a_prefix_of_their_id(ff: Terminal) -> None:
    budgets = ["0b000000-0000-4000-8000-000000000001", "0b000000-1000-4000-8000-000000000001"]

    async def create(engine: Engine) -> None:
        for budget in budgets:
            await engine.create_budget(budget, dimensions=["tokens"], hard_limits=[9], soft_limits=[5])

    ff.engine(create)

    assert ff.document("budgets", "0b000000-1")["budgets"][0]["budget_id"] == budgets[1]
    assert ff.document("budgets", "0b0000000000")["budgets"][0]["budget_id"] == budgets[0]
    assert all(budget in ff.refuses("budgets", "0b") for budget in budgets)
    assert "no id begins with '0c'" in ff.refuses("budgets", "0c")
