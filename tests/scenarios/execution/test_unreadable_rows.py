"""What is kept and cannot be read is told as such, to those who ask for it and to nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.change import Change, Patch, seen
from flowfabric.model.execution import Execution
from flowfabric.model.states import AttemptState, PublicState
from flowfabric.stores.codec import CODEC, decode_counts
from flowfabric.stores.queries import Loaded, Read
from tests.scenarios.play import LEASE_MS, Play


async def spoiled(play: Play, **fields: Any) -> str:
    """An execution with something in its row that nobody could have written."""
    e = await play.create(tags={"a.b": "c"})
    patch = Patch(Execution, (e,), fields)
    change = Change(guards=(seen(await play.sheet(e)),), writes=(patch,), id=play.engine.minter.change_id())
    [verdict] = await play.store.store.commit([change])
    assert isinstance(verdict, int)
    return e


async def spoil(play: Play, e: str, **fields: Any) -> Engine:
    """Put into a row what nobody could have written; an engine on the store that no test watches for that."""
    change = Change((seen(await play.sheet(e)),), (Patch(Execution, (e,), fields),), id=play.engine.minter.change_id())
    assert await play.store.store.commit([change]) != [None]
    return Engine(play.store.store, minter=SeededMinter(9))


async def test_lineage_and_grants_that_are_none_are_corruption(play: Play) -> None:
    held, waiting = (await play.claimed()).execution_id, await play.create()
    await spoil(play, held, lineage="{not json")
    engine = await spoil(play, waiting, grant="{not json", granted_until=1)

    with pytest.raises(errors.Corruption, match="exec_core: lineage: "):
        await engine.attempt_history(held)
    with pytest.raises(errors.Corruption, match="exec_core: grant: "):
        await engine.claim_execution(waiting, worker_id="wa", worker_instance_id="wa-1")


@pytest.mark.parametrize("road", ["pull", "admitted", "scheduler"])
@pytest.mark.parametrize("life", ["waiting", "leased", "expired", "revoked"])
@pytest.mark.parametrize("column", ["terms", "lineage", "grant", "tags"])
async def test_work_that_cannot_be_read_does_not_stand_in_the_way_of_other_work(
    play: Play, road: str, life: str, column: str
) -> None:
    limited = {"budget_ids": ["11111111-1111-4111-8111-111111111111"]}
    if life == "waiting":
        bad: str = await play.create(priority=9, policy=limited)
    else:
        held = await play.claimed(priority=9, policy=limited)
        bad = held.execution_id
        if life == "expired":
            await play.expired(held)
        elif life == "revoked":
            await play.revoked(held)
    other = await spoil(play, bad, **{column: "{not json"})
    good = [other.new_execution_id() for _ in range(2)]
    for e, policy in zip(good, (limited, None), strict=True):
        await other.create_execution(execution_id=e, policy=policy)
    play.clock.advance_ms(LEASE_MS)

    who: dict[str, Any] = {"worker_id": "wb", "worker_instance_id": "wb-1"}
    got: list[Any] = []
    for _ in range(3):
        match road:
            case "pull":
                got.append(await other.claim("default", **who))
            case "admitted":
                got += await other.claim_admitted("default", **who)
            case _:
                got.append(await other.claim_for_worker("default", **who))

    assert set(good) <= {one.execution_id for one in got if one}


async def test_tags_that_are_none_are_corruption(play: Play) -> None:
    e = await spoiled(play, tags="{not json")

    async with play.untouched():
        with pytest.raises(errors.Corruption, match=r"corruption: describe_execution: exec_core: tags: "):
            await play.engine.describe_execution(e)
        for ask in (
            play.engine.get_execution_tag(e, "a.b"),
            play.engine.set_execution_tag(e, "a.b", "d"),
            play.engine.read_execution_context(e),
        ):
            with pytest.raises(errors.Corruption, match="exec_core: tags: "):
                await ask


async def test_terms_that_are_none_are_corruption(play: Play) -> None:
    e = await spoiled(play, terms="[]")

    async with play.untouched():
        with pytest.raises(errors.Corruption, match="exec_core: terms: "):
            await play.engine.cancel_execution(e)


@pytest.mark.parametrize("code", [99, len(AttemptState), -1, -99])
def test_a_code_of_no_member_is_corruption_of_its_column(code: int) -> None:
    codec = CODEC[Execution]
    stored = [code if name == "attempt_state" else None for name in codec.columns]

    with pytest.raises(errors.Corruption, match=f"exec_core: attempt_state: {code} is not a known code"):
        codec.decode(stored, lambda _: None)  # type: ignore[arg-type,return-value]


def test_what_stands_for_nothing_is_counted_among_nothing() -> None:
    found = [("default", 0, 3), ("default", 99, 1), ("default", -1, 2)]

    assert decode_counts(("lane_id", "public_state"), found) == {("default", next(iter(PublicState))): 3}


async def test_only_those_hear_of_an_unreadable_row_who_asked_for_it(play: Play) -> None:
    good, bad = await play.create(), await play.create()
    load = play.store.store.load

    async def loads(wants: Any) -> Loaded:
        if Read(Execution, (bad,)) in wants:
            raise errors.Corruption("exec_core: attempt_state: 99 is not a known code")
        return await load(wants)

    play.store.load = loads  # type: ignore[attr-defined]
    said = await asyncio.gather(
        *(play.engine.read_execution_state(one) for one in (good, bad, good)), return_exceptions=True
    )

    assert [isinstance(answer, errors.Corruption) for answer in said] == [False, True, False]
