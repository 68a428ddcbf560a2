"""What a hostile user or a hostile payload may try against the console, on every store."""

from __future__ import annotations

import asyncio
from urllib.parse import quote, unquote

import msgspec
import pytest

from flowfabric import Engine
from flowfabric.engine.types import ExecutionSnapshot
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server import App, ServerSettings, create_app
from flowfabric.server.security.console_session import form_token
from flowfabric.settings import Secret
from tests.console.sample import HOSTILE, TOKEN, Sample
from tests.console.test_access import logged_in
from tests.console.test_pages import run_path
from tests.console.visitor import Visitor, read
from tests.executions import claim_one, new_execution

pytestmark = pytest.mark.asyncio(loop_scope="module")

LARGE = 300_000
MAX_PAGE = 400_000
STRANGE = "a/b?c=1&d#e%2F <b>\"' {{7*7}}"  # as hostile as the name of a lane may be


async def create_strange(engine: Engine) -> str:
    """Create a run whose names and tags are as hostile as the engine accepts."""
    execution_id = await new_execution(engine, STRANGE, execution_kind=STRANGE, input_payload=HOSTILE.encode())
    await engine.set_execution_tag(execution_id, "shop.note", HOSTILE)
    await engine.set_execution_tag(execution_id, "shop.link", "javascript:alert(1)")
    return execution_id


async def test_names_that_look_like_urls_or_markup_are_texts_and_their_links_work(
    sample: Sample, visitor: Visitor
) -> None:
    execution_id = await create_strange(sample.engine)
    try:
        for path in ("", "/runs", "/lanes", f"/runs/{execution_id}", f"/lanes/{quote(STRANGE, safe='')}"):
            answer = await visitor.get(path)
            assert answer.status_code == 200, path
            page = read(answer.text)
            assert "alert(1)" not in str(page.tags)
            for link in page.links:
                if "%3Cb%3E" in link or "<b>" in unquote(link):
                    assert (await visitor.client.get(link)).status_code == 200, link
        found = await visitor.get(f"/runs?task={quote(STRANGE, safe='')}&tag={quote('shop.note=' + HOSTILE)}")
        assert execution_id[-8:] in found.text
    finally:
        await sample.engine.cancel_execution(execution_id)


async def test_a_failure_with_control_characters_and_braces_is_shown(sample: Sample, visitor: Visitor) -> None:
    reason = "before \x1b[31m after \u2066 {0} `ls` {{x}} %s \ud7ff"
    execution_id = await new_execution(sample.engine, "hostile", execution_kind="fails")
    claim = await claim_one(sample.engine, "hostile", lease_ttl_ms=60_000)
    await sample.engine.fail(claim.handle, reason=reason, category="permanent")
    for path in (f"/runs/{execution_id}", "/runs?state=failed&lane=hostile", ""):
        text = (await visitor.get(path)).text
        assert "before" in text
        assert "\x1b" not in text
        assert "\u2066" not in text


async def test_giant_payloads_and_much_output_are_cut_and_the_rest_can_be_reached(
    sample: Sample, visitor: Visitor
) -> None:
    execution_id = await new_execution(
        sample.engine, "talk", execution_kind="talk", input_payload=b'"' + b"x" * LARGE + b'"'
    )
    claim = await claim_one(sample.engine, "talk", lease_ttl_ms=60_000)
    for number in range(40):
        await sample.engine.append_frame(claim.handle, f"line {number}: ".encode() + b"y" * 20_000)
    await sample.engine.complete(claim.handle, result=b"z" * LARGE)
    path = f"/runs/{execution_id}"
    seen: list[str] = []
    for _ in range(40):
        answer = await visitor.get(path)
        assert answer.status_code == 200
        assert len(answer.content) < MAX_PAGE
        seen += [number for number in map(str, range(40)) if f"line {number}: y" in answer.text]
        following = [link for link in read(answer.text).links if "after=" in link]
        if not following:
            break
        path = following[0].partition("/ui")[2].partition("#")[0]
    assert seen == [str(number) for number in range(40)]
    download = await visitor.get(f"/runs/{execution_id}/payload/input")
    assert len(download.content) == LARGE + 2


async def test_a_token_of_other_namespaces_can_do_nothing_to_what_it_does_not_see(app: App, sample: Sample) -> None:
    owner, _ = await logged_in(app, *ApiScope)
    stranger, _ = await logged_in(app, *ApiScope, namespaces=["elsewhere"])
    (budget,) = await sample.engine.list_budgets()
    worker = (await sample.engine.list_workers("default")).entries[0].worker_instance_id
    pages = [run_path(sample, name) for name in ("delayed", "watch", "deploy", "purchase")]
    pages += ["/approvals", f"/flows/{sample.flow.id}", f"/budgets/{budget}", f"/workers/{worker}"]
    before = await described(sample)
    ids = sample.runs["delayed"].id
    secret = stranger.client.cookies["ff"]
    tried = 0
    for path in pages:
        for form in await owner.forms(path):
            if form.action.endswith(("/theme", "/logout")):
                continue
            fields = form.fields | {
                "csrf": form_token_of(secret, form.action),
                "namespace": "default",
                "reason": "mine",
                "value.verdict": "0",
                "value": "1",
            }
            answer = await stranger.client.post(form.action, data=fields)
            assert answer.status_code in (403, 404), (form.action, answer.status_code, answer.text)
            tried += 1
    assert tried >= 15
    for path, fields in (
        ("/runs/selected", {"verb": "cancel", "id": ids}),
        ("/submit", {"task": "purchase", "lane": "default", "namespace": "default", "input": "{}"}),
        ("/bulk", {"verb": "cancel", "reason": "x", "ceiling": "10", "namespace": "default"}),
    ):
        fields = fields | {"csrf": form_token_of(secret, f"/ui{path}")}
        assert (await stranger.post(path, fields)).status_code in (403, 404), path
    assert await described(sample) == before


async def described(sample: Sample) -> list[ExecutionSnapshot]:
    """Return the runs without the columns that a renewal of a lease by the sample's worker changes."""
    replace, rows = msgspec.structs.replace, []
    for run in sample.runs.values():
        row = await sample.engine.describe_execution(run.id)
        assert row is not None
        lease = row.current_lease and replace(row.current_lease, expires_at=0, last_heartbeat_at=None)
        rows.append(replace(row, current_lease=lease, last_mutation_at=0))
    return rows


def form_token_of(secret: str, path: str) -> str:
    return form_token(secret, unquote(path).replace(" ", "%20") if "%" not in path else path)


async def test_a_bulk_operation_of_a_bound_token_touches_its_namespaces_only(app: App, sample: Sample) -> None:
    stranger, _ = await logged_in(app, *ApiScope, namespaces=["elsewhere"])
    secret = stranger.client.cookies["ff"]
    fields = {"verb": "cancel", "reason": "all", "ceiling": "1000", "csrf": form_token_of(secret, "/ui/bulk")}
    before = [await run.state() for run in sample.runs.values()]
    started = await stranger.post("/bulk", fields)
    assert started.status_code == 303, started.text
    operation = started.headers["location"].rpartition("/")[2]
    async with asyncio.timeout(30):
        while (await sample.engine.read_operation(operation)).ended_at is None:
            await sample.engine.sweep_once("bulk_operations")
    assert (await sample.engine.read_operation(operation)).changed == 0
    assert [await run.state() for run in sample.runs.values()] == before
    outsider, _ = await logged_in(app, *ApiScope, namespaces=["third"])
    assert (await outsider.get(f"/bulk/{operation}")).status_code == 404
    assert operation not in (await outsider.get("/bulk")).text


@pytest.mark.parametrize("token", ["é", "\u202e", "0" * 40, "0" * 100_000, ""])
async def test_a_forged_form_token_of_any_shape_is_refused(sample: Sample, visitor: Visitor, token: str) -> None:
    answer = await visitor.post(f"{run_path(sample, 'delayed')}/cancel", {"csrf": token})
    assert answer.status_code == 403
    assert await sample.runs["delayed"].state() == "delayed"


@pytest.mark.parametrize("body", [b"\xff\xfe", b"&" * 5000, b"a=" + b"%" * 1000, b"=&=&=", b"\x00"])
async def test_a_malformed_form_is_refused_in_words(sample: Sample, visitor: Visitor, body: bytes) -> None:
    path = f"/ui{run_path(sample, 'delayed')}/cancel"
    answer = await visitor.client.post(
        path, content=body, headers={"content-type": "application/x-www-form-urlencoded"}
    )
    assert answer.status_code in (400, 403)
    assert "<h1>" in answer.text


@pytest.mark.parametrize("cookie", ["ff=x", 'ff="', "ff=" + "a" * 5000, "\x00", "ff=é;;=;", "; ".join(["ff=b"] * 500)])
async def test_a_malformed_cookie_is_no_session(app: App, cookie: str) -> None:
    answer = await Visitor(app).get("/runs", headers={"cookie": cookie.encode("latin-1", "replace")})
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/ui/login")


@pytest.mark.parametrize("query", ["cursor=x", "state=%00", "since=-5m", "tag=a", "lane=%FF", "cursor=" + "9" * 5000])
async def test_a_malformed_filter_is_refused_in_words_or_finds_nothing(visitor: Visitor, query: str) -> None:
    answer = await visitor.get(f"/runs?{query}")
    assert answer.status_code in (200, 400), answer.text
    assert "<h1>" in answer.text


@pytest.mark.parametrize("hides", [True, False])
async def test_hidden_payloads_are_in_no_data_of_a_page_and_the_cookie_opens_no_other_route_to_them(
    sample: Sample, *, hides: bool
) -> None:
    settings = ServerSettings(api_token=Secret(TOKEN), hide_payloads=hides)
    app = create_app(sample.engine, settings, redact=None if hides else lambda kind, data: b'"***"')
    visitor = Visitor(app)
    await visitor.log_in(TOKEN)
    paths = [run_path(sample, name) + ".json" for name in ("research", "deploy", "purchase")]
    for path in [*paths, "/approvals.json", f"/submit.json?again={sample.runs['research'].id}"]:
        text = (await visitor.get(path)).text
        assert msgspec.json.decode(text)["title"]
        for secret in ("onerror", "durable execution", "a report on", "three sources", "3 apples"):
            assert secret not in text, (path, secret)
    run = f"/v1/executions/{sample.runs['research'].id}"
    for path in (f"{run}/input", f"{run}/result", f"{run}/steps", f"{run}/attempts/0/stream"):
        assert (await visitor.client.get(path)).status_code == 401, path
