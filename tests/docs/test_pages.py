"""The code of the pages runs, and their generated parts are current."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import flowfabric
from tests.docs import reference, security, states
from tests.docs.pages import blocks, run_module
from tests.postgres_install import ROOT

DOCS = ROOT / "docs"
TYPED = {"tutorial.md"}  # tested by test_tutorial
PAGES = sorted(page.name for page in DOCS.glob("*.md") if page.name not in TYPED and any(blocks(page)))


@pytest.mark.parametrize("name", PAGES)
async def test_the_code_of_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.chdir(tmp_path)
    found = blocks(DOCS / name)

    ran = await run_module(DOCS / name, found, module)

    assert ran == len(found) > 0
    expected = [line for block in found for line in re.findall(r"print\(.*?\)\s+# (.*)", block.code)]
    printed = iter(capsys.readouterr().out.splitlines())
    assert [line for line in expected if line not in printed] == [], "not printed, or not in this order"


@pytest.mark.parametrize("system", ["Temporal", "DBOS", "Celery", "Inngest"])
def test_a_program_of_another_system_is_followed_by_ours(system: str) -> None:
    text = (DOCS / "coming-from.md").read_text()
    section = text.split(f"\n## {system}\n")[1].split("\n## ")[0]
    programs = re.findall(r"^```(\w+)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)

    assert [language for language, _ in programs] == ["py", "python"] * (len(programs) // 2)
    assert len(programs) >= 6
    for _, code in programs:
        compile(code, "coming-from.md", "exec", flags=ast.PyCF_ONLY_AST)


async def test_the_state_diagram_matches_the_rules() -> None:
    diagram = await states.diagram()

    assert states.stored_diagram() == diagram, "python -m tests.docs.states writes it"
    for state in ("completed", "failed", "cancelled", "expired", "skipped"):
        assert f"--> {state}:" in diagram


def test_the_reference_has_every_name_and_signature() -> None:
    stored, generated = (reference.outline(text) for text in (reference.PAGE.read_text(), reference.page()))

    assert len(generated) > 300
    assert stored == generated, "./dev py -m tests.docs.reference writes it"


def test_the_security_page_has_every_route() -> None:
    assert security.table().count("\n") > 100
    assert security.stored_table() == security.table(), "./dev py -m tests.docs.security writes it"


@pytest.mark.parametrize(
    "line",
    [
        "* `async claim(lane_id: str, *, worker_id: str, worker_instance_id: str",
        "* `async complete(handle: Handle | None = None, *, ",
        "* `async find_executions(prefix: str",
        "* `random`  \n  A `random.Random` seeded with the run's id",
        "A key is valid for 24 hours after the submit that first used it",
        "A key is valid as long as the flow is kept",
        "### `Worker`",
        "* `async work() -> None`",
    ],
)
def test_the_reference_contains_the_line(line: str) -> None:
    assert line in reference.PAGE.read_text()


@pytest.mark.parametrize("name", [name for name in flowfabric.__all__ if name != "__version__"])
def test_every_public_name_has_a_description(name: str) -> None:
    entry = re.search(
        rf"^### `{name}[`(\[].*?(?=^###? )", reference.PAGE.read_text() + "\n## ", re.DOTALL | re.MULTILINE
    )

    assert entry is not None
    assert len(re.sub(r"```.*?```", "", entry[0], flags=re.DOTALL).splitlines()) > 2, "it has no description"


def test_links_between_pages_are_not_broken() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]

    assert broken == []
