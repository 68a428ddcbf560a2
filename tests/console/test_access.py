"""Who may: login, sessions, scopes, namespaces and the check of forms, on every store."""

from __future__ import annotations

import pytest

from flowfabric.model.security.api_token import ApiScope
from flowfabric.server import App, ServerSettings, create_app
from flowfabric.server.security.console_session import LOGIN_ATTEMPTS
from flowfabric.settings import Secret
from tests.console.sample import TOKEN, Sample
from tests.console.test_pages import run_path
from tests.console.visitor import Visitor, read

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def logged_in(app: App, *scopes: ApiScope, namespaces: list[str] | None = None) -> tuple[Visitor, str]:
    """Return a visitor with a token of these scopes, and the token's id."""
    token = await app.engine.make_api_token("somebody", scopes, namespaces=namespaces)
    visitor = Visitor(app)
    answer = await visitor.log_in(token.token)
    assert answer.status_code == 303, answer.text
    return visitor, token.token_id


async def test_without_a_session_every_page_leads_to_the_login_and_back(app: App) -> None:
    visitor = Visitor(app)
    answer = await visitor.get("/runs?state=failed")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/ui/login?next=%2Fui%2Fruns%3Fstate%3Dfailed"
    login = await visitor.client.get(answer.headers["location"])
    form = read(login.text).forms[0]
    done = await visitor.client.post(form.action, data=form.fields | {"token": TOKEN})
    assert done.headers["location"] == "/ui/runs?state=failed"
    cookie = done.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert (await visitor.client.get(done.headers["location"])).status_code == 200


async def test_json_without_a_session_is_401_and_a_bearer_token_will_do(app: App) -> None:
    visitor = Visitor(app)
    assert (await visitor.get("/runs.json")).status_code == 401
    answer = await visitor.get("/runs.json", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200


@pytest.mark.parametrize("after", ["https://evil.example/", "//evil.example/ui", "/v1/store", "/ui\\..\\x", "/uix"])
async def test_the_login_leads_to_no_page_but_the_consoles(app: App, after: str) -> None:
    answer = await Visitor(app).post("/login", {"token": TOKEN, "next": after})
    assert answer.headers["location"] == "/ui"


async def test_behind_tls_the_cookie_is_secure(sample: Sample) -> None:
    settings = ServerSettings(api_token=Secret(TOKEN), public_url="https://ff.example")
    answer = await Visitor(create_app(sample.engine, settings)).log_in(TOKEN)
    assert answer.headers["set-cookie"].startswith("__Host-ff=")
    assert "; Secure" in answer.headers["set-cookie"]


async def test_wrong_tokens_are_refused_and_after_some_of_them_the_address_has_to_wait(app: App) -> None:
    visitor = Visitor(app)
    for _ in range(LOGIN_ATTEMPTS):
        answer = await visitor.log_in("wrong")
        assert answer.status_code == 403
        assert "not valid" in answer.text
    late = await visitor.log_in(TOKEN)
    assert late.status_code == 429
    assert int(late.headers["retry-after"]) >= 1


async def test_logout_ends_the_session_also_for_a_copied_cookie(app: App, visitor: Visitor) -> None:
    copied = dict(visitor.client.cookies)
    answer = await visitor.send("/runs", "/logout")
    assert answer.status_code == 303
    thief = Visitor(app)
    thief.client.cookies.update(copied)
    assert (await thief.get("/runs")).status_code == 303


async def test_revoking_the_token_ends_its_sessions(app: App) -> None:
    visitor, token_id = await logged_in(app, ApiScope.READ)
    assert (await visitor.get("/runs")).status_code == 200
    await app.engine.revoke_api_token(token_id)
    app.authenticator.clear_cache()
    assert (await visitor.get("/runs")).status_code == 303


async def test_a_session_of_the_settings_token_ends_when_that_token_is_replaced(
    app: App, sample: Sample, visitor: Visitor
) -> None:
    other = Visitor(create_app(sample.engine, ServerSettings(api_token=Secret("another"))))
    other.client.cookies.update(dict(visitor.client.cookies))
    assert (await other.get("/runs")).status_code == 303
    both = ServerSettings(api_token=Secret("another"), previous_api_token=Secret(TOKEN))
    rotating = Visitor(create_app(sample.engine, both))
    rotating.client.cookies.update(dict(visitor.client.cookies))
    assert (await rotating.get("/runs")).status_code == 200


async def test_a_link_opens_the_console_once(app: App) -> None:
    visitor = Visitor(app)
    assert (await visitor.post("/links", {})).status_code == 401
    made = await visitor.post("/links", {}, headers={"authorization": f"Bearer {TOKEN}"})
    link = made.json()["path"]
    page = await visitor.client.get(link)
    form = read(page.text).forms[0]
    opened = await visitor.client.post(form.action, data=form.fields)
    assert opened.status_code == 303
    assert (await visitor.get("/runs")).status_code == 200
    again = await Visitor(app).client.post(form.action, data=form.fields)
    assert again.status_code == 403


async def test_the_scope_read_draws_no_button_and_is_refused_anyway(app: App, sample: Sample) -> None:
    reader, _ = await logged_in(app, ApiScope.READ)
    operator, _ = await logged_in(app, *ApiScope)
    path = run_path(sample, "delayed")
    for each in (path, "/runs", "/approvals", "", "/budgets", "/lanes", f"/flows/{sample.flow.id}"):
        actions = {form.action.rpartition("/")[2] for form in await reader.forms(each)}
        assert actions <= {"theme", "logout"}, each
    fields = {form.action: form.fields for form in await operator.forms(path)}
    refused = 0
    for action, hidden in fields.items():
        if not action.endswith(("/theme", "/logout")):
            answer = await reader.client.post(action, data=hidden)
            assert answer.status_code == 403, action
            refused += 1
    assert refused >= 4
    assert (await reader.get("/tokens")).status_code == 403
    assert (await reader.get("/submit")).status_code == 403
    assert await sample.runs["delayed"].state() == "delayed"


async def test_a_form_needs_its_token_its_session_and_a_page_of_this_server(
    app: App, sample: Sample, visitor: Visitor
) -> None:
    path = run_path(sample, "delayed")
    form = next(form for form in await visitor.forms(path) if form.action.endswith("/cancel"))
    for headers, fields in (
        ({"sec-fetch-site": "cross-site"}, form.fields),
        ({"sec-fetch-site": "none"}, form.fields),
        ({"sec-fetch-site": "same-site"}, form.fields),
        ({}, {}),
        ({}, {"csrf": "0" * 40}),
    ):
        answer = await visitor.client.post(form.action, data=fields, headers=headers)
        assert answer.status_code == 403, (headers, fields)
    del visitor.client.headers["sec-fetch-site"]
    for origin in (None, "http://evil.example", "null", "http://127.0.0.1"):
        headers = {} if origin is None else {"origin": origin}
        assert (await visitor.client.post(form.action, data=form.fields, headers=headers)).status_code == 403, origin
    other = form.action.replace("/cancel", "/tags")
    same = {"origin": "http://127.0.0.1:9090"}
    assert (await visitor.client.post(other, data=form.fields, headers=same)).status_code == 403
    assert await sample.runs["delayed"].state() == "delayed"
    tags = next(form for form in await visitor.forms(path) if form.action.endswith("/tags"))
    sent = await visitor.client.post(tags.action, data=tags.fields | {"key": "a.b", "value": "c"}, headers=same)
    assert sent.status_code == 303


async def test_the_cookie_counts_for_reads_of_the_api_by_pages_and_never_for_writes(
    app: App, sample: Sample, visitor: Visitor
) -> None:
    path = f"/v1/executions/{sample.runs['delayed'].id}"
    assert (await visitor.client.get(path)).status_code == 200
    foreign = {"sec-fetch-site": "cross-site"}
    assert (await visitor.client.get(path, headers=foreign)).status_code == 401
    body = {"execution_id": sample.runs["delayed"].id, "reason": "", "now": 0}
    assert (await visitor.client.post(f"{path}/cancel", json=body)).status_code == 401
    del visitor.client.headers["sec-fetch-site"]
    assert (await visitor.client.get(path)).status_code == 401


async def test_a_session_is_no_bearer_token(app: App, visitor: Visitor) -> None:
    secret = visitor.client.cookies["ff"]
    answer = await Visitor(app).client.get("/v1/lanes", headers={"authorization": f"Bearer {secret}"})
    assert answer.status_code == 401


async def test_a_token_of_other_namespaces_sees_nothing(app: App, sample: Sample) -> None:
    stranger, _ = await logged_in(app, *ApiScope, namespaces=["elsewhere"])
    assert "…" + sample.runs["deploy"].id[-8:] not in (await stranger.get("/runs")).text
    assert (await stranger.get("/runs?namespace=default")).status_code == 403
    assert (await stranger.get(run_path(sample, "deploy"))).status_code == 404
    assert (await stranger.get(f"/flows/{sample.flow.id}")).status_code == 404
    assert "deploy to production" not in (await stranger.get("/approvals")).text
    assert (await stranger.get("/budgets?namespace=default")).status_code == 403
    assert (await stranger.get("/store")).status_code == 403
    assert (await stranger.get("/tokens")).status_code == 403
    for path in ("", "/lanes", "/budgets", "/flows", "/submit"):
        text = (await stranger.get(path)).text
        assert "llm:acme" not in text
        assert "deploy" not in text.replace("deployed", "")


async def test_an_open_server_needs_no_login_but_forms_are_checked_all_the_same(sample: Sample) -> None:
    visitor = Visitor(create_app(sample.engine, ServerSettings()))
    path = run_path(sample, "delayed")
    assert (await visitor.get("")).status_code == 200
    sent = await visitor.send(path, "/tags", key="a.b", value="c")
    assert sent.status_code == 303
    form = next(form for form in await visitor.forms(path) if form.action.endswith("/cancel"))
    stranger = Visitor(create_app(sample.engine, ServerSettings()))
    assert (await stranger.client.post(form.action, data=form.fields)).status_code == 403


async def test_an_open_server_does_not_answer_to_a_foreign_host(sample: Sample) -> None:
    visitor = Visitor(create_app(sample.engine, ServerSettings()))
    assert (await visitor.get("", headers={"host": "evil.example"})).status_code == 421
