"""The spread of a lane: its partitions, what a change writes, and where a key belongs."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.ids import (
    LaneId,
    PartitionCounts,
    SeededMinter,
    crc16,
    key_partition,
    lane_partitions,
    mint_solo,
    partition_of,
)
from flowfabric.ids import solo_partition as first_partition
from flowfabric.model.change import Guard, Insert, Upsert
from flowfabric.model.deployment import LaneNearCeiling, NodeLoad
from flowfabric.model.instant import FromNow
from flowfabric.model.scheduling.lane import Lane, LaneSpread
from flowfabric.rules.scheduling import lane_spread
from flowfabric.rules.scheduling.lane_spread import GRACE_MS, MAX_FORMER, SETTLE_MS, KeyPlace

NOW = 1_700_000_000_000
COUNTS = PartitionCounts()
MAIL = LaneId("mail")
FIRST = first_partition(MAIL, COUNTS)


def keys_of(spread: int) -> dict[str, int]:
    return {f"k{n}": key_partition(MAIL, spread, COUNTS, f"k{n}") for n in range(500)}


def place(row: Lane | None, key: str, partition: int, *, now: int = NOW, loaded_at: int = NOW) -> KeyPlace | None:
    return lane_spread.place_key(row, MAIL, key, partition, loaded_at=loaded_at, now=now, counts=COUNTS)


@pytest.mark.parametrize("lane", ["default", "mail", "a", "x" * 64])
def test_a_larger_spread_keeps_the_partitions_of_a_smaller_one(lane: str) -> None:
    whole = lane_partitions(LaneId(lane), 256, COUNTS)

    assert sorted(whole) == list(range(256))
    assert whole[0] == first_partition(LaneId(lane), COUNTS)
    for spread in (1, 2, 7, 255):
        assert lane_partitions(LaneId(lane), spread, COUNTS) == whole[:spread]


def test_lanes_have_different_partitions() -> None:
    assert len({lane_partitions(LaneId(f"lane{n}"), 4, COUNTS) for n in range(50)}) == 50


def test_the_partitions_of_a_lane_are_the_same_in_every_release() -> None:
    assert lane_partitions(MAIL, 4, COUNTS) == (151, 153, 150, 152)
    assert [key_partition(MAIL, 4, COUNTS, key) for key in ("a", "d")] == [150, 153]


@pytest.mark.parametrize(("nodes", "spread"), [(3, 16), (3, 256), (5, 32)])
def test_a_spread_lane_is_on_all_nodes_of_a_cluster_evenly(nodes: int, spread: int) -> None:
    for number in range(50):
        partitions = lane_partitions(LaneId(f"lane{number}"), spread, COUNTS)
        held = Counter(crc16(f"fp:{partition}".encode()) % 16384 * nodes // 16384 for partition in partitions)
        assert max(held.values()) - min(held[node] for node in range(nodes)) <= 0.2 * spread / nodes


def test_a_mint_draws_the_partition_from_the_uuid_and_is_the_same_for_the_same_seed() -> None:
    minted = [mint_solo(MAIL, COUNTS, minter, spread=8) for minter in (SeededMinter(3), SeededMinter(3))]

    assert minted[0] == minted[1]
    assert mint_solo(MAIL, COUNTS, SeededMinter(3)) == f"{{fp:{FIRST}}}:{minted[0].partition('}:')[2]}"
    assert partition_of(mint_solo(MAIL, COUNTS, SeededMinter(3), spread=8, key="a")) == (
        key_partition(MAIL, 8, COUNTS, "a")
    )


def test_keys_are_distributed_evenly() -> None:
    found = list(keys_of(5).values())

    assert set(found) == set(lane_partitions(MAIL, 5, COUNTS))
    assert all(60 < found.count(one) < 140 for one in set(found))


def test_the_first_change_of_a_lane_inserts_its_row() -> None:
    decision = lane_spread.set_spread(None, MAIL, 4, COUNTS, NOW)

    assert decision.change is not None
    assert decision.change.guards == (Guard(Lane, (MAIL,), None),)
    assert decision.change.writes == (Insert(Lane(MAIL, 4, 1, FromNow(GRACE_MS))),)
    assert decision.unwrap(NOW + 5) == LaneSpread(MAIL, 1, 4, NOW + 5 + GRACE_MS)


def test_a_later_change_keeps_the_spreads_before() -> None:
    row = Lane(MAIL, 4, 2, NOW, "[[1,5],[2,3]]", revision=7)

    decision = lane_spread.set_spread(row, MAIL, 8, COUNTS, NOW)

    assert decision.change is not None
    assert decision.change.guards == (Guard(Lane, (MAIL,), 7),)
    assert decision.change.not_before == NOW
    assert decision.change.writes == (Upsert(Lane(MAIL, 8, 4, FromNow(GRACE_MS), f"[[1,5],[2,{NOW}]]")),)


def test_a_lane_has_a_limited_number_of_different_spreads() -> None:
    former = msgspec.json.encode([[spread, 5] for spread in range(1, MAX_FORMER - 1)]).decode()
    row = Lane(MAIL, MAX_FORMER, MAX_FORMER - 1, NOW, former)

    refused = lane_spread.set_spread(row, MAIL, 200, COUNTS, NOW)

    assert refused.answer == errors.TooManySpreads(lane_id=MAIL, most=MAX_FORMER)
    assert refused.change is None
    assert lane_spread.set_spread(row, MAIL, 3, COUNTS, NOW).change is not None


def test_a_create_relies_on_a_lane_without_a_row_for_less_than_the_grace_period() -> None:
    assert place(None, "k", FIRST) == KeyPlace(True, NOW + GRACE_MS - SETTLE_MS - 1)
    assert place(None, "k", (FIRST + 1) % 256) is None


def test_a_create_under_a_spread_that_ends_is_written_before_its_end() -> None:
    row = Lane(MAIL, 8, 1, NOW + 50)

    assert place(row, "k", FIRST) == KeyPlace(True, NOW + 49)


def test_a_key_is_looked_up_where_earlier_spreads_put_it_once_they_have_settled() -> None:
    key, here = next((key, home) for key, home in keys_of(8).items() if home != FIRST)
    row = Lane(MAIL, 8, 1, NOW)

    assert place(row, key, here) == KeyPlace(True, NOW + GRACE_MS - SETTLE_MS - 1, ((FIRST, NOW + SETTLE_MS),))


def test_a_key_that_stays_where_it_was_needs_no_lookup() -> None:
    key = next(key for key, home in keys_of(8).items() if home == FIRST)

    assert place(Lane(MAIL, 8, 1, NOW), key, FIRST) == KeyPlace(True, NOW + GRACE_MS - SETTLE_MS - 1)


def test_an_id_on_another_partition_of_the_lane_is_not_the_place_of_the_key() -> None:
    key, here = next((key, home) for key, home in keys_of(8).items() if home != FIRST)
    found = place(Lane(MAIL, 8, 1, NOW), key, FIRST)

    assert found is not None
    assert not found.is_here
    assert (here, 0) in found.lookups


def test_a_spread_that_returns_is_looked_up_under_the_ones_between() -> None:
    row = Lane(MAIL, 1, 8, NOW, f"[[1,{NOW - 50}]]")
    key, there = next((key, home) for key, home in keys_of(8).items() if home != FIRST)

    assert place(row, key, FIRST) == KeyPlace(True, NOW + GRACE_MS - SETTLE_MS - 1, ((there, NOW + SETTLE_MS),))


def test_a_lane_with_most_of_the_work_of_a_busy_server_is_near_its_ceiling() -> None:
    other = next(p for p in range(256) if p != FIRST)
    busy = NodeLoad("a:1", 0.9, (FIRST,))
    idle = NodeLoad("b:1", 0.1, tuple(p for p in range(256) if p != FIRST))
    work = {MAIL: 90, next(f"l{n}" for n in range(999) if first_partition(LaneId(f"l{n}"), COUNTS) == other): 500}

    assert lane_spread.lanes_near_ceiling([busy, idle], work, {}, COUNTS) == [LaneNearCeiling(MAIL, 1, 1.0, "a:1", 0.9)]
    assert lane_spread.lanes_near_ceiling([replace(busy, cpu=0.5), idle], work, {}, COUNTS) == []
    assert lane_spread.lanes_near_ceiling([busy, idle], {}, {}, COUNTS) == []
