"""Every scenario of the specification has a test named by its id; those of waits, flows and limits on every store."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

# How many scenarios each page has; they are numbered without gaps.
PAGES = {"ex": 85, "ss": 72, "s": 97}

# What is seen only through a door that the engine does not have, and where its test belongs once that place is there.
BEHIND_A_DOOR = {
    "ex_016": "server",  # status codes and the size of a body
    "s_096": "server",  # errors as status codes
    "s_097": "server",  # creation as status codes
}

# Fixtures that stand on `store`, which is each store in turn.
ON_EVERY_STORE = {"play", "flow", "waits", "engine", "keyless", "store", "wire"}


def ids() -> list[str]:
    return [f"{page}_{number:03}" for page, count in PAGES.items() for number in range(1, count + 1)]


def by_id() -> dict[str, list[tuple[Path, set[str]]]]:
    """For each id the tests that are named by it: where they are and which fixtures they take."""
    known = set(ids())
    found: dict[str, list[tuple[Path, set[str]]]] = defaultdict(list)
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                name = "_".join(node.name.split("_")[1:3])
                if name in known:
                    found[name].append((path, {argument.arg for argument in node.args.args}))
    return found


@pytest.fixture(scope="module")
def named() -> dict[str, list[tuple[Path, set[str]]]]:
    return by_id()


def test_every_scenario_has_a_test_named_by_its_id(named: dict[str, list[tuple[Path, set[str]]]]) -> None:
    missing = [one for one in ids() if one not in named and one not in BEHIND_A_DOOR]

    assert missing == []


def test_scenarios_behind_a_door_are_tested_there(named: dict[str, list[tuple[Path, set[str]]]]) -> None:
    there = [one for one, place in BEHIND_A_DOOR.items() if (TESTS / place).exists()]
    missing = [one for one in there if one not in named]

    assert missing == []


def test_every_scenario_of_waits_flows_and_limits_runs_on_every_store(
    named: dict[str, list[tuple[Path, set[str]]]],
) -> None:
    asked = [one for one in ids() if not one.startswith("ex_") and one not in BEHIND_A_DOOR]
    elsewhere = [one for one in asked if not any(taken & ON_EVERY_STORE for _, taken in named[one])]

    assert elsewhere == []
