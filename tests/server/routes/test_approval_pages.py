"""The page behind a signed link: a form without JavaScript, typed by the approval's schema."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from enum import StrEnum
from html import escape, unescape
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec
import pytest

from flowfabric import Context, Fabric
from flowfabric.engine.engine import Engine
from tests.sdk.conftest import running_worker
from tests.server.api_client import ApiClient, path, wait_until

NASTY = "<script>alert(1)</script>\"'&"


class Choice(StrEnum):
    PAY = "pay"
    REFUSE = NASTY


class Decision(msgspec.Struct):
    choice: Choice
    amount: Annotated[int, msgspec.Meta(ge=1, le=100)]
    note: str = "fine"
    urgent: bool = False


class OpenApproval:
    """A run that waits for votes, and its links."""

    def __init__(self) -> None:
        self.links: list[str] = []
        self.votes: list[Any] = []
        self.opened = asyncio.Event()
        self.run: Any = None


@pytest.fixture
async def app() -> AsyncIterator[Fabric]:
    """An app whose worker runs in this process."""
    async with Fabric("memory://", public_url="http://ff") as app:
        yield app


@pytest.fixture
async def api(app: Fabric) -> ApiClient:
    """A client of a server on the same store."""
    engine = await app.engine()
    assert isinstance(engine, Engine)
    return ApiClient(engine)


@pytest.fixture
async def approval_run(app: Fabric) -> AsyncIterator[OpenApproval]:
    """An approval with two approvers that needs one vote."""
    approval_run = OpenApproval()

    @app.task(name="decide")
    async def decide(ctx: Context) -> int:
        approval = await ctx.approval("pay_out", Decision, need=1, approvers=2, show={"to": NASTY, "amount": 5})
        approval_run.links = list(map(str, approval.links))
        approval_run.opened.set()
        votes = await approval
        approval_run.votes = [(vote.value, vote.by) for vote in votes]
        return len(votes)

    async with running_worker(app, slots=1):
        approval_run.run = await decide.submit()
        async with asyncio.timeout(10):
            await approval_run.opened.wait()
        yield approval_run


def hidden(page: str) -> dict[str, str]:
    """Return the hidden fields of the form."""
    return {name: unescape(value) for name, value in re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page)}


def option(page: str, words: str) -> str:
    """Return the value that a browser sends for the option or button with this label."""
    choice = r'<(?:option|button type="submit" name="value") value="(\d+)">([^<]*)<'
    options: list[tuple[str, str]] = re.findall(choice, page)
    return next(value for value, text in options if text == words)


async def post(api: ApiClient, link: str, form: dict[str, str]) -> Any:
    return await api.post(link.partition("?")[0], data=form)


async def test_a_link_shows_the_approval_and_accepts_the_vote(api: ApiClient, approval_run: OpenApproval) -> None:
    page = await api.get(approval_run.links[0])

    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["referrer-policy"] == "no-referrer"
    assert "<script" not in page.text
    assert "&lt;script&gt;" in page.text
    assert '<select name="value.choice" required>' in page.text
    assert '<input type="number" step="1" name="value.amount" min="1" max="100" required>' in page.text
    assert '<input type="text" name="value.note" value="fine">' in page.text
    form = hidden(page.text) | {"value.choice": option(page.text, "pay"), "value.amount": "7"}
    form |= {"value.note": "ok", "value.urgent": option(page.text, "yes"), "by": "ana"}

    thanks = await post(api, approval_run.links[0], form)

    assert (thanks.status_code, "recorded" in thanks.text) == (200, True)
    async with asyncio.timeout(10):
        assert await approval_run.run.result() == 1
    assert approval_run.votes == [(Decision(Choice.PAY, 7, "ok", True), "ana")]
    used = await api.get(approval_run.links[0])
    assert (used.status_code, "not good" in used.text) == (404, True)


async def test_a_form_that_is_sent_twice_counts_as_one_vote(api: ApiClient, approval_run: OpenApproval) -> None:
    page = (await api.get(approval_run.links[0])).text
    form = hidden(page) | {"value.choice": option(page, escape(NASTY)), "value.amount": "1"}
    answers = await asyncio.gather(*(post(api, approval_run.links[0], form) for _ in range(2)))

    assert sorted(answer.status_code for answer in answers)[0] == 200
    assert all(answer.status_code in (200, 404, 409) for answer in answers)
    async with asyncio.timeout(10):
        await approval_run.run.result()
    assert len(approval_run.votes) == 1
    assert approval_run.votes[0][0].choice is Choice.REFUSE


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"value.choice": "0"}, "amount is missing"),
        ({"value.choice": "0", "value.amount": "many"}, "amount: a whole number is needed"),
        ({"value.choice": "0", "value.amount": "101"}, "amount: at most 100 is needed"),
        ({"value.choice": "9", "value.amount": "1"}, "choice: choose one of the options"),
        ({"value.choice": NASTY, "value.amount": "1"}, "choice: choose one of the options"),
    ],
)
async def test_an_invalid_form_is_shown_again_with_the_error(
    api: ApiClient, approval_run: OpenApproval, given: dict[str, str], words: str
) -> None:
    form = hidden((await api.get(approval_run.links[0])).text) | given
    answer = await post(api, approval_run.links[0], form)

    assert answer.status_code == 400
    assert words in answer.text
    assert "<script" not in answer.text


async def test_every_wrong_link_gets_the_same_page(api: ApiClient, approval_run: OpenApproval) -> None:
    url, _, token = approval_run.links[0].partition("?token=")
    other = approval_run.links[1].partition("?token=")[2]
    pages = [await api.get(f"{url}?token={shown}") for shown in ("", "k1:00", other, token[:-1], token.upper() + "é")]
    pages.append(await api.get(f"{url[:-4]}0000?token={token}"))
    pages.append(await api.get(f"/v1/waitpoints/x/y?token={token}"))
    pages.append(await post(api, url, {"token": "k1:00", "value.choice": "0"}))

    assert {page.status_code for page in pages} == {404}
    assert len({page.text for page in pages}) == 1


async def test_a_second_vote_with_one_link_is_a_conflict(app: Fabric, api: ApiClient) -> None:
    links: list[str] = []

    @app.task(name="both")
    async def both(ctx: Context) -> list[bool]:
        approval = await ctx.approval("agree", bool, need=2, approvers=2)
        links.extend(map(str, approval.links))
        return [vote.value for vote in await approval]

    async def votes(link: str, words: str) -> tuple[int, str]:
        page = (await api.get(link)).text
        answer = await post(api, link, hidden(page) | {"value": option(page, words)})
        return answer.status_code, answer.text

    async with running_worker(app, slots=1):
        run = await both.submit()
        await wait_until(lambda: len(links) == 2)
        assert (await votes(links[0], "yes"))[0] == 200
        status, reply = await votes(links[0], "no")
        assert (status, "given with this link before. That one counts" in reply) == (409, True)
        assert (await votes(links[1], "yes"))[0] == 200
        async with asyncio.timeout(10):
            assert await run.result() == [True, True]


async def test_a_link_works_with_special_characters_in_the_key_id(app: Fabric, api: ApiClient) -> None:
    await api.engine.rotate_waitpoint_hmac_secret_all("a&b=c+d %41 #é?/", "77" * 32, 0)
    links: list[str] = []

    @app.task(name="oddly")
    async def oddly(ctx: Context) -> bool:
        approval = await ctx.approval("agree", bool)
        links.extend(map(str, approval.links))
        [vote] = await approval
        return vote.value

    async with running_worker(app, slots=1):
        run = await oddly.submit()
        await wait_until(lambda: len(links) == 1)
        page = await api.get(links[0])
        assert page.status_code == 200
        answer = await post(api, links[0], hidden(page.text) | {"value": option(page.text, "yes")})
        assert answer.status_code == 200
        async with asyncio.timeout(10):
            assert await run.result() is True


async def test_a_signal_without_a_form_is_validated_against_the_schema(
    api: ApiClient, approval_run: OpenApproval
) -> None:
    url, _, token = approval_run.links[0].partition("?token=")
    execution_id, waitpoint_id = unquote(url).rsplit("/", 2)[1:]
    bodies = {
        payload: api.signal_body(execution_id, waitpoint_id, token, signal_name="vote", payload=list(payload))
        for payload in (b"", b"true", b'{"choice":"pay"}', b'{"choice":"pay","amount":101}', b"\xff", b"[" * 20_000)
    }

    for payload, body in bodies.items():
        answer = await api.post(path(execution_id, "signal"), body)
        assert (answer.status_code, answer.json()["error"].startswith("invalid_input: ")) == (400, True), payload
    good = api.signal_body(
        execution_id, waitpoint_id, token, signal_name="vote", payload=list(b'{"choice":"pay","amount":7}')
    )
    answer = await api.post(path(execution_id, "signal"), good)

    assert answer.json()["Accepted"]["effect"] == "resume_condition_satisfied"
    async with asyncio.timeout(10):
        assert await approval_run.run.result() == 1
