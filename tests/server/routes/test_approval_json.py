"""The link of an approval for programs, and for whoever means harm: JSON in and out, and no page that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from flowfabric import Context, Fabric, InvalidInput, Run
from flowfabric.engine.engine import Engine
from flowfabric.model.change import Change, Patch
from flowfabric.model.execution import Execution
from flowfabric.rules.durable import schema_limits
from flowfabric.rules.durable.vote_schema import schema_tag
from flowfabric.rules.execution.tags import encode_tags
from flowfabric.sdk.worker.worker import Worker
from flowfabric.server.routing import SIGNAL_LIMIT
from tests.rules.durable.test_schema_limits import BAD, CIRCLES, ODD, choosing
from tests.server.asking import Asking, path, until


class Payment(msgspec.Struct):
    status: str
    amount: int


PAID = {"status": "paid", "amount": 4200}


@dataclass
class Asked:
    """A run that waits for a decision, and its links."""

    run: Run[Any]
    links: list[str] = field(default_factory=list)


@pytest.fixture
async def app() -> AsyncIterator[Fabric]:
    async with Fabric("memory://", public_url="http://ff") as app:
        yield app


@pytest.fixture
async def ask(app: Fabric) -> Asking:
    engine = await app.engine()
    assert isinstance(engine, Engine)
    return Asking(engine)


async def waiting(app: Fabric, shape: Any, *, count: int = 1, show: Any = None) -> AsyncIterator[Asked]:
    links: list[str] = []

    @app.task(name="checkout")
    async def checkout(ctx: Context) -> list[Any]:
        approval = await ctx.approval("paid", shape, need=count, approvers=count, show=show)
        links.extend(map(str, approval.links[len(links) :]))  # a later attempt is told them without their tokens
        return [(vote.value, vote.by) for vote in await approval]

    worker = Worker(app, slots=1)
    working = asyncio.create_task(worker.work())
    run = await checkout.submit()
    await until(lambda: len(links) == count)
    yield Asked(run, links)
    worker.stop()
    await working


@pytest.fixture
async def asked(app: Fabric) -> AsyncIterator[Asked]:
    async for asked in waiting(app, Payment, count=2):
        yield asked


async def result(run: Run[Any]) -> Any:
    async with asyncio.timeout(10):
        return await run.result()


async def test_a_program_posts_its_decision_to_the_link_and_is_answered_in_json(ask: Asking, asked: Asked) -> None:
    first = await ask.post(f"{asked.links[0]}&by=bank", PAID)
    second = await ask.post(asked.links[1], content=msgspec.json.encode(PAID))

    assert (first.status_code, first.headers["content-type"]) == (200, "application/json")
    assert first.json()["Accepted"]["effect"] == "appended_to_waitpoint"
    assert second.json()["Accepted"]["effect"] == "resume_condition_satisfied"
    assert await result(asked.run) == [[PAID, "bank"], [PAID, ""]]


async def test_a_decision_that_is_posted_again_after_a_lost_answer_is_the_same_vote(ask: Asking, asked: Asked) -> None:
    for link in asked.links:
        assert (await ask.post(link, PAID)).status_code == 200
    await result(asked.run)
    again = await ask.post(asked.links[1], PAID)

    assert (again.status_code, list(again.json())) == (200, ["Duplicate"])


async def test_another_decision_with_the_same_link_is_a_conflict(ask: Asking, asked: Asked) -> None:
    await ask.post(asked.links[0], PAID)
    other = await ask.post(asked.links[0], PAID | {"amount": 1})

    assert (other.status_code, other.json()["kind"]) == (409, "state_conflict")
    await ask.post(asked.links[1], PAID)
    assert [vote[0] for vote in await result(asked.run)] == [PAID, PAID]
    assert (await ask.post(asked.links[0], PAID | {"amount": 2})).status_code == 409


async def test_a_link_that_is_not_good_is_answered_the_same_and_leaves_no_trace(ask: Asking, asked: Asked) -> None:
    place, _, token = asked.links[0].partition("?token=")
    other = asked.links[1].partition("?token=")[2]
    before = await ask.engine.describe_execution(asked.run.id)
    answers = [await ask.post(f"{place}?token={shown}", PAID) for shown in ("", "k1:00", other, token[:-1] + "x")]
    answers.append(await ask.post(f"{place[:-4]}0000?token={token}", PAID))
    answers.append(await ask.post(f"/v1/waitpoints/x/y?token={token}", PAID))

    assert {(answer.status_code, answer.text) for answer in answers} == {(404, '{"error":"not found: waitpoint"}')}
    assert await ask.engine.describe_execution(asked.run.id) == before


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
async def test_a_body_that_cannot_be_used_is_refused_in_json(
    ask: Asking, asked: Asked, body: bytes, status: int, words: str
) -> None:
    answer = await ask.post(asked.links[0], content=body)

    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text
    assert (await ask.post(asked.links[0], PAID)).status_code == 200


async def test_a_link_holds_only_characters_of_a_url(asked: Asked) -> None:
    for link in asked.links:
        assert not set(link) & set('{}"<>\\^`| ')
        assert "%7Bfp:" in link


async def test_a_question_of_yes_or_no_has_two_buttons_and_nothing_is_chosen(app: Fabric, ask: Asking) -> None:
    async for asked in waiting(app, bool):
        page = (await ask.get(asked.links[0])).text
        assert '<button type="submit" name="value" value="0">yes</button>' in page
        assert '<button type="submit" name="value" value="1">no</button>' in page
        assert "<select" not in page
        assert "selected" not in page
        assert "checked" not in page
        # Enter in the field for the name presses the first button: it must be one that does nothing.
        assert page.index("<button") == page.index('<button type="submit" disabled hidden>')
        token = asked.links[0].partition("?token=")[2]
        empty = await ask.post(asked.links[0].partition("?")[0], data={"token": token})
        assert (empty.status_code, "value is missing" in empty.text) == (400, True)
        no = await ask.post(asked.links[0].partition("?")[0], data={"token": token, "value": "1", "by": "ana"})
        assert no.status_code == 200
        assert await result(asked.run) == [[False, "ana"]]


async def store_tags(ask: Asking, execution_id: str, tags: dict[str, str]) -> None:
    """Store tags as an older release took them, without a check."""
    patch = Patch(Execution, (execution_id,), {"tags": encode_tags(tags)})
    change = Change(guards=(), writes=(patch,), id=ask.engine.minter.change_id())
    assert await ask.engine.store.commit([change]) != [None]


STORED = {
    **{f"bad {name}": msgspec.json.encode(schema).decode() for name, schema in BAD.items()},
    **{f"circle {place}": msgspec.json.encode(schema).decode() for place, schema in enumerate(CIRCLES)},
    **{f"odd {place}": msgspec.json.encode(schema).decode() for place, schema in enumerate(ODD)},
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
async def test_no_stored_schema_makes_a_page_or_a_vote_fail(app: Fabric, ask: Asking, schema: str) -> None:
    async for asked in waiting(app, bool):
        await store_tags(ask, asked.run.id, {schema_tag("paid"): schema})
        place, _, token = asked.links[0].partition("?token=")
        page = await ask.get(asked.links[0])
        assert (page.status_code, len(page.text) < 128 * 1024) == (200, True)
        for given in (
            {"value": ""},
            {"value": "{"},
            {"value": "9" * 5000},
            {"value": "[" * 30_000},
            {"value": "x" * 60},
        ):
            answer = await ask.post(place, data={"token": token} | given)
            assert answer.status_code in (200, 400, 404, 409), answer.text
        posted = await ask.post(asked.links[0], content=b'"' + b"a" * 40 + b'!"')
        assert posted.status_code in (200, 400, 409), posted.text


@pytest.mark.parametrize("shown", SHOWN, ids=lambda text: text[:12])
async def test_whatever_is_shown_the_page_is_there(app: Fabric, ask: Asking, shown: str) -> None:
    async for asked in waiting(app, bool):
        await store_tags(ask, asked.run.id, {"ff.show": shown})
        assert (await ask.get(asked.links[0])).status_code == 200


async def test_a_type_whose_schema_is_out_of_bounds_is_refused_before_anybody_is_asked(app: Fabric) -> None:
    Large = msgspec.defstruct("Large", [(f"field_{n}", str) for n in range(schema_limits.MAX_NODES)])
    refusals: list[InvalidInput] = []

    @app.task(name="large")
    async def large(ctx: Context) -> None:
        try:
            _ = await ctx.approval("paid", Large)
        except InvalidInput as refused:
            refusals.append(refused)

    worker = Worker(app, slots=1)
    working = asyncio.create_task(worker.work())
    run = await large.submit()
    await result(run)
    worker.stop()
    await working
    assert "schema: " in refusals[0].detail
    assert "approval paid" in refusals[0].detail
    assert not (await (await app.engine()).list_pending_waitpoints(run.id)).entries


async def test_a_schema_out_of_bounds_is_refused_on_every_way_in(ask: Asking) -> None:
    bad = {schema_tag("paid"): msgspec.json.encode(BAD["references"]).decode()}
    execution_id = await ask.created()
    ways = [
        await ask.post("/v1/executions", ask.creation(tags=bad)),
        await ask.put(path(execution_id, "tags"), {"tags": bad}),
    ]
    assert [(answer.status_code, "reserved" in answer.text) for answer in ways] == [(400, True)] * len(ways)
    bulk = await ask.post("/v1/executions/bulk", {"executions": [ask.creation(tags=bad)]})
    assert "reserved" in bulk.text
    held = await ask.claimed()
    handle = await ask.app.handle_signer.sign(held.handle)
    answer = await ask.post("/v1/leases/tags", {"handle": handle, "tags": bad})
    assert (answer.status_code, "schema: " in answer.text) == (400, True)
    with pytest.raises(InvalidInput, match="schema: "):
        await ask.engine.set_tags(held.handle, bad)
    for one in (execution_id, held.execution_id):
        assert (await ask.engine.describe_execution(one)).tags == {}  # type: ignore[union-attr]
