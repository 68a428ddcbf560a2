"""What operators do from the console, as plain forms without JavaScript, on every store."""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import unquote

import httpx2
import pytest

from flowfabric.model.gate import MailboxMessage
from flowfabric.server import App
from flowfabric.stores.queries import Scan, Where
from tests.console.sample import TOKEN, Sample
from tests.console.test_pages import run_path
from tests.console.visitor import Visitor, read
from tests.executions import claim_one
from tests.server.api_client import run_server

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_two_of_three_people_answer_an_approval_with_its_typed_form(sample: Sample, app: App) -> None:
    run = sample.runs["ask"] = await sample.deploy.submit("2.0.0")
    await sample.reach("ask", "suspended")
    visitor = Visitor(app)
    for name, comment in (("Alice", "looks good"), ("Bob", "")):
        visitor = Visitor(app)
        await visitor.log_in(TOKEN, name)
        forms = [form for form in await visitor.forms("/approvals") if run.id[-36:] in form.action]
        form = next(form for form in forms if not form.action.endswith("/links"))
        wrong = await visitor.client.post(form.action, data=form.fields | {"value.comment": "x"})
        assert "verdict is missing" in wrong.text
        sent = await visitor.client.post(
            form.action, data=form.fields | {"value.verdict": "0", "value.comment": comment}
        )
        assert sent.status_code == 303, sent.text
        assert sent.headers["location"].endswith("done=voted" if name == "Alice" else "done=complete")
        if name == "Alice":
            text = (await visitor.get(f"/runs/{run.id}")).text
            assert "1 of 2 answers (Alice); 3 people are asked" in text
            assert "<b>Alice</b>" in text
        twice = await visitor.client.post(form.action, data=form.fields | {"value.verdict": "0"})
        assert twice.headers["location"].endswith(("done=repeated", "done=not-counted"))
    assert await run.result(timeout=30) == "2.0.0 is live"
    text = (await visitor.get(f"/runs/{run.id}")).text
    assert "<b>Alice</b>" in text
    assert "<b>Bob</b>" in text


async def test_a_run_is_cancelled_with_a_reason_and_replayed(
    sample: Sample, visitor: Visitor, caplog: pytest.LogCaptureFixture
) -> None:
    run = await sample.purchase.options(delay="1h").submit("a kite")
    path = f"/runs/{run.id}"
    with caplog.at_level(logging.INFO):
        answer = await visitor.send(path, "/cancel", reason="too windy")
    assert answer.headers["location"].endswith("done=cancelled")
    assert any(record.__dict__.get("fields", {}).get("outcome") == "done" for record in caplog.records)
    shown = await visitor.client.get(answer.headers["location"])
    assert "The run was cancelled." in shown.text
    assert "too windy" in shown.text
    assert (await visitor.send(path, "/replay")).headers["location"].endswith("done=replayed")
    assert await run.state() != "cancelled"


async def test_a_late_cancel_is_refused_in_words_and_changes_nothing(sample: Sample, visitor: Visitor) -> None:
    run = await sample.purchase.options(delay="1h").submit("a kite")
    path = f"/runs/{run.id}"
    form = next(form for form in await visitor.forms(path) if form.action.endswith("/cancel"))
    await run.cancel("earlier")
    answer = await visitor.client.post(form.action, data=form.fields)
    assert answer.status_code in (303, 409)
    assert "earlier" in (await visitor.get(path)).text


async def test_a_run_is_submitted_once_from_the_form_and_again_with_edited_input(
    sample: Sample, visitor: Visitor
) -> None:
    (form,) = [form for form in await visitor.forms("/submit") if form.action.endswith("/submit")]
    fields = form.fields | {"task": "purchase", "lane": "default", "namespace": "default", "input": '{"what": "tea"}'}
    first = await visitor.client.post(form.action, data=fields)
    assert first.status_code == 303, first.text
    assert (await visitor.client.post(form.action, data=fields)).headers["location"] == first.headers["location"]
    again = await visitor.get(f"/submit?again={sample.runs['purchase'].id}")
    assert "3 apples" in again.text
    wrong = await visitor.client.post(form.action, data=fields | {"input": "{not json"})
    assert wrong.status_code == 400


async def test_a_task_of_a_live_worker_is_submitted_with_a_form_of_its_parameters(
    sample: Sample, visitor: Visitor
) -> None:
    assert "task=research" in (await visitor.get("/submit")).text
    page = await visitor.get("/submit?task=research")
    names = [values.get("name") for tag, values in read(page.text).tags if tag in ("input", "select", "textarea")]
    assert [name for name in names if name and name.startswith("value.")] == [
        "value.tenant",
        "value.topic",
        "value.tokens",
    ]
    fields = {"task": "research", "lane": "default", "namespace": "default", "value.tenant": "acme"}
    fields |= {"value.topic": '"<b>', "value.tokens": "7"}
    answer = await visitor.send("/submit?task=research", "/submit", **fields)
    assert answer.status_code == 303, answer.text
    run_id = unquote(answer.headers["location"].rpartition("/")[2])
    context = await sample.engine.read_execution_context(run_id)
    assert context.input_payload == b'{"tenant":"acme","topic":"\\"<b>","tokens":7}'
    wrong = await visitor.send("/submit?task=research", "/submit", **fields | {"value.tokens": "many"})
    assert (wrong.status_code, "tokens: a whole number is needed" in wrong.text) == (400, True)
    gone = await visitor.send("/submit?task=research", "/submit", **fields | {"task": "unknown"})
    assert gone.status_code == 400

    again = await visitor.get(f"/submit?again={run_id}")
    values = {attributes.get("name"): attributes.get("value") for tag, attributes in read(again.text).tags}
    assert (values["value.topic"], values["value.tokens"]) == ('"<b>', "7")
    as_json = await visitor.get(f"/submit?again={run_id}&mode=json")
    assert 'name="input"' in as_json.text
    assert "value.topic" not in as_json.text


async def test_a_schedule_is_paused_with_a_note_resumed_and_run_now_once(
    sample: Sample, visitor: Visitor, caplog: pytest.LogCaptureFixture
) -> None:
    handle = await sample.app.schedules.create("calendar", sample.purchase.s("tea <b>"), cron="@yearly")
    path = "/schedules/calendar"
    with caplog.at_level(logging.INFO):
        paused = await visitor.send(path, "/pause", note="look <i>")
    shown = await visitor.client.get(paused.headers["location"])
    assert "The schedule is paused." in shown.text
    assert "look &lt;i&gt;" in shown.text
    assert "tea &lt;b&gt;" in shown.text
    assert any(record.__dict__.get("fields", {}).get("outcome") == "done" for record in caplog.records)
    assert not [form for form in await visitor.forms(path) if form.action.endswith("/pause")]

    assert (await visitor.send(path, "/resume")).headers["location"].endswith("done=schedule-resumed")
    form = next(form for form in await visitor.forms(path) if form.action.endswith("/trigger"))
    first = await visitor.client.post(form.action, data=form.fields)
    assert (await visitor.client.post(form.action, data=form.fields)).headers["location"] == first.headers["location"]
    run = await visitor.client.get(first.headers["location"])
    assert "schedule calendar" in run.text
    described = await handle.describe()
    assert (described.status.fired, described.status.paused_at) == (1, None)
    assert (await visitor.client.post(form.action, data=form.fields | {"csrf": "x"})).status_code == 403
    await handle.delete()


async def test_the_limits_of_a_budget_are_raised_with_a_reason(sample: Sample, visitor: Visitor) -> None:
    (budget,) = await sample.engine.list_budgets()
    answer = await visitor.send(
        f"/budgets/{budget}", "/limits", **{"hard.tokens": "40,000", "soft.tokens": "30000", "reason": "more customers"}
    )
    assert answer.status_code == 303, answer.text
    status = await sample.engine.get_budget_status(budget)
    assert (status.hard_limits["tokens"], status.soft_limits["tokens"]) == (40_000, 30_000)
    wrong = await visitor.send(f"/budgets/{budget}", "/limits", **{"hard.tokens": "many", "soft.tokens": "1"})
    assert wrong.status_code == 400


async def test_money_is_shown_and_changed_in_its_unit(sample: Sample, visitor: Visitor) -> None:
    budget, dimension = sample.engine.minter.uuid(), "usd_millionths"
    await sample.engine.create_budget(
        budget,
        dimensions=[dimension],
        hard_limits=[5_000_000],
        soft_limits=[0],
        scope_type="app",
        scope_id="spending",
        enforcement_mode="strict",
        on_hard_limit="fail",
        on_soft_limit="warn",
        reset_interval_ms=0,
        namespace="money",
    )
    path = f"/budgets/{budget}?namespace=money"
    for text in ((await visitor.get(path)).text, (await visitor.get("/budgets?namespace=money")).text):
        assert "<td>usd</td>" in text
        assert "5</td>" in text
        assert "000" not in text.partition("<main")[2].partition("</table>")[0]
    limits = {f"hard.{dimension}": "7.25", f"soft.{dimension}": "1,000", "reason": "more customers"}
    assert (await visitor.send(path, "/limits", **limits)).status_code == 303
    status = await sample.engine.get_budget_status(budget, namespace="money")
    assert (status.hard_limits[dimension], status.soft_limits[dimension]) == (7_250_000, 1_000_000_000)
    for wrong in ("1.2.3", "0.0000001", "x.5", "1.-5", "1.²", "-", ""):
        answer = await visitor.send(path, "/limits", **limits | {f"hard.{dimension}": wrong})
        assert answer.status_code == 400, wrong
    assert await sample.engine.get_budget_status(budget, namespace="money") == status


async def test_a_message_form_that_is_sent_twice_is_one_message(sample: Sample, visitor: Visitor) -> None:
    run = await sample.purchase.options(delay="1h").submit("a kite")
    form = next(form for form in await visitor.forms(f"/runs/{run.id}") if form.action.endswith("/message"))
    for _ in range(2):
        sent = await visitor.client.post(form.action, data=form.fields | {"mailbox": "review", "value": "1"})
        assert sent.status_code == 303, sent.text
    messages = await sample.engine.store.scan(Scan(MailboxMessage, (Where("execution_id", "=", run.id),), limit=10))
    assert len(messages) == 1


async def test_a_message_reaches_the_mailbox_of_a_run(sample: Sample, visitor: Visitor) -> None:
    answer = await visitor.send(run_path(sample, "delayed"), "/message", mailbox="review", value='{"ok": true}')
    assert answer.headers["location"].endswith("done=sent")
    wrong = await visitor.send(run_path(sample, "delayed"), "/message", mailbox="review", value="{")
    assert wrong.status_code == 400


async def test_a_token_is_made_shown_once_and_revoked(sample: Sample, visitor: Visitor) -> None:
    made = await visitor.send("/tokens", "/tokens", name="reporting", **{"scope.read": "1", "days": "30"})
    assert "The token is shown only now" in made.text
    (token,) = [each for each in await sample.engine.list_api_tokens() if each.name == "reporting"]
    assert token.scopes == ("read",)
    assert "The token is shown only now" not in (await visitor.get("/tokens")).text
    assert (await visitor.send("/tokens", f"/tokens/{token.token_id}", verb="revoke")).status_code == 303
    (token,) = [each for each in await sample.engine.list_api_tokens() if each.name == "reporting"]
    assert token.revoked_at is not None


async def test_ticked_runs_are_cancelled_and_those_that_have_ended_are_left(sample: Sample, visitor: Visitor) -> None:
    runs = [await sample.purchase.options(delay="1h").submit(f"kite {number}") for number in range(2)]
    form = next(form for form in await visitor.forms("/runs") if form.action.endswith("/selected"))
    ids = [runs[0].id, runs[1].id, sample.runs["purchase"].id]
    answer = await visitor.client.post(form.action, data=form.fields | {"verb": "cancel", "id": ids})
    assert answer.headers["location"].endswith("done=cancelled")
    assert await asyncio.gather(*(run.state() for run in runs)) == ["cancelled", "cancelled"]
    assert await sample.runs["purchase"].state() == "completed"


async def test_runs_are_cancelled_in_bulk_after_a_preview_and_later_ones_are_left(
    sample: Sample, visitor: Visitor
) -> None:
    kites = sample.purchase.options(delay="1h", tags={"shop.bulk": "1"})
    runs = [await kites.submit(f"kite {number}") for number in range(3)]
    path = "/bulk/new?verb=cancel&tag=shop.bulk%3D1&state=delayed"
    assert "<b>3 runs</b>" in (await visitor.get(path)).text
    (form,) = [form for form in await visitor.forms(path) if form.action.endswith("/bulk")]
    later = await kites.submit("a later kite")
    assert (await visitor.client.post(form.action, data=form.fields | {"ceiling": "10"})).status_code == 400
    fields = form.fields | {"ceiling": "10", "reason": "storm"}
    started = await visitor.client.post(form.action, data=fields)
    assert started.status_code == 303, started.text
    again = await visitor.client.post(form.action, data=fields)
    assert again.headers["location"] == started.headers["location"]
    async with asyncio.timeout(30):
        while "Cancel: completed" not in (await visitor.client.get(started.headers["location"])).text:
            await sample.engine.sweep_once("bulk_operations")
    assert [await run.state() for run in runs] == ["cancelled"] * 3
    assert await later.state() == "delayed"
    assert "storm" in (await visitor.get("/bulk")).text


async def test_the_page_of_a_run_shows_its_key_and_life(sample: Sample, visitor: Visitor) -> None:
    created = await sample.engine.create_execution(
        execution_id=sample.engine.new_execution_id("lives", "cart|cart-<7>"),
        lane_id="lives",
        execution_kind="cart",
        idempotency_key="cart|cart-<7>",
    )
    claimed = await claim_one(sample.engine, "lives")
    await sample.engine.continue_as_new(claimed.handle, b"[2]")

    page = (await visitor.get(f"/runs/{created.execution_id}")).text

    assert "<dt>Key</dt><dd>cart-&lt;7&gt;</dd>" in page
    assert "<dt>Life</dt><dd>1:" in page


async def test_the_live_stream_says_changed_when_a_run_ends(sample: Sample, app: App) -> None:
    """The last test of the page: with its server, the engine of the sample stops reading streams."""
    run = await sample.purchase.options(delay="1h").submit("a kite")
    async with (
        run_server(app) as url,
        httpx2.AsyncClient(base_url=url, headers={"sec-fetch-site": "same-origin"}) as client,
    ):
        await client.post("/ui/login", data={"token": TOKEN})
        async with client.stream("GET", "/ui/live", params={"about": f"run:{run.id}"}) as stream:
            await run.cancel()
            async for line in stream.aiter_lines():
                if line == "event: changed":
                    break
