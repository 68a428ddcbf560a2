"""Unreadable rows are reported as corruption, only to the callers that read them."""

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
from tests.scenarios.env import LEASE_MS, Env


async def create_corrupted(env: Env, **fields: Any) -> str:
    """Create an execution with unreadable columns."""
    e = await env.create(tags={"a.b": "c"})
    patch = Patch(Execution, (e,), fields)
    change = Change(guards=(seen(await env.row(e)),), writes=(patch,), id=env.engine.minter.change_id())
    [verdict] = await env.store.store.commit([change])
    assert isinstance(verdict, int)
    return e


async def corrupt(env: Env, e: str, **fields: Any) -> Engine:
    """Write unreadable columns; return an engine without the checked store."""
    change = Change((seen(await env.row(e)),), (Patch(Execution, (e,), fields),), id=env.engine.minter.change_id())
    assert await env.store.store.commit([change]) != [None]
    return Engine(env.store.store, minter=SeededMinter(9))


async def test_an_unreadable_lineage_or_grant_is_reported_as_corruption(env: Env) -> None:
    claim, waiting = (await env.create_and_claim()).execution_id, await env.create()
    await corrupt(env, claim, lineage="{not json")
    engine = await corrupt(env, waiting, grant="{not json", granted_until=1)

    with pytest.raises(errors.Corruption, match="exec_core: lineage: "):
        await engine.attempt_history(claim)
    with pytest.raises(errors.Corruption, match="exec_core: grant: "):
        await engine.claim_execution(waiting, worker_id="wa", worker_instance_id="wa-1")


@pytest.mark.parametrize("method", ["claim", "admitted", "scheduler"])
@pytest.mark.parametrize("life", ["waiting", "leased", "expired", "revoked"])
@pytest.mark.parametrize("column", ["terms", "lineage", "grant", "tags"])
async def test_an_unreadable_row_does_not_block_other_claims(env: Env, method: str, life: str, column: str) -> None:
    limited = {"budget_ids": ["11111111-1111-4111-8111-111111111111"]}
    if life == "waiting":
        bad: str = await env.create(priority=9, policy=limited)
    else:
        claim, bad = await env.create_claimed(priority=9, policy=limited)
        if life == "expired":
            await env.expire_lease(claim)
        elif life == "revoked":
            await env.revoke_lease(claim)
    other = await corrupt(env, bad, **{column: "{not json"})
    good = [other.new_execution_id() for _ in range(2)]
    for e, policy in zip(good, (limited, None), strict=True):
        await other.create_execution(execution_id=e, policy=policy)
    env.clock.advance_ms(LEASE_MS)

    who: dict[str, Any] = {"worker_id": "wb", "worker_instance_id": "wb-1"}
    got: list[Any] = []
    for _ in range(3):
        match method:
            case "claim":
                got.append(await other.claim("default", **who))
            case "admitted":
                got += await other.claim_admitted("default", **who)
            case _:
                got.append(await other.claim_for_worker("default", **who))

    assert set(good) <= {one.execution_id for one in got if one}


async def test_unreadable_tags_are_reported_as_corruption(env: Env) -> None:
    e = await create_corrupted(env, tags="{not json")

    async with env.unchanged():
        with pytest.raises(errors.Corruption, match=r"corruption: describe_execution: exec_core: tags: "):
            await env.engine.describe_execution(e)
        for read in (
            env.engine.get_execution_tag(e, "a.b"),
            env.engine.set_execution_tag(e, "a.b", "d"),
            env.engine.read_execution_context(e),
        ):
            with pytest.raises(errors.Corruption, match="exec_core: tags: "):
                await read


async def test_unreadable_terms_are_reported_as_corruption(env: Env) -> None:
    e = await create_corrupted(env, terms="[]")

    async with env.unchanged():
        with pytest.raises(errors.Corruption, match="exec_core: terms: "):
            await env.engine.cancel_execution(e)


@pytest.mark.parametrize("code", [99, len(AttemptState), -1, -99])
def test_an_unknown_enum_code_is_reported_as_corruption_of_its_column(code: int) -> None:
    codec = CODEC[Execution]
    stored = [code if name == "attempt_state" else None for name in codec.columns]

    with pytest.raises(errors.Corruption, match=f"exec_core: attempt_state: {code} is not a known code"):
        codec.decode(stored, lambda _: None)  # type: ignore[arg-type,return-value]


def test_counts_skip_unknown_enum_codes() -> None:
    found = [("default", 0, 3), ("default", 99, 1), ("default", -1, 2)]

    assert decode_counts(("lane_id", "public_state"), found) == {("default", next(iter(PublicState))): 3}


async def test_an_unreadable_row_fails_only_its_own_readers(env: Env) -> None:
    good, bad = await env.create(), await env.create()
    load = env.store.store.load

    async def loads(wants: Any) -> Loaded:
        if Read(Execution, (bad,)) in wants:
            raise errors.Corruption("exec_core: attempt_state: 99 is not a known code")
        return await load(wants)

    env.store.load = loads  # type: ignore[attr-defined]
    answers = await asyncio.gather(
        *(env.engine.read_execution_state(one) for one in (good, bad, good)), return_exceptions=True
    )

    assert [isinstance(answer, errors.Corruption) for answer in answers] == [False, True, False]
