"""The link of an approval for programs and attackers: JSON requests and responses, and pages that never fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from flowfabric import Context, Fabric, InvalidInput, Run
from flowfabric.model.change import Change, Patch
from flowfabric.model.execution import Execution
from flowfabric.model.states import PublicState
from flowfabric.rules.durable import schema_limits
from flowfabric.rules.durable.vote_schema import schema_tag
from flowfabric.rules.execution.tags import encode_tags
from flowfabric.server.routing import SIGNAL_LIMIT
from tests.rules.durable.test_schema_limits import BAD, CIRCLES, ODD, choosing
from tests.sdk.conftest import running_worker
from tests.sdk.conftest import wait_until as wait_for_condition
from tests.server.api_client import ApiClient, path, wait_until
from tests.server.routes.test_approval_pages import api, app

__all__ = ["api", "app"]


class Payment(msgspec.Struct):
    status: str
    amount: int


PAID = {"status": "paid", "amount": 4200}


@dataclass
class OpenApproval:
    """A run that waits for votes, and its links."""

    run: Run[Any]
    links: list[str] = field(default_factory=list)


async def open_approval(app: Fabric, shape: Any, *, count: int = 1, show: Any = None) -> AsyncIterator[OpenApproval]:
    links: list[str] = []

    @app.task(name="checkout")
    async def checkout(ctx: Context) -> list[Any]:
        approval = await ctx.approval("paid", shape, need=count, approvers=count, show=show)
        links.extend(map(str, approval.links[len(links) :]))  # in later attempts the links have no tokens
        return [(vote.value, vote.by) for vote in await approval]

    async with running_worker(app, slots=1):
        run = await checkout.submit()
        await wait_until(lambda: len(links) == count)
        await wait_for_condition(lambda: is_suspended(run))
        yield OpenApproval(run, links)


@pytest.fixture
async def approval_run(app: Fabric) -> AsyncIterator[OpenApproval]:
    async for approval_run in open_approval(app, Payment, count=2):
        yield approval_run


async def is_suspended(run: Run[Any]) -> bool:
    return await run.state() is PublicState.SUSPENDED


async def result(run: Run[Any]) -> Any:
    async with asyncio.timeout(10):
        return await run.result()


async def test_a_vote_posted_as_json_gets_a_json_response(api: ApiClient, approval_run: OpenApproval) -> None:
    first = await api.post(f"{approval_run.links[0]}&by=bank", PAID)
    second = await api.post(approval_run.links[1], content=msgspec.json.encode(PAID))

    assert (first.status_code, first.headers["content-type"]) == (200, "application/json")
    assert first.json()["Accepted"]["effect"] == "appended_to_waitpoint"
    assert second.json()["Accepted"]["effect"] == "resume_condition_satisfied"
    assert await result(approval_run.run) == [[PAID, "bank"], [PAID, ""]]


async def test_a_repeated_vote_after_a_lost_reply_is_a_duplicate(api: ApiClient, approval_run: OpenApproval) -> None:
    for link in approval_run.links:
        assert (await api.post(link, PAID)).status_code == 200
    await result(approval_run.run)
    again = await api.post(approval_run.links[1], PAID)

    assert (again.status_code, list(again.json())) == (200, ["Duplicate"])


async def test_another_vote_with_the_same_link_is_a_conflict(api: ApiClient, approval_run: OpenApproval) -> None:
    await api.post(approval_run.links[0], PAID)
    other = await api.post(approval_run.links[0], PAID | {"amount": 1})

    assert (other.status_code, other.json()["kind"]) == (409, "state_conflict")
    await api.post(approval_run.links[1], PAID)
    assert [vote[0] for vote in await result(approval_run.run)] == [PAID, PAID]
    assert (await api.post(approval_run.links[0], PAID | {"amount": 2})).status_code == 409


async def test_every_invalid_link_gets_the_same_response_and_changes_nothing(
    api: ApiClient, approval_run: OpenApproval
) -> None:
    url, _, token = approval_run.links[0].partition("?token=")
    other = approval_run.links[1].partition("?token=")[2]
    before = await api.engine.describe_execution(approval_run.run.id)
    answers = [await api.post(f"{url}?token={shown}", PAID) for shown in ("", "k1:00", other, token[:-1] + "x")]
    answers.append(await api.post(f"{url[:-4]}0000?token={token}", PAID))
    answers.append(await api.post(f"/v1/waitpoints/x/y?token={token}", PAID))

    assert {(answer.status_code, answer.text) for answer in answers} == {(404, '{"error":"not found: waitpoint"}')}
    assert await api.engine.describe_execution(approval_run.run.id) == before


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "invalid JSON"),
        (b"{", 400, "invalid JSON"),
        (b"status=paid&amount=1", 400, "invalid JSON"),
        (b"[" * 50_000, 400, "invalid JSON"),
        (b'{"status":"paid","amount":' + b"9" * 4000 + b"}", 400, "more than 309 digits"),
        (b'{"status":"paid"}', 400, "invalid_input: amount is missing"),
        (b'"' + b"x" * SIGNAL_LIMIT + b'"', 413, "payload_too_large"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_an_invalid_body_is_refused_in_json(
    api: ApiClient, approval_run: OpenApproval, body: bytes, status: int, words: str
) -> None:
    answer = await api.post(approval_run.links[0], content=body)

    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text
    assert (await api.post(approval_run.links[0], PAID)).status_code == 200


async def test_a_link_contains_only_url_characters(approval_run: OpenApproval) -> None:
    for link in approval_run.links:
        assert not set(link) & set('{}"<>\\^`| ')
        assert "%7Bfp:" in link


async def test_a_boolean_vote_has_two_buttons_and_no_default(app: Fabric, api: ApiClient) -> None:
    async for approval_run in open_approval(app, bool):
        page = (await api.get(approval_run.links[0])).text
        assert '<button type="submit" name="value" value="0">yes</button>' in page
        assert '<button type="submit" name="value" value="1">no</button>' in page
        assert "<select" not in page
        assert "selected" not in page
        assert "checked" not in page
        # Enter in a text field presses the first button, so that one must do nothing.
        assert page.index("<button") == page.index('<button type="submit" disabled hidden>')
        token = approval_run.links[0].partition("?token=")[2]
        empty = await api.post(approval_run.links[0].partition("?")[0], data={"token": token})
        assert (empty.status_code, "value is missing" in empty.text) == (400, True)
        no = await api.post(approval_run.links[0].partition("?")[0], data={"token": token, "value": "1", "by": "ana"})
        assert no.status_code == 200
        assert await result(approval_run.run) == [[False, "ana"]]


async def store_tags(api: ApiClient, execution_id: str, tags: dict[str, str]) -> None:
    """Store tags without validation, as an older release did."""
    patch = Patch(Execution, (execution_id,), {"tags": encode_tags(tags)})
    change = Change(guards=(), writes=(patch,), id=api.engine.minter.change_id())
    assert await api.engine.store.commit([change]) != [None]


STORED = {
    **{f"bad {name}": msgspec.json.encode(schema).decode() for name, schema in BAD.items()},
    **{f"circle {number}": msgspec.json.encode(schema).decode() for number, schema in enumerate(CIRCLES)},
    **{f"odd {number}": msgspec.json.encode(schema).decode() for number, schema in enumerate(ODD)},
    "choices": msgspec.json.encode(choosing(60)).decode(),
    "pattern": '{"type":"string","pattern":"^(a+)+$"}',
    "number": '{"type":"integer","minimum":' + "9" * 4300 + "}",
    "deep": '{"items":' * 900 + "{}" + "}" * 900,
    "deeper": "[" * 20_000,
    "deep default": '{"type":"string","default":' + "[" * 900 + "]" * 900 + "}",
    "deep option": '{"enum":[' + "[" * 900 + "]" * 900 + "]}",
}
SHOWN = ["[" * 20_000, '{"a":' + "[" * 900 + "]" * 900 + "}", '{"a":' + "9" * 4300 + "}", "{", "5", '{"a":1e999}']


@pytest.mark.parametrize("schema", STORED.values(), ids=STORED)
async def test_no_stored_schema_makes_a_page_or_a_vote_fail(app: Fabric, api: ApiClient, schema: str) -> None:
    async for approval_run in open_approval(app, bool):
        await store_tags(api, approval_run.run.id, {schema_tag("paid"): schema})
        url, _, token = approval_run.links[0].partition("?token=")
        page = await api.get(approval_run.links[0])
        assert (page.status_code, len(page.text) < 128 * 1024) == (200, True)
        for given in (
            {"value": ""},
            {"value": "{"},
            {"value": "9" * 5000},
            {"value": "[" * 30_000},
            {"value": "x" * 60},
        ):
            answer = await api.post(url, data={"token": token} | given)
            assert answer.status_code in (200, 400, 404, 409), answer.text
        posted = await api.post(approval_run.links[0], content=b'"' + b"a" * 40 + b'!"')
        assert posted.status_code in (200, 400, 409), posted.text


@pytest.mark.parametrize("shown", SHOWN, ids=lambda text: text[:12])
async def test_no_stored_show_tag_makes_a_page_fail(app: Fabric, api: ApiClient, shown: str) -> None:
    async for approval_run in open_approval(app, bool):
        await store_tags(api, approval_run.run.id, {"ff.show": shown})
        assert (await api.get(approval_run.links[0])).status_code == 200


async def test_a_type_whose_schema_is_out_of_bounds_is_refused_before_the_approval_opens(app: Fabric) -> None:
    Large = msgspec.defstruct("Large", [(f"field_{n}", str) for n in range(schema_limits.MAX_NODES)])
    refusals: list[InvalidInput] = []

    @app.task(name="large")
    async def large(ctx: Context) -> None:
        try:
            _ = await ctx.approval("paid", Large)
        except InvalidInput as refused:
            refusals.append(refused)

    async with running_worker(app, slots=1):
        run = await large.submit()
        await result(run)
    assert "schema: " in refusals[0].detail
    assert "approval paid" in refusals[0].detail
    assert not (await (await app.engine()).list_pending_waitpoints(run.id)).entries


async def test_a_schema_out_of_bounds_is_refused_by_every_route(api: ApiClient) -> None:
    bad = {schema_tag("paid"): msgspec.json.encode(BAD["references"]).decode()}
    execution_id = await api.create()
    answers = [
        await api.post("/v1/executions", api.create_body(tags=bad)),
        await api.put(path(execution_id, "tags"), {"tags": bad}),
    ]
    assert [(answer.status_code, "reserved" in answer.text) for answer in answers] == [(400, True)] * len(answers)
    bulk = await api.post("/v1/executions/bulk", {"executions": [api.create_body(tags=bad)]})
    assert "reserved" in bulk.text
    held = await api.create_claimed()
    handle = await api.app.handle_signer.sign(held.handle)
    answer = await api.post("/v1/leases/tags", {"handle": handle, "tags": bad})
    assert (answer.status_code, "schema: " in answer.text) == (400, True)
    with pytest.raises(InvalidInput, match="schema: "):
        await api.engine.set_tags(held.handle, bad)
    for one in (execution_id, held.execution_id):
        assert (await api.engine.describe_execution(one)).tags == {}  # type: ignore[union-attr]
