"""Sessions of the console: tokens below a token, which end with it, with time, and at logout."""

from __future__ import annotations

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.model.security.api_token import ApiScope
from flowfabric.rules.security.sessions import SESSION_MAX_MS, SESSION_MS
from flowfabric.stores.port import Store

HOUR_MS = 60 * 60 * 1000
ROOT = "root:0123"


@pytest.fixture
async def engine(store: Store) -> Engine:
    return Engine(store)


async def parent_of_session(engine: Engine) -> tuple[str, str]:
    """Create a token and a session below it; return the token's id and the session's secret."""
    token = await engine.make_api_token("ci", ["read", "operate"], namespaces=["a"])
    session = await engine.open_session(
        parent=token.token_id, name="alice", scopes=["read", "operate"], namespaces=["a"]
    )
    return token.token_id, session.token


async def test_a_session_has_the_name_scopes_and_namespaces_it_was_opened_with(engine: Engine) -> None:
    _, secret = await parent_of_session(engine)
    bearer = await engine.authenticate_session(secret)
    assert bearer is not None
    assert bearer.name == "alice"
    assert bearer.scopes == {ApiScope.READ, ApiScope.OPERATE}
    assert bearer.namespaces == frozenset({"a"})


async def test_a_session_is_no_api_token_and_a_token_is_no_session(engine: Engine) -> None:
    _, secret = await parent_of_session(engine)
    token = await engine.make_api_token("t", ["read"])
    link = await engine.open_session(parent=ROOT, name="x", scopes=["read"], is_link=True)
    assert await engine.authenticate_token(secret) is None
    assert await engine.authenticate_token(secret.replace("ffs_", "ff_")) is None
    assert await engine.authenticate_session(token.token) is None
    assert await engine.authenticate_session(token.token.replace("ff_", "ffs_")) is None
    assert await engine.authenticate_session(link.token.replace("ffl_", "ffs_"), [ROOT]) is None
    assert await engine.redeem_login_link(secret.replace("ffs_", "ffl_")) is None


async def test_revoking_a_token_ends_its_sessions(engine: Engine) -> None:
    token_id, secret = await parent_of_session(engine)
    await engine.revoke_api_token(token_id)
    assert await engine.authenticate_session(secret) is None


async def test_a_session_below_a_root_token_is_valid_where_that_token_is(engine: Engine) -> None:
    session = await engine.open_session(parent=ROOT, name="root", scopes=["admin"])
    assert await engine.authenticate_session(session.token, [ROOT]) is not None
    assert await engine.authenticate_session(session.token, ["root:other"]) is None
    assert await engine.authenticate_session(session.token) is None


async def test_a_session_in_use_lasts_twelve_hours_longer_and_seven_days_at_most(
    engine: Engine, clock: ManualClock
) -> None:
    session = await engine.open_session(parent=ROOT, name="root", scopes=["read"])
    for _ in range(SESSION_MAX_MS // (10 * HOUR_MS)):
        clock.advance_ms(10 * HOUR_MS)
        assert await engine.authenticate_session(session.token, [ROOT]) is not None
    clock.advance_ms(10 * HOUR_MS)
    assert await engine.authenticate_session(session.token, [ROOT]) is None


async def test_a_session_that_is_not_used_ends_after_twelve_hours(engine: Engine, clock: ManualClock) -> None:
    session = await engine.open_session(parent=ROOT, name="root", scopes=["read"])
    clock.advance_ms(SESSION_MS)
    assert await engine.authenticate_session(session.token, [ROOT]) is None


async def test_a_link_opens_one_session_and_none_after_five_minutes(engine: Engine, clock: ManualClock) -> None:
    token = await engine.make_api_token("ci", ["read"])
    link = await engine.open_session(parent=token.token_id, name="ci", scopes=["read"], is_link=True)
    opened = await engine.redeem_login_link(link.token)
    assert opened is not None
    assert await engine.authenticate_session(opened.token) is not None
    assert await engine.redeem_login_link(link.token) is None
    late = await engine.open_session(parent=token.token_id, name="ci", scopes=["read"], is_link=True)
    clock.advance_ms(5 * 60 * 1000)
    assert await engine.redeem_login_link(late.token) is None


async def test_sessions_are_not_listed_among_tokens_and_ended_ones_are_deleted_by_the_next_login(
    engine: Engine, clock: ManualClock
) -> None:
    token_id, _ = await parent_of_session(engine)
    assert [token.token_id for token in await engine.list_api_tokens()] == [token_id]
    (session,) = await engine.list_api_tokens(sessions=True)
    assert session.parent == token_id
    clock.advance_ms(SESSION_MS)
    second = await engine.open_session(parent=token_id, name="bob", scopes=["read"])
    assert [each.token_id for each in await engine.list_api_tokens(sessions=True)] == [second.token_id]
