"""Tokens of waitpoints: who may approve without one, which one is the waitpoint's, and for whom it is read."""

from __future__ import annotations

from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.suspension import Suspension
from flowfabric.rules.security import waitpoint_token as waitpoint_tokens
from flowfabric.rules.security.waitpoint_token import TokenMismatch, UnknownWaitpoint, WaitpointToken
from flowfabric.rules.suspension import signals
from flowfabric.rules.suspension import waitpoints as waitpoint_rules
from tests.rules.execution.rows import EXECUTION, NOW
from tests.rules.suspension.test_guards import PENDING, SUSPENDED
from tests.rules.suspension.test_totality import KEY, W

TOKEN = WaitpointToken(waitpoint_tokens.mint_token(KEY, EXECUTION, W))
FOREIGN = replace(PENDING, execution_id="{fp:86}:33333333-3333-4333-8333-333333333333")
LANE = SUSPENDED.lane_id


def test_an_approval_gets_the_token_that_was_issued() -> None:
    assert signals.approval_token(SUSPENDED, PENDING, [KEY], LANE) == TOKEN


def test_an_approval_is_refused_for_the_first_reason_that_applies() -> None:
    refusals = [
        signals.approval_token(None, None, [KEY], "other"),
        signals.approval_token(SUSPENDED, None, [KEY], "other"),
        signals.approval_token(SUSPENDED, None, [KEY], LANE),
        signals.approval_token(SUSPENDED, FOREIGN, [KEY], LANE),
    ]

    assert [str(refusal) for refusal in refusals] == [
        str(errors.NotFound("execution")),
        str(errors.InvalidInput(f"lane_mismatch: the execution is in lane {LANE}")),
        str(errors.NotFound("waitpoint")),
        str(errors.NotFound("waitpoint")),
    ]


def test_a_presented_token_has_to_equal_the_issued_one() -> None:
    assert waitpoint_tokens.check_presented(TOKEN, WaitpointToken(TOKEN.reveal())) is None
    assert isinstance(waitpoint_tokens.check_presented(TOKEN, WaitpointToken("k1:")), TokenMismatch)
    assert isinstance(waitpoint_tokens.check_presented(None, TOKEN), UnknownWaitpoint)


def test_a_token_is_read_for_an_open_waitpoint_of_its_own_execution_only() -> None:
    suspension = Suspension(EXECUTION, 86)

    assert waitpoint_rules.token_if_open(PENDING, EXECUTION, suspension, [KEY], NOW) == TOKEN
    assert waitpoint_rules.token_if_open(None, EXECUTION, suspension, [KEY], NOW) is None
    assert waitpoint_rules.token_if_open(FOREIGN, EXECUTION, suspension, [KEY], NOW) is None
    closed = replace(PENDING, closed_at=NOW, close_reason="by hand", pending_until=None)
    assert waitpoint_rules.token_if_open(closed, EXECUTION, suspension, [KEY], NOW) is None
