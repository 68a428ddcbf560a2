"""The values from which operations are drawn: names, durations and policies, valid and invalid ones.

Every constant is a sequence to choose from; a repeated value is chosen more often.
"""

from __future__ import annotations

from typing import Any

from flowfabric.ids import LaneId, PartitionCounts, solo_partition

LANES = ("default", "mail")
WORKERS = ("wa", "wb")
MISSING = "{fp:86}:00000000-0000-4000-8000-000000000000"
SECRET = "00112233445566778899aabbccddeeff" * 2
OTHER_SECRET = "ffeeddccbbaa99887766554433221100" * 2


def partition(lane: str) -> int:
    """Return the partition of a lane: a lane has one partition, so that the order of its claims is deterministic."""
    return solo_partition(LaneId(lane), PartitionCounts())


def _retry(times: int, **backoff: Any) -> dict[str, Any]:
    return {"retry_policy": {"max_retries": times, "backoff": backoff}}


GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}

POLICIES: tuple[Any, ...] = (
    None,
    None,
    _retry(2, type="fixed", delay_ms=500),
    _retry(1, type="exponential", initial_delay_ms=100, multiplier=3.0, jitter=True),
    _retry(0, type="fixed", delay_ms=100),
    _retry(1, type="fixed", delay_ms=0),
    _retry(1, type="fixed", delay_ms=0),
    {**_retry(5, type="fixed", delay_ms=0), "max_replay_count": 1},
    {"retry_policy": {"max_retries": 3, "retryable_categories": ["rate_limit"]}},
    {"timeout_policy": {"attempt_timeout_ms": 700}, **_retry(1, type="fixed", delay_ms=100)},
    {"timeout_policy": {"execution_deadline_ms": 2000}},
    {"max_reclaim_count": 0},
    {"max_reclaim_count": 1, "timeout_policy": {"attempt_timeout_ms": 5000}},
    {"stream_policy": {"retention_ttl_ms": 1000}, "max_replay_count": 2},
    {"stream_policy": {"retention_ttl_ms": 0}},
    GPU,
    {"routing_requirements": {"required_capabilities": ["cuda", "gpu"]}, **_retry(1, type="fixed", delay_ms=1)},
    {"dedup_window_ms": 1000},
    {"dedup_window_ms": 0},
    {"ageing": 100},
    {"delay_until": 1_700_000_001_000},
)
UNSOUND_POLICIES: tuple[Any, ...] = (
    "{not json",
    "[]",
    {"routing_requirements": 7},
    {"routing_requirements": {"required_capabilities": "gpu"}},
    {"routing_requirements": {"required_capabilities": ["a,b"]}},
    {"max_reclaim_count": -1},
)

lanes = LANES
workers = WORKERS
instances = ("1", "2")
offers = ((), ("gpu",), ("gpu",), ("cuda", "gpu"), ("cuda", "gpu", "x"))
ttls = (1, 100, 1000, 5000, 30_000, 30_000, 60_000, 60_000)
lengths = (None, None, 0, 1, 300, 5000)
instants = (None, None, None, -1, 0, 1, 500, 2000)  # distances from now
priorities = (0, 0, 1, 5, 9000, -5, 10_000)
policies = POLICIES
namespaces = ("n1", "n1", "n2")
keys = (None, None, None, "", "k", "k", "k2")
tags: tuple[dict[str, str], ...] = ({}, {}, {"cairn.instance_id": "i1"}, {"app.sub.field": "v", "a.b": "ß"})
reasons = ("boom", "flaky", "")
categories = ("transient", "transient", "rate_limit", "permanent", "cancelled", "timeout", "odd one")
results = (None, b"", b"r1", b"\x00\xff")
picks = range(10)
holders_verbs = ("complete", "fail", "fail", "delay", "wait_children", "renew", "progress", "progress", "cancel")
seats = (0, 0, 0, 1)
mostly = (True, True, True, True, False)
parts = (0, 1, 2, 3, 3, 3, 3)  # how many parts of a fence are given
around = (-1, 0, 0, 1)
sources = (None, None, "operator_override", "worker")
cancel_sources = ("operator_override", "flow_cascade", "system_timeout", "worker", "me", "")
expiries = ("attempt_timeout", "execution_deadline")
blockings = (
    "waiting_for_budget",
    "waiting_for_quota",
    "waiting_for_capable_worker",
    "paused_by_operator",
    "paused_by_policy",
    "foo",
)
expectations = (
    None,
    None,
    None,
    "waiting_for_budget",
    "waiting_for_quota",
    "waiting_for_capable_worker",
    "paused_by_flow_cancel",
)
sweeps = (
    "lease_expiry",
    "delayed_promoter",
    "delayed_promoter",
    "attempt_timeout",
    "execution_deadline",
    "retention_trimmer",
)
four_keys = ((None, None, None, None), ("k", "k", None, "k2"), (None, "k", "", "k"), ("k2", None, "k", "k2"))
