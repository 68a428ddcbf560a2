"""Every scenario of the specification has a test marked with its number; most of them run on every store."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

# The number of scenarios on each page of the specification; they are numbered without gaps.
PAGES = {"EX": 85, "SS": 72, "S": 97}

# Scenarios about HTTP; their tests are in `tests/server`.
HTTP_ONLY = {"EX-016", "S-096", "S-097"}

# Fixtures that are parametrized with every store.
ON_EVERY_STORE = {"env", "flow", "waits", "engine", "keyless", "store", "flaky"}

Marked = dict[str, list[tuple[Path, set[str]]]]


def numbers() -> list[str]:
    return [f"{page}-{number:03}" for page, count in PAGES.items() for number in range(1, count + 1)]


@pytest.fixture(scope="module")
def marked() -> Marked:
    """Map each scenario number to its marked tests: their file and their fixtures."""
    tests_of: Marked = defaultdict(list)
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for number in _numbers_of(node):
                    tests_of[number].append((path, {argument.arg for argument in node.args.args}))
    return tests_of


def _numbers_of(test: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    marks = [mark for mark in test.decorator_list if isinstance(mark, ast.Call)]
    return [
        argument.value
        for mark in marks
        if ast.unparse(mark.func) == "pytest.mark.spec"
        for argument in mark.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]


def test_every_scenario_has_a_marked_test(marked: Marked) -> None:
    assert [number for number in numbers() if number not in marked] == []


def test_scenarios_about_http_are_tested_on_the_server(marked: Marked) -> None:
    untested = [
        number for number in HTTP_ONLY if all(TESTS / "server" not in path.parents for path, _ in marked[number])
    ]

    assert untested == []


def test_scenarios_of_suspensions_flows_and_limits_run_on_every_store(marked: Marked) -> None:
    expected = [number for number in numbers() if not number.startswith("EX-") and number not in HTTP_ONLY]

    assert [number for number in expected if not any(names & ON_EVERY_STORE for _, names in marked[number])] == []


def test_marks_name_scenarios_that_exist(marked: Marked) -> None:
    known = set(numbers())

    assert [number for number in marked if number not in known and not number.startswith("R")] == []
