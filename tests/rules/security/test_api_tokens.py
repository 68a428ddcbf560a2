"""API tokens: when one is valid, and what a repeated change does."""

from __future__ import annotations

import msgspec
import pytest

from flowfabric.errors import NotFound
from flowfabric.model.security.api_token import ApiScope, ApiToken
from flowfabric.rules.security import api_tokens

ROW = ApiToken("t", "ci", "read,submit", "d1", created_at=0, namespaces='["a"]')


def with_(**fields: object) -> ApiToken:
    return msgspec.structs.replace(ROW, **fields)


@pytest.mark.parametrize(
    ("row", "digest", "now", "good"),
    [
        (ROW, "d1", 5, True),
        (ROW, "d2", 5, False),
        (ROW, "", 5, False),
        (with_(expires_at=5), "d1", 4, True),
        (with_(expires_at=5), "d1", 5, False),
        (with_(revoked_at=1), "d1", 5, False),
        (with_(previous_digest="d0", previous_until=5), "d0", 4, True),
        (with_(previous_digest="d0", previous_until=5), "d0", 5, False),
        (with_(previous_digest="d0", previous_until=5, revoked_at=1), "d0", 4, False),
    ],
)
def test_a_token_is_valid_between_its_instants(row: ApiToken, digest: str, now: int, good: bool) -> None:
    assert api_tokens.is_valid(row, digest, now) is good


def test_the_scopes_of_a_token_are_read_back() -> None:
    assert api_tokens.scopes_of(ROW) == {ApiScope.READ, ApiScope.SUBMIT}
    assert api_tokens.namespaces_of(ROW) == frozenset({"a"})
    assert api_tokens.namespaces_of(with_(namespaces=None)) is None


def test_a_change_whose_reply_was_lost_is_recognised() -> None:
    made = api_tokens.create(
        ROW, token_id="t", name="ci", scopes=frozenset(ApiScope), namespaces=None, digest="d1", expires_in_ms=None
    )
    assert made.change is None
    assert api_tokens.rotate(ROW, "d1", 1000).change is None
    again = api_tokens.revoke(with_(revoked_at=1))
    assert (again.answer, again.change) == (False, None)


def test_a_missing_or_revoked_token_is_not_found() -> None:
    for decision in (api_tokens.rotate(None, "d", 0), api_tokens.rotate(with_(revoked_at=1), "d", 0)):
        with pytest.raises(NotFound):
            decision.unwrap(0)
    with pytest.raises(NotFound):
        api_tokens.revoke(None).unwrap(0)


def test_no_digest_is_printed() -> None:
    assert "d1" not in repr(ROW)
