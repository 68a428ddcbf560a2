"""The pages without a browser: they answer, escape, and work as plain forms, on every store."""

from __future__ import annotations

import asyncio
import csv
import io
import re
from urllib.parse import quote, unquote

import fastapi
import msgspec
import pytest

from flowfabric import Limit
from flowfabric.console import flows
from flowfabric.console.pages import POLICY
from flowfabric.engine.types import FlowGraph, GateArgs
from flowfabric.model.gate import GateKind
from flowfabric.server import ServerSettings, create_app
from flowfabric.settings import Secret
from tests.console.sample import TOKEN, Sample
from tests.console.visitor import Visitor, read
from tests.executions import claim_one, new_execution

pytestmark = pytest.mark.asyncio(loop_scope="module")

LISTS = (
    "",
    "/runs",
    "/approvals",
    "/flows",
    "/schedules",
    "/schedules/yearly",
    "/lanes",
    "/lanes/default",
    "/budgets",
    "/events",
    "/bulk",
    "/bulk/new?verb=cancel&state=delayed",
    "/submit",
    "/tokens",
    "/store",
)


def run_path(sample: Sample, name: str) -> str:
    return f"/runs/{quote(sample.runs[name].id, safe=':')}"


async def all_paths(sample: Sample) -> list[str]:
    """Return the path of every page."""
    (budget,) = await sample.engine.list_budgets()
    worker = (await sample.engine.list_workers("default")).entries[0].worker_instance_id
    runs = [run_path(sample, name) for name in sample.runs]
    return [*LISTS, *runs, f"/flows/{sample.flow.id}", f"/budgets/{budget}", f"/workers/{worker}", "/find?q=01"]


async def test_every_page_answers_with_one_heading_a_title_and_the_strict_policy(
    sample: Sample, visitor: Visitor
) -> None:
    for path in await all_paths(sample):
        answer = await visitor.get(path)
        assert answer.status_code == 200, (path, answer.text)
        page = read(answer.text)
        assert [tag for tag, _ in page.tags].count("h1") == 1, path
        assert re.search(r"<title>.+ · FlowFabric</title>", answer.text), path
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["cache-control"] == "no-store"
        assert len(answer.content) < 60_000, path


async def test_no_page_has_inline_code_styles_or_foreign_addresses(sample: Sample, visitor: Visitor) -> None:
    for path in await all_paths(sample):
        for tag, values in read((await visitor.get(path)).text).tags:
            assert tag != "style", path
            assert tag != "script" or values.get("src"), path
            assert not [name for name in values if name == "style" or name.startswith("on")], (path, tag, values)
            for name in ("src", "href", "action"):
                assert (values.get(name) or "/").startswith(("/", "#")), (path, values)


async def test_every_link_of_every_page_leads_somewhere(sample: Sample, visitor: Visitor) -> None:
    links: set[str] = set()
    for path in await all_paths(sample):
        links |= {link.partition("#")[0] for link in read((await visitor.get(path)).text).links}
    for link in sorted(link for link in links if link):
        assert (await visitor.client.get(link)).status_code == 200, link


async def test_every_page_is_also_json(sample: Sample, visitor: Visitor) -> None:
    for path in await all_paths(sample):
        plain, _, query = path.partition("?")
        answer = await visitor.get(f"{plain}.json?{query}" if plain else "", headers={"accept": "application/json"})
        assert answer.headers["content-type"] == "application/json", path
        assert msgspec.json.decode(answer.content)["title"]


async def test_every_list_is_also_csv_and_no_cell_is_a_formula(sample: Sample, visitor: Visitor) -> None:
    run = await new_execution(sample.engine, "=1+1", execution_kind='=HYPERLINK("http://x")')
    for path, name in {"/runs": "runs", "/flows": "flows", "/events": "events", "/budgets": "budgets"}.items():
        answer = await visitor.get(f"{path}.csv")
        assert answer.headers["content-type"].startswith("text/csv")
        found = list(csv.DictReader(io.StringIO(answer.text)))
        data = (await visitor.get(f"{path}.json")).json()[name]
        assert [list(row) for row in found] == [list(row) for row in data], path
        assert not [cell for row in found for cell in row.values() if cell.startswith("=")]
    (made,) = csv.DictReader(io.StringIO((await visitor.get("/runs.csv?lane=%3D1%2B1")).text))
    assert (made["execution_id"], made["task"]) == (run, '\'=HYPERLINK("http://x")')
    assert (await visitor.get("/bulk.csv")).text == ""
    assert "gpu" in (await visitor.get("/lanes.csv")).text
    await sample.engine.cancel_execution(run)


async def test_payloads_failures_and_facts_are_escaped_and_numbers_stay_exact(sample: Sample, visitor: Visitor) -> None:
    paths = [run_path(sample, name) for name in ("purchase", "charge", "basket")]
    for path in (*paths, "/approvals", "/runs", ""):
        text = (await visitor.get(path)).text
        assert "<script>alert" not in text
        assert "<img" not in text
        assert "\u202e" not in text
        assert "49" not in re.findall(r"onerror=alert\(2\)&gt;[^{]*(\d+)", text)
    assert "&lt;script&gt;alert(1)" in (await visitor.get(run_path(sample, "charge"))).text
    assert "12345678901234567890" in (await visitor.get(run_path(sample, "purchase"))).text


async def test_the_timeline_of_a_parent_leads_to_its_children_and_back(sample: Sample, visitor: Visitor) -> None:
    page = await visitor.get(run_path(sample, "import"))
    timeline = page.text.partition("Timeline</h2>")[2].partition("</table>")[0]
    assert timeline.count('<span class="dim small">child</span> price_row') == 4
    children = (await sample.engine.list_children(sample.runs["import"].id)).executions
    for child in children:
        assert f"…{child.execution_id[-8:]}" in timeline
        text = (await visitor.get(f"/runs/{child.execution_id}")).text
        parent = unquote(text.partition('">parent</a>')[0].rpartition('href="')[2])
        assert parent == f"/ui/runs/{sample.runs['import'].id}"
    assert len(children) == 4


async def test_a_run_shows_its_facts_and_what_is_unread(sample: Sample, visitor: Visitor) -> None:
    text = (await visitor.get(run_path(sample, "basket"))).text
    assert "What it shows" in text
    assert "a secret present of ana, &lt;script&gt;" in text
    assert "1 unread" in text
    assert "It waits for a message to add" in text
    assert "What it shows" not in (await visitor.get(run_path(sample, "purchase"))).text


async def test_hidden_payloads_are_on_no_page_and_cannot_be_downloaded(sample: Sample) -> None:
    visitor = Visitor(create_app(sample.engine, ServerSettings(hide_payloads=True)))
    assert "a secret present" not in (await visitor.get(run_path(sample, "basket"))).text
    text = (await visitor.get(run_path(sample, "research"))).text
    assert "what is durable execution" not in text
    assert "a report on" not in text
    download = await visitor.get(f"{run_path(sample, 'research')}/payload/result")
    assert download.status_code == 404


async def test_a_redacted_payload_is_on_no_page(sample: Sample) -> None:
    kinds: set[str] = set()

    def redact(kind: str, data: bytes) -> bytes:
        kinds.add(kind)
        return b'"***"' if kind != "facts" else b'{"version": "1.4.0", "diff": "***"}'

    visitor = Visitor(create_app(sample.engine, ServerSettings(), redact=redact))
    run = await visitor.get(run_path(sample, "research"))
    inbox, basket = await visitor.get("/approvals"), await visitor.get(run_path(sample, "basket"))
    assert kinds >= {"input", "result", "step", "output", "facts", "fact"}
    for text in (run.text, inbox.text, basket.text):
        assert "***" in text
        for secret in ("secret present", "durable execution", "a report on", "three sources", "onerror"):
            assert secret not in text, secret
    assert (await visitor.get(f"{run_path(sample, 'research')}/payload/result")).status_code == 404


async def test_a_payload_is_downloaded_as_a_file(sample: Sample, visitor: Visitor) -> None:
    answer = await visitor.get(f"{run_path(sample, 'purchase')}/payload/result")
    assert answer.headers["content-disposition"].startswith("attachment;")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.json()["bought"] == "3 apples"


async def test_an_unchanged_page_is_answered_with_304(sample: Sample, visitor: Visitor) -> None:
    path = run_path(sample, "purchase")
    first = await visitor.get(path)
    again = await visitor.get(path, headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304
    assert not again.content


async def test_past_events_are_read_in_pages(sample: Sample, visitor: Visitor) -> None:
    positions, before = list[int](), ""
    for _ in range(3):
        found = await visitor.client.get(f"/v1/events?limit=2{before}")
        assert found.status_code == 200, found.text
        positions += [event["position"] for event in found.json()["events"]]
        before = f"&before={found.json()['next_before']}"
        assert (await visitor.get(f"/events?cursor={found.json()['next_before']}")).status_code == 200
    assert len(positions) == 6
    assert positions == sorted(set(positions), reverse=True)
    assert (await visitor.client.get(f"/v1/events?before={2**63}")).status_code == 400


async def test_filters_are_part_of_the_url_and_can_be_removed_one_by_one(sample: Sample, visitor: Visitor) -> None:
    text = (await visitor.get("/runs?state=failed&task=charge")).text
    found = read(text)
    rows = [values["data-href"] or "" for tag, values in found.tags if tag == "tr" and values.get("data-href")]
    assert sorted(unquote(row)[-36:] for row in rows) == sorted(
        run.id[-36:] for run in (sample.runs["charge"], sample.flow["charge"])
    )
    assert any(link.endswith("/ui/runs?task=charge") for link in found.links)
    assert (await visitor.get("/runs?state=nonsense")).status_code == 400


async def test_a_run_says_which_budget_it_waits_for_and_leads_to_it(sample: Sample, visitor: Visitor) -> None:
    sample.runs["poor"] = await sample.research.submit("acme", "gold", 9_000)
    try:
        await sample.reach("poor", "suspended")
        page = await visitor.get(run_path(sample, "poor"))
        assert "Budget llm:acme is exhausted: 17,500 of 20,000 tokens are used; 9,000 more are needed." in page.text
        assert "9,000 tokens" in page.text.partition("Timeline")[2]
        (budget,) = await sample.engine.list_budgets()
        assert f"/ui/budgets/{budget}?namespace=default" in read(page.text).links
    finally:
        await sample.runs.pop("poor").cancel("too poor")


async def test_a_run_that_waits_for_a_slot_leads_to_those_that_have_one(sample: Sample, visitor: Visitor) -> None:
    may_end = asyncio.Event()

    @sample.app.task(name="<greedy>", limits=[Limit(concurrency=1)])
    async def greedy() -> None:
        await may_end.wait()

    sample.runs["first"], sample.runs["second"] = await greedy.submit(), await greedy.submit()
    try:
        await sample.reach("first", "active")
        await sample.reach("second", "rate_limited")
        link = next(link for link in read((await visitor.get(run_path(sample, "second"))).text).links if "#q" in link)
        address, _, row_id = link.partition("#")
        row = (await visitor.client.get(address)).text.partition(f'id="{row_id}"')[2].partition("</tr>")[0]
        assert "1 of 1" in row
        assert "&lt;greedy&gt;" in row
        assert sample.runs["first"].id[-8:] in row
    finally:
        may_end.set()
        for name in ("first", "second"):
            await sample.runs.pop(name).result(timeout=30)


async def test_a_lane_that_no_worker_serves_says_how_to_start_one_for_it(sample: Sample, visitor: Visitor) -> None:
    text = (await visitor.get("/lanes/gpu")).text
    assert "No live worker serves this lane." in text
    assert "ff worker your_module:app --lane gpu" in text


async def test_the_only_run_that_is_found_is_opened(sample: Sample, visitor: Visitor) -> None:
    run_id = sample.runs["purchase"].id
    answer = await visitor.get("/find", params={"q": run_id})
    assert (answer.status_code, unquote(answer.headers["location"])) == (303, f"/ui/runs/{run_id}")
    assert "No run has an id" in (await visitor.get("/find?q=ffffffff")).text


async def test_a_flow_is_read_once_for_its_page_and_its_drawing(
    sample: Sample, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read_graph = sample.engine.read_flow_graph

    async def count_reads(flow_id: str) -> FlowGraph:
        reads.append(flow_id)
        return await read_graph(flow_id)

    monkeypatch.setattr(sample.engine, "read_flow_graph", count_reads)
    monkeypatch.setattr(flows, "GRAPH_AGE_S", 600.0)
    path = f"/flows/{sample.flow.id}"
    for number in (1, 2):
        assert (await visitor.get(path)).status_code == 200
        drawing = (await visitor.get(f"{path}/graph.json")).json()
        assert (len(reads), len(drawing["nodes"])) == (number, 9)


async def test_a_box_of_the_graph_leads_to_its_run(sample: Sample, visitor: Visitor) -> None:
    path = f"/flows/{sample.flow.id}"
    drawing = (await visitor.get(f"{path}/graph.json")).json()
    revision = drawing["revision"].partition("/")[0]
    found = [await visitor.get(f"{path}/members/{revision}/{member}") for _, member in drawing["nodes"]]
    names = {unquote(answer.headers["location"].rpartition("/")[2]) for answer in found}
    assert names == {node.execution_id for node in (await sample.engine.read_flow_graph(sample.flow.id)).nodes}
    earlier = await visitor.get(f"{path}/members/{int(revision) - 1}/0")
    assert earlier.headers["location"].endswith(f"{path}?done=graph-changed")
    for wrong in ("9", "-1", "x", "99999999999"):
        assert (await visitor.get(f"{path}/members/{revision}/{wrong}")).status_code == 404


async def test_an_unknown_page_or_run_has_an_error_page_in_plain_words(visitor: Visitor) -> None:
    assert "Not found" in (await visitor.get("/nothing")).text
    missing = await visitor.get("/runs/{fp:7}:01a1ee61-ea11-71d0-b2e9-0b1350d6413c")
    assert missing.status_code == 404
    assert "<h1>" in missing.text
    assert (await visitor.get("/runs/nonsense")).status_code == 400


async def test_the_root_leads_a_browser_to_the_console(visitor: Visitor) -> None:
    answer = await visitor.client.get("/", headers={"accept": "text/html,*/*"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui")
    assert (await visitor.client.get("/")).status_code == 404


async def test_the_console_can_be_switched_off_and_the_page_behind_a_link_is_still_styled(sample: Sample) -> None:
    visitor = Visitor(create_app(sample.engine, ServerSettings(serve_console=False)))
    assert (await visitor.get("/runs")).status_code == 404
    assert (await visitor.client.get(show_css())).status_code == 200


def show_css() -> str:
    from flowfabric.console.paper import static_url

    return static_url("", "console.css")


async def test_static_files_are_immutable_and_an_old_name_is_gone(visitor: Visitor) -> None:
    answer = await visitor.client.get(show_css())
    assert "immutable" in answer.headers["cache-control"]
    assert (await visitor.get("/static/console.000000000000.css")).status_code == 404


async def test_mounted_below_a_path_of_another_application_every_link_stays_below_it(sample: Sample) -> None:
    outer = fastapi.FastAPI()
    outer.mount("/tools/ff", create_app(sample.engine, ServerSettings(api_token=Secret(TOKEN))))
    visitor = Visitor(outer, "/tools/ff")
    answer = await visitor.get("/runs")
    assert answer.headers["location"].startswith("/tools/ff/ui/login?next=%2Fui%2Fruns")
    answer = await visitor.log_in(TOKEN)
    assert answer.headers["location"] == "/tools/ff/ui"
    for path in await all_paths(sample):
        page = read((await visitor.get(path)).text)
        for tag, values in page.tags:
            for name in ("src", "href", "action", "data-live", "data-src", "data-base"):
                address = values.get(name) or "#"
                assert address.startswith(("/tools/ff/", "#")), (path, tag, address)
    sent = await visitor.send(run_path(sample, "delayed"), "/tags", key="shop.note", value="later")
    assert sent.status_code == 303
    assert sent.headers["location"].startswith("/tools/ff/ui/runs/")


async def test_the_pages_are_not_part_of_the_api_description(visitor: Visitor) -> None:
    document = await visitor.client.get("/openapi.json", headers={"authorization": f"Bearer {TOKEN}"})
    assert document.status_code == 200
    assert not [path for path in document.json()["paths"] if path.startswith("/ui")]


async def test_the_overview_names_the_tasks_of_held_runs(sample: Sample, visitor: Visitor) -> None:
    engine, lane = sample.engine, "held"
    execution = await new_execution(engine, lane)
    claim = await claim_one(engine, lane, lease_ttl_ms=60_000)
    hold = GateArgs(name="hold:s#0.0", kind=GateKind.MAILBOX, mailbox="ff.hold", task="<order>", version="2")
    await engine.open_gates_and_park(claim.handle, (hold,))

    text = (await visitor.get("")).text
    assert re.search(r"Held, because .* 1 of <a href=\"[^\"]*%3Corder%3E[^\"]*\">&lt;order&gt;</a>", text)
    await engine.cancel_execution(execution)
    assert "Held, because" not in (await visitor.get("")).text
