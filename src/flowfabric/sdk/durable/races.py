"""Races: the first of several operations wins, and the others are left for good.

The winner is a memo, and the losers are recorded as left in the same change. So a replay never sees two winners: it
runs the winner alone, whose operations are remembered, with the failures that it caught. A winner that failed is
recorded like its failure, once the function moves past it; what the losers leave follows in the next change, or in the
replay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from flowfabric.engine.types import MemoArgs
from flowfabric.errors import InvalidInput
from flowfabric.sdk.durable.step_execution import is_failure

if TYPE_CHECKING:
    from flowfabric.sdk.durable.attempt import DurableAttempt

T = TypeVar("T")


class Won(msgspec.Struct, Generic[T], frozen=True):
    """The winner of a race: its name, and what it returned."""

    name: str
    value: T


async def run_race(durable: DurableAttempt, members: Mapping[str, Coroutine[Any, Any, Any]]) -> Won[Any]:
    """Return the first member that ends; the others are cancelled, and recorded as left."""
    try:
        return await _run_race(durable, members)
    finally:
        for member in members.values():  # close the coroutines that never began
            member.close()


async def _run_race(durable: DurableAttempt, members: Mapping[str, Coroutine[Any, Any, Any]]) -> Won[Any]:
    if any("/" in name for name in members):
        raise InvalidInput("race: a name must not contain a slash")
    branch = await durable.begin_operation()
    name, occurrence = durable.next_occurrence("race")
    place = (f"race:{name}", occurrence)
    memo = await durable.ledger.find_step(branch, place, None)
    if memo is not None:
        return await _run_winner(durable, f"{name}#{occurrence}", members, msgspec.json.decode(memo.result, type=str))
    branches, tasks = durable.start_branches(
        {f"{name}#{occurrence}.{member}/": coroutine for member, coroutine in members.items()}
    )
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        number = next(number for number, task in enumerate(tasks) if task.done())
        winner, won, losers = (
            list(members)[number],
            tasks[number],
            [one for one in branches if one is not branches[number]],
        )
        await durable.end_branches(losers, [task for task in tasks if task is not won])
        left = durable.lose(losers)
        result = msgspec.json.encode(winner)
        if not won.cancelled() and is_failure(won.exception(), durable.handle.fields.execution_id):
            durable.note_ended(branch, place, result)
        value = won.result()
        async with durable.parker.without_parking():
            await durable.record_pending(durable.pending_in(branches[number]))
            recorded = MemoArgs(
                name=place[0],
                occurrence=occurrence,
                result=result,
                encoding="json",
                number=durable.ledger.next_number(),
            )
            known = await durable.record_pending(left, memo=recorded)
        if known is not None and msgspec.json.decode(known.result, type=str) != winner:
            raise RuntimeError(f"the race {name!r} has been decided by another attempt meanwhile")
        return Won(winner, value)
    except BaseException:
        await durable.end_branches(branches, tasks)
        raise
    finally:
        for one in branches:
            one.finish()


async def _run_winner(
    durable: DurableAttempt, name: str, members: Mapping[str, Coroutine[Any, Any, Any]], winner: str
) -> Won[Any]:
    if winner not in members:
        raise InvalidInput(f"race: {winner!r} won in an earlier attempt, but is no member any more")
    for loser in members:
        if loser != winner:
            durable.leave_branch(f"{name}.{loser}/")
    branches, tasks = durable.start_branches({f"{name}.{winner}/": members[winner]})
    try:
        [value] = await asyncio.gather(*tasks)
        return Won(winner, value)
    except BaseException:
        await durable.end_branches(branches, tasks)
        raise
    finally:
        for one in branches:
            one.finish()
