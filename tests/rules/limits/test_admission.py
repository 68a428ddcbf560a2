"""Which budget or quota policy refuses an execution."""

from __future__ import annotations

from flowfabric import errors
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.answers.limits import QuotaLimitKind, QuotaLimits
from flowfabric.model.execution import Execution
from flowfabric.model.limits.quota import QuotaPolicy
from flowfabric.model.states import BlockingReason
from flowfabric.rules.execution.policy import Terms, encode_terms
from flowfabric.rules.limits.admission import KnownLimits, quota_refusal
from tests.rules.limits.test_capacity import BUDGET, NOW, OTHER, POLICY, budget, policy
from tests.stores.sample_rows import loaded, queued


def row(*policies: str, budgets: tuple[str, ...] = ()) -> Execution:
    return loaded(queued("a", terms=encode_terms(Terms(quota_policy_ids=policies, budget_ids=budgets))))


def test_an_exhausted_budget_refuses_before_a_full_policy() -> None:
    one, known = row("policy", budgets=("budget",)), KnownLimits()
    assert (known.missing_budgets([one]), known.missing_policies([one])) == ([BUDGET], [POLICY])
    states = {POLICY: policy(POLICY, 1, "x")}
    known.add_policy(POLICY, states[POLICY].root)
    known.add_budget(BUDGET, budget(BUDGET, 5))
    assert (known.missing_budgets([one]), known.missing_policies([one])) == ([], [])

    refused = known.refusal(one, states, NOW, call_id=9, chance=0.0)

    assert refused is not None
    assert (refused.reason, refused.limit) == (BlockingReason.WAITING_FOR_BUDGET, BUDGET)
    assert (refused.detail, refused.dimension) == ("budget budget: tokens 5/5", "tokens")
    assert refused == known.budget_refusal(one)

    known.add_budget(BUDGET, budget(BUDGET, 4))
    refused = known.refusal(one, states, NOW, call_id=9, chance=0.0)
    assert refused is not None
    assert (refused.reason, refused.hit) == (BlockingReason.WAITING_FOR_QUOTA, QuotaLimitKind.CONCURRENCY)


def test_only_policies_whose_state_is_given_refuse() -> None:
    one, known = row("policy", "other"), KnownLimits()
    for key in (POLICY, OTHER):
        known.add_policy(key, policy(key, 1).root)

    full = policy(OTHER, 1, "x")

    assert known.refusal(one, {POLICY: policy(POLICY, 1)}, NOW, call_id=9, chance=0.0) is None
    refused = known.refusal(one, {OTHER: full}, NOW, call_id=9, chance=0.0)
    assert refused is not None
    assert (refused.limit, refused.detail) == (OTHER, "quota other: 1 slot, all taken")


def test_an_undefined_or_unlimited_policy_is_not_checked() -> None:
    known = KnownLimits()
    known.add_policy(POLICY, None)
    known.add_policy(OTHER, QuotaPolicy("other", 3, defined=True))

    assert known.policies_of(row("policy", "other")) == [POLICY, OTHER]
    assert known.limited_policies(row("policy", "other")) == []


def test_a_corrupt_limit_is_reported_to_its_own_executions_only() -> None:
    known = KnownLimits()
    known.add_policy(POLICY, QuotaPolicy("policy", 3, defined=True, jitter_ms=-1))
    known.add_policy(OTHER, None)

    assert isinstance(known.find_corruption([row("other"), row("policy")]), errors.Corruption)
    assert known.find_corruption([row("other")]) is None


def test_a_rate_refusal_says_when_to_retry() -> None:
    refused = quota_refusal(POLICY, QuotaLimits(1, 1, 0), limit_answers.RateExceeded(250))

    assert refused is not None
    assert (refused.hit, refused.wait_ms) == (QuotaLimitKind.RATE, 250)
    # The detail is stored, so it contains no length of time: that would be wrong a moment later.
    assert refused.detail == "quota policy: 1 start per window, all used"
    assert quota_refusal(POLICY, QuotaLimits(1, 1, 0), limit_answers.AlreadyAdmitted()) is None
