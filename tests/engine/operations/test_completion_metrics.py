"""Completions are counted one by one, whether or not they were written together."""

from __future__ import annotations

from msgspec.structs import replace

from flowfabric.engine.metrics.completions import CompletionMetrics
from flowfabric.engine.metrics.recorder import Metrics
from flowfabric.model.execution import Execution
from tests.stores.sample_rows import execution, loaded


def ended(lane: str, created_at: int) -> Execution:
    return replace(loaded(execution("e")), lane_id=lane, created_at=created_at)


def test_similar_completions_are_all_counted() -> None:
    meters = Metrics()
    ends = [ended("a", 9_000), ended("a", 9_000), ended("b", 9_000), ended("a", 4_000)]
    CompletionMetrics(meters).record_many(ends, "success", 10_000)

    for lane, number, seconds in (("a", 3, 8.0), ("b", 1, 1.0)):
        assert meters.counter_value("ff_completions", lane=lane, outcome="success") == number
        assert meters.counter_value("ff_attempt_outcome", lane=lane, outcome="ok") == number
        timing = meters.histogram("ff_execution_e2e_duration", (("lane", lane),))
        assert (timing.count, timing.total_s, sum(timing.buckets)) == (number, seconds, number)


def test_completions_counted_together_fall_into_the_same_buckets_as_single_ones() -> None:
    together, singly = Metrics(), Metrics()
    ends = [ended("a", created) for created in (9_999, 9_000, 9_999, 5_000, 0)]
    CompletionMetrics(together).record_many(ends, "cancelled", 10_000)
    for one in ends:
        CompletionMetrics(singly).record_many([one], "cancelled", 10_000)

    assert together.counters == singly.counters
    assert [one.buckets for one in together.histograms.values()] == [one.buckets for one in singly.histograms.values()]
