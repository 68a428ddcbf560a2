"""A page in a real browser while the runs change under it: selection, ticks, output, hidden pages, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Response, expect

from flowfabric import Context, Retry
from flowfabric.server import ServerSettings, create_app
from flowfabric.server.lifecycle import Server
from tests.console.browser import Visit, Watched
from tests.console.sample import Sample, sample_world
from tests.console.test_pages import run_path
from tests.server.api_client import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.serial]

TICKED = "tbody input[type=checkbox]:checked"
# `document.hidden` as a test sets it; the browser without a screen shows every page.
HIDE = """is => {
  Object.defineProperty(document, "hidden", {value: is, configurable: true});
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sample() -> AsyncIterator[Sample]:
    async with sample_world("memory://") as sample:
        yield sample


async def submit_and_see(sample: Sample, page: Page) -> str:
    """Submit a run and wait until the list shows it; return the end of its id."""
    run = await sample.purchase.options(delay="1h").submit("a newcomer")
    await expect(page.get_by_text(f"…{run.id[-8:]}")).to_be_visible()
    return str(run.id[-8:])


async def test_the_selected_row_stays_that_of_its_run_when_others_come(sample: Sample, visit: Visit) -> None:
    page = await (await visit()).open("/runs")
    rows, selected = page.locator("tbody tr"), page.locator("tr.here")
    for key in ("j", "j"):
        await page.keyboard.press(key)
    chosen = await selected.get_attribute("data-href") or ""
    assert chosen == await rows.nth(1).get_attribute("data-href")

    newcomer = await submit_and_see(sample, page)
    await expect(rows.nth(2)).to_have_attribute("data-href", chosen)
    await expect(selected).to_have_attribute("data-href", chosen)
    await page.keyboard.press("x")
    ticked = await page.locator(TICKED).get_attribute("value") or ""
    assert chosen.endswith(quote(ticked, safe=":"))
    await page.keyboard.press("x")
    for key in ("k", "k", "k", "k"):
        await page.keyboard.press(key)
    assert (await selected.get_attribute("id")) == f"r{newcomer}"
    for key in ("j", "j"):
        await page.keyboard.press(key)
    await submit_and_see(sample, page)
    await page.keyboard.press("Enter")
    await page.wait_for_url(f"**{chosen}")


async def test_keys_act_on_the_row_before_the_browser_has_drawn_the_page_without_the_help(visit: Visit) -> None:
    page = await (await visit()).open("/runs")
    await page.keyboard.press("j")
    chosen = await page.locator("tr.here").get_attribute("data-href")
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await page.evaluate(
        """() => {
          const help = document.querySelector("#help"), focused = help.querySelector("button");
          help.close();
          focused.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", bubbles: true}));
        }"""
    )
    await page.wait_for_url(f"**{chosen}")


async def test_ticks_stay_with_their_runs_when_the_page_is_shown_anew(sample: Sample, visit: Visit) -> None:
    page = await (await visit()).open("/runs")
    await page.locator("tbody input[type=checkbox]").nth(1).check()
    ticked = await page.locator(TICKED).get_attribute("value")
    run = await sample.purchase.options(delay="1h").submit("a newcomer")
    await page.get_by_role("button", name="The page has changed").click()
    await expect(page.get_by_text(f"…{run.id[-8:]}")).to_be_visible()
    await expect(page.get_by_role("button", name="The page has changed")).to_be_hidden()
    await expect(page.locator(TICKED)).to_have_count(1)
    await expect(page.locator(TICKED)).to_have_value(ticked or "")


async def test_a_page_in_use_that_has_not_changed_says_nothing(sample: Sample, visit: Visit) -> None:
    page = await (await visit()).open("/runs?task=charge")
    await page.locator("tbody input[type=checkbox]").first.check()

    def is_unchanged(answer: Response) -> bool:
        return answer.status == 304

    async with page.expect_response(is_unchanged):
        pass
    await expect(page.get_by_role("button", name="The page has changed")).to_be_hidden()


async def test_the_output_of_the_next_attempt_takes_the_place_of_the_last_one(sample: Sample, visit: Visit) -> None:
    may_fail, may_end = asyncio.Event(), asyncio.Event()

    @sample.app.task(name="stumble", retry=Retry(max=1, base="1ms"))
    async def stumble(ctx: Context) -> None:
        out = ctx.stream("log")
        await out.write("a try\n" if may_fail.is_set() else "the first try\n")
        if not may_fail.is_set():
            await may_fail.wait()
            raise ValueError("again")
        await may_end.wait()
        await out.write("done\n")

    run = sample.runs["stumble"] = await stumble.submit()
    try:
        page = await (await visit()).open(run_path(sample, "stumble"))
        output = page.get_by_role("log")
        await expect(output).to_have_text("the first try")
        may_fail.set()
        await expect(page.get_by_role("heading", name="Output of attempt 2")).to_be_visible()
        await expect(output).to_have_text("a try")
        may_end.set()
        await expect(output).to_have_text("a try done")
    finally:
        may_fail.set()
        may_end.set()
        del sample.runs["stumble"]
        await run.result(timeout=30)


async def test_a_hidden_page_follows_nothing_and_misses_nothing(sample: Sample, visit: Visit) -> None:
    page = await (await visit()).open(run_path(sample, "watch"))
    reads, output = sample.engine.stream_reads, page.get_by_role("log")
    await wait_until(lambda: reads.running > 0)
    await page.evaluate(HIDE, True)
    await wait_until(lambda: reads.running == 0)
    sample.lines.put_nowait("one ship\n")
    await wait_until(sample.lines.empty)
    await page.evaluate(HIDE, False)
    sample.lines.put_nowait("another ship\n")
    await expect(output).to_contain_text("another ship")
    for line in ("watching the harbour", "one ship", "another ship"):
        assert (await output.inner_text()).count(line) == 1, line


async def test_pages_go_on_after_the_server_was_restarted(browser: Browser) -> None:
    async with sample_world("memory://") as sample:
        first = Server(create_app(sample.engine, ServerSettings(port=0)))
        running = asyncio.create_task(first.serve())
        await first.listening.wait()
        port = first.port
        watched = Watched(await browser.new_context(), f"http://127.0.0.1:{port}")
        try:
            page = await watched.open("/runs")
            await submit_and_see(sample, page)
            first.should_exit = True
            await running
            second = Server(create_app(sample.engine, ServerSettings(port=port)))
            running = asyncio.create_task(second.serve())
            await second.listening.wait()
            await submit_and_see(sample, page)
            second.should_exit = True
        finally:
            await watched.context.close()
            await running
