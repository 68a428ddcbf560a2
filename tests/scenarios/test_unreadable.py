"""What is kept and cannot be read is told as such, to those who ask for it and to nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.model.execution import Execution
from flowfabric.rules.change import Change, Patch, seen
from flowfabric.stores.base import Loaded, Want
from flowfabric.stores.codec import CODEC
from tests.scenarios.play import Play


async def spoiled(play: Play, **fields: Any) -> str:
    """An execution with something in its row that nobody could have written."""
    e = await play.create(tags={"a.b": "c"})
    patch = Patch(Execution, (e,), fields)
    change = Change(guards=(seen(await play.sheet(e)),), writes=(patch,), id=play.engine.minter.change_id())
    [verdict] = await play.store.store.commit([change])
    assert isinstance(verdict, int)
    return e


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


def test_a_code_of_no_member_is_corruption_of_its_column() -> None:
    codec = CODEC[Execution]
    stored = [99 if name == "attempt_state" else None for name in codec.columns]

    with pytest.raises(errors.Corruption, match="exec_core: attempt_state: 99 stands for nothing"):
        codec.decode(stored, lambda _: None)  # type: ignore[arg-type,return-value]


async def test_only_those_hear_of_an_unreadable_row_who_asked_for_it(play: Play) -> None:
    good, bad = await play.create(), await play.create()
    load = play.store.store.load

    async def loads(wants: Any) -> Loaded:
        if Want(Execution, (bad,)) in wants:
            raise errors.Corruption("exec_core: attempt_state: 99 stands for nothing")
        return await load(wants)

    play.store.load = loads  # type: ignore[attr-defined]
    said = await asyncio.gather(
        *(play.engine.read_execution_state(one) for one in (good, bad, good)), return_exceptions=True
    )

    assert [isinstance(answer, errors.Corruption) for answer in said] == [False, True, False]
