"""A person who has never seen the console finds each answer from the overview within three clicks, on every store."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.console.sample import Sample
from tests.console.test_pages import run_path
from tests.console.visitor import Visitor, read

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_CLICKS = 3
Choose = Callable[[str], bool]


async def click_through(visitor: Visitor, *choices: Choose) -> str:
    """Follow the first link of each page that is chosen, from the overview; return the last page."""
    assert len(choices) <= MAX_CLICKS
    text = (await visitor.get("")).text
    for choose in choices:
        links = read(text.partition("<main")[2]).links
        link = next(filter(choose, links), None)
        assert link is not None, links
        answer = await visitor.client.get(link.partition("#")[0])
        assert answer.status_code == 200, link
        text = answer.text
    return re.sub(r"<[^>]+>", " ", text)


def leads_to(ending: str) -> Choose:
    return lambda link: link.endswith(ending)


def is_run(sample: Sample, name: str) -> Choose:
    return leads_to(f"/ui{run_path(sample, name).replace('{', '%7B').replace('}', '%7D')}")


async def test_why_a_run_waits(sample: Sample, visitor: Visitor) -> None:
    page = await click_through(visitor, leads_to("state=waiting"), is_run(sample, "encode"))
    assert "No live worker serves lane gpu" in page


async def test_who_has_to_approve(sample: Sample, visitor: Visitor) -> None:
    page = await click_through(visitor, leads_to("/ui/approvals"))
    assert "3 people are asked, 2 answers are enough" in page
    page = await click_through(visitor, leads_to("lane=default&state=suspended"), is_run(sample, "deploy"))
    assert "0 of 2 answers; 3 people are asked" in page


async def test_the_spending_of_a_run(sample: Sample, visitor: Visitor) -> None:
    (budget,) = await sample.engine.list_budgets()
    page = await click_through(visitor, lambda link: budget in link, is_run(sample, "research"))
    assert re.search(r"What it cost.*llm:acme\s+tokens\s+17,500", page, re.DOTALL)


async def test_which_worker_has_a_run(sample: Sample, visitor: Visitor) -> None:
    worker = (await sample.engine.list_workers("default")).entries[0].worker_instance_id
    page = await click_through(visitor, leads_to("state=active"))
    assert re.search(rf"watch\s.*on\s+{re.escape(worker)}", page, re.DOTALL)
    page = await click_through(visitor, leads_to("state=active"), is_run(sample, "watch"))
    assert f"It is running on {worker}." in page
    page = await click_through(visitor, leads_to("state=active"), lambda link: "/ui/workers/" in link)
    assert re.search(r"What it holds.*watch", page, re.DOTALL)


async def test_the_error_of_the_failed_step(sample: Sample, visitor: Visitor) -> None:
    overview = await click_through(visitor)
    assert "PaymentDeclined: card 4711 was declined by the bank" in overview
    page = await click_through(visitor, is_run(sample, "charge"))
    assert re.search(r"What the failure said.*PaymentDeclined: card 4711.*File", page, re.DOTALL)
