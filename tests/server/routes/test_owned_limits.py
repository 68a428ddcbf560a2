"""Budgets and quotas over HTTP: a token of some namespaces defines, spends, reserves, refunds and reads there only."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.server import ServerSettings
from flowfabric.settings import Secret
from tests.server.asking import NOW, Asking, path
from tests.server.test_auth import status, token

USAGE = {"dimensions": {"tokens": 3}, "now": NOW}
ALL_SCOPES = ("read", "work", "operate")


@pytest.fixture
def ask(engine: Engine) -> Asking:
    return Asking(engine, ServerSettings(api_token=Secret("s3cret")), Authorization="Bearer s3cret")


def quota(**given: Any) -> dict[str, Any]:
    numbers = {"window_seconds": 60, "max_requests_per_window": 0, "max_concurrent": 1}
    return {"quota_policy_id": str(uuid.uuid4()), **numbers, **given}


async def holding(ask: Asking, headers: dict[str, str], namespace: str) -> dict[str, Any]:
    """What a worker of a namespace holds."""
    await ask.created(namespace=namespace)
    claims = {"lanes": ["L"], "worker_instance_id": "i", "namespaces": [namespace]}
    [work] = (await ask.post("/v1/workers/w/claims", claims, headers=headers)).json()["claimed"]
    held: dict[str, Any] = work
    return held


async def test_a_budget_belongs_to_the_namespace_named_else_to_the_only_one_of_the_token_else_to_default(
    ask: Asking,
) -> None:
    one, two = await token(ask, *ALL_SCOPES, namespaces=["a"]), await token(ask, *ALL_SCOPES, namespaces=["a", "b"])
    body = ask.budget()
    where = f"/v1/budgets/{body['budget_id']}"

    assert await status(ask, "POST", "/v1/budgets", one, body) == 201
    assert await status(ask, "POST", "/v1/budgets", one, body | {"namespace": "a"}) == 200
    assert await status(ask, "POST", "/v1/budgets", two, body) == 403, "without a name it would be one of default"
    assert await status(ask, "POST", "/v1/budgets", two, body | {"namespace": "b"}) == 201
    assert await status(ask, "POST", "/v1/budgets", {}, body) == 201
    assert await status(ask, "POST", "/v1/budgets", one, body | {"namespace": "default"}) == 403

    for headers, owner, expected in ((one, "a", 1), (two, "b", 2), ({}, "default", 4)):
        usage = USAGE | {"dimensions": {"tokens": expected}, "namespace": owner}
        assert await status(ask, "POST", f"{where}/usage", headers, usage) == 200
    for owner, expected in (("a", 1), ("b", 2), ("default", 4)):
        assert (await ask.get(f"{where}?namespace={owner}")).json()["usage"] == {"tokens": expected}
    assert (await ask.get(where)).json()["usage"] == {"tokens": 4}
    assert (await ask.get(where, headers=one)).json()["usage"] == {"tokens": 1}


async def test_a_token_of_some_namespaces_reaches_no_budget_beyond_them(ask: Asking) -> None:
    headers = await token(ask, *ALL_SCOPES, namespaces=["a"])
    where = await ask.budgeted(used=5, namespace="b")
    shared = await ask.budgeted(used=5)
    limits = {"dimensions": ["tokens"], "hard_limits": [9], "soft_limits": [0]}
    release = {"execution_id": await ask.created(namespace="a")}
    refund = {"reservation_id": str(uuid.uuid4())}
    for name, owner in ((where, "b"), (shared, "default")):
        named = {"namespace": owner}
        before = (await ask.get(f"{name}?namespace={owner}")).json()
        told = {
            await status(ask, "GET", f"{name}?namespace={owner}", headers),
            await status(ask, "GET", f"/v1/budgets?namespace={owner}", headers),
            await status(ask, "POST", f"{name}/usage", headers, USAGE | named),
            await status(ask, "POST", f"{name}/reset?namespace={owner}", headers),
            await status(ask, "PUT", f"{name}/limits", headers, limits | named),
            await status(ask, "POST", f"{name}/release", headers, release | named),
            await status(ask, "POST", f"{name}/refund", headers, refund | named),
            await status(ask, "POST", f"{name}/wake?namespace={owner}", headers),
        }
        assert told == {403}
        assert await status(ask, "GET", name, headers) == 404, "in its own namespace there is none of that id"
        assert (await ask.get(f"{name}?namespace={owner}")).json() == before


async def test_a_bound_worker_spends_reserves_and_refunds_in_the_namespace_of_its_work(ask: Asking) -> None:
    headers = await token(ask, *ALL_SCOPES, namespaces=["a"])
    where = await ask.budgeted(used=90)  # the shared one, of which only so much is left
    budget_id = where.rpartition("/")[2]
    work = await holding(ask, headers, "a")
    held = {"handle": work["handle"], "budget_id": budget_id}
    reservation = str(uuid.uuid4())

    async def says(route: str, **body: Any) -> Any:
        answer = await ask.post(f"/v1/leases/{route}", held | body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert await says("usage", dimensions={"tokens": 500}) == "Ok"
    assert await says("spend", dimensions={"tokens": 500}) == "Ok"
    assert "Reserved" in await says("reserve", amounts={"tokens": 500}, ttl_ms=1000, reservation_id=reservation)
    assert await says("refund", reservation_id=reservation) == {
        "Refunded": {"reservation_id": reservation, "amounts": {"tokens": 500}}
    }
    spent = {"budget_id": budget_id, "dimensions": {"tokens": 500}, "namespace": "default"}
    for_execution = await ask.post(path(work["execution_id"], "spend"), spent, headers=headers)
    assert for_execution.json() == "Ok", "which namespace it says makes no difference for a bound token"

    assert (await ask.get(where)).json()["usage"] == {"tokens": 90}
    body = ask.budget() | {"budget_id": budget_id}
    assert await status(ask, "POST", "/v1/budgets", headers, body) == 201
    assert (await ask.get(where, headers=headers)).json()["usage"] == {"tokens": 1500}


async def test_an_unbound_worker_spends_in_the_shared_budget(ask: Asking) -> None:
    where = await ask.budgeted(used=90)
    budget_id = where.rpartition("/")[2]
    work = await holding(ask, {}, "a")
    body = {"handle": work["handle"], "budget_id": budget_id, "dimensions": {"tokens": 500}}

    assert "HardBreach" in (await ask.post("/v1/leases/spend", body)).json()
    assert "HardBreach" in (await ask.post("/v1/leases/usage", body)).json()
    assert (await ask.get(where)).json()["breach_count"] == 2


async def test_quota_policies_belong_to_namespaces(ask: Asking) -> None:
    headers = await token(ask, *ALL_SCOPES, namespaces=["a"])
    body = quota()
    where = f"/v1/quotas/{body['quota_policy_id']}"

    assert await status(ask, "POST", "/v1/quotas", headers, body) == 201
    assert await status(ask, "GET", where, headers) == 200
    assert await status(ask, "GET", where, {}) == 404
    assert await status(ask, "GET", f"{where}?namespace=a", {}) == 200
    assert await status(ask, "POST", "/v1/quotas", {}, body) == 201
    for owner in ("b", "default"):
        assert await status(ask, "POST", "/v1/quotas", headers, body | {"namespace": owner}) == 403
        assert await status(ask, "GET", f"{where}?namespace={owner}", headers) == 403


async def test_a_full_quota_of_a_namespace_holds_up_nobody_else(ask: Asking) -> None:
    headers = await token(ask, *ALL_SCOPES, "submit", namespaces=["a"])
    body = quota(namespace="b")
    assert (await ask.post("/v1/quotas", body)).status_code == 201
    policy = {"quota_policy_id": body["quota_policy_id"]}
    theirs = await ask.created(namespace="b", policy=policy)
    mine = [await ask.created(namespace="a", policy=policy) for _ in range(3)]
    claims = {"lanes": ["L"], "worker_instance_id": "i", "limit": 9}

    got = (await ask.post("/v1/workers/w/claims", claims, headers=headers)).json()["claimed"]
    assert sorted(one["execution_id"] for one in got) == sorted(mine)
    got = (await ask.post("/v1/workers/w/claims", claims)).json()["claimed"]
    assert [one["execution_id"] for one in got] == [theirs], "the slot is still there"
