"""Budgets and quotas over HTTP: a bound token defines, spends, reserves, refunds and reads in its namespaces only."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from tests.server.api_client import NOW, ApiClient, path
from tests.server.test_auth import create_token, status

USAGE = {"dimensions": {"tokens": 3}, "now": NOW}
ALL_SCOPES = ("read", "work", "operate")


@pytest.fixture
def api(engine: Engine) -> ApiClient:
    return ApiClient.with_root_token(engine)


def quota(**given: Any) -> dict[str, Any]:
    numbers = {"window_seconds": 60, "max_requests_per_window": 0, "max_concurrent": 1}
    return {"quota_policy_id": str(uuid.uuid4()), **numbers, **given}


async def claim_in_namespace(api: ApiClient, headers: dict[str, str], namespace: str) -> dict[str, Any]:
    """Create an execution in a namespace and claim it with these headers."""
    await api.create(namespace=namespace)
    claims = {"lanes": ["L"], "worker_instance_id": "i", "namespaces": [namespace]}
    [work] = (await api.post("/v1/workers/w/claims", claims, headers=headers)).json()["claimed"]
    held: dict[str, Any] = work
    return held


async def test_a_budget_belongs_to_the_given_namespace_else_to_that_of_the_token_else_to_default(
    api: ApiClient,
) -> None:
    one, two = (
        await create_token(api, *ALL_SCOPES, namespaces=["a"]),
        await create_token(api, *ALL_SCOPES, namespaces=["a", "b"]),
    )
    body = api.budget_body()
    url = f"/v1/budgets/{body['budget_id']}"

    assert await status(api, "POST", "/v1/budgets", one, body) == 201
    assert await status(api, "POST", "/v1/budgets", one, body | {"namespace": "a"}) == 200
    assert await status(api, "POST", "/v1/budgets", two, body) == 403, "without a namespace it would be in default"
    assert await status(api, "POST", "/v1/budgets", two, body | {"namespace": "b"}) == 201
    assert await status(api, "POST", "/v1/budgets", {}, body) == 201
    assert await status(api, "POST", "/v1/budgets", one, body | {"namespace": "default"}) == 403

    for headers, owner, expected in ((one, "a", 1), (two, "b", 2), ({}, "default", 4)):
        usage = USAGE | {"dimensions": {"tokens": expected}, "namespace": owner}
        assert await status(api, "POST", f"{url}/usage", headers, usage) == 200
    for owner, expected in (("a", 1), ("b", 2), ("default", 4)):
        assert (await api.get(f"{url}?namespace={owner}")).json()["usage"] == {"tokens": expected}
    assert (await api.get(url)).json()["usage"] == {"tokens": 4}
    assert (await api.get(url, headers=one)).json()["usage"] == {"tokens": 1}


async def test_a_bound_token_reaches_no_budget_of_another_namespace(api: ApiClient) -> None:
    headers = await create_token(api, *ALL_SCOPES, namespaces=["a"])
    url = await api.create_budget(used=5, namespace="b")
    shared = await api.create_budget(used=5)
    limits = {"dimensions": ["tokens"], "hard_limits": [9], "soft_limits": [0]}
    release = {"execution_id": await api.create(namespace="a")}
    refund = {"reservation_id": str(uuid.uuid4())}
    for name, owner in ((url, "b"), (shared, "default")):
        named = {"namespace": owner}
        before = (await api.get(f"{name}?namespace={owner}")).json()
        reply = {
            await status(api, "GET", f"{name}?namespace={owner}", headers),
            await status(api, "GET", f"/v1/budgets?namespace={owner}", headers),
            await status(api, "POST", f"{name}/usage", headers, USAGE | named),
            await status(api, "POST", f"{name}/reset?namespace={owner}", headers),
            await status(api, "PUT", f"{name}/limits", headers, limits | named),
            await status(api, "POST", f"{name}/release", headers, release | named),
            await status(api, "POST", f"{name}/refund", headers, refund | named),
            await status(api, "POST", f"{name}/wake?namespace={owner}", headers),
        }
        assert reply == {403}
        assert await status(api, "GET", name, headers) == 404, "its own namespace has no budget of that id"
        assert (await api.get(f"{name}?namespace={owner}")).json() == before


async def test_a_bound_worker_spends_reserves_and_refunds_in_the_namespace_of_its_work(api: ApiClient) -> None:
    headers = await create_token(api, *ALL_SCOPES, namespaces=["a"])
    url = await api.create_budget(used=90)  # the shared budget has 10 left
    budget_id = url.rpartition("/")[2]
    work = await claim_in_namespace(api, headers, "a")
    held = {"handle": work["handle"], "budget_id": budget_id}
    reservation = str(uuid.uuid4())

    async def call_lease(route: str, **body: Any) -> Any:
        answer = await api.post(f"/v1/leases/{route}", held | body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert await call_lease("usage", dimensions={"tokens": 500}) == "Ok"
    assert await call_lease("spend", dimensions={"tokens": 500}) == "Ok"
    assert "Reserved" in await call_lease("reserve", amounts={"tokens": 500}, ttl_ms=1000, reservation_id=reservation)
    assert await call_lease("refund", reservation_id=reservation) == {
        "Refunded": {"reservation_id": reservation, "amounts": {"tokens": 500}}
    }
    spent = {"budget_id": budget_id, "dimensions": {"tokens": 500}, "namespace": "default"}
    for_execution = await api.post(path(work["execution_id"], "spend"), spent, headers=headers)
    assert for_execution.json() == "Ok", "a bound token always spends in its own namespace"

    assert (await api.get(url)).json()["usage"] == {"tokens": 90}
    body = api.budget_body() | {"budget_id": budget_id}
    assert await status(api, "POST", "/v1/budgets", headers, body) == 201
    assert (await api.get(url, headers=headers)).json()["usage"] == {"tokens": 1500}


async def test_an_unbound_worker_spends_in_the_shared_budget(api: ApiClient) -> None:
    url = await api.create_budget(used=90)
    budget_id = url.rpartition("/")[2]
    work = await claim_in_namespace(api, {}, "a")
    body = {"handle": work["handle"], "budget_id": budget_id, "dimensions": {"tokens": 500}}

    assert "HardBreach" in (await api.post("/v1/leases/spend", body)).json()
    assert "HardBreach" in (await api.post("/v1/leases/usage", body)).json()
    assert (await api.get(url)).json()["breach_count"] == 2


async def test_quota_policies_belong_to_namespaces(api: ApiClient) -> None:
    headers = await create_token(api, *ALL_SCOPES, namespaces=["a"])
    body = quota()
    url = f"/v1/quotas/{body['quota_policy_id']}"

    assert await status(api, "POST", "/v1/quotas", headers, body) == 201
    assert await status(api, "GET", url, headers) == 200
    assert await status(api, "GET", url, {}) == 404
    assert await status(api, "GET", f"{url}?namespace=a", {}) == 200
    assert await status(api, "POST", "/v1/quotas", {}, body) == 201
    for owner in ("b", "default"):
        assert await status(api, "POST", "/v1/quotas", headers, body | {"namespace": owner}) == 403
        assert await status(api, "GET", f"{url}?namespace={owner}", headers) == 403


async def test_a_full_quota_of_a_namespace_blocks_no_other_namespace(api: ApiClient) -> None:
    headers = await create_token(api, *ALL_SCOPES, "submit", namespaces=["a"])
    body = quota(namespace="b")
    assert (await api.post("/v1/quotas", body)).status_code == 201
    policy = {"quota_policy_id": body["quota_policy_id"]}
    theirs = await api.create(namespace="b", policy=policy)
    mine = [await api.create(namespace="a", policy=policy) for _ in range(3)]
    claims = {"lanes": ["L"], "worker_instance_id": "i", "limit": 9}

    got = (await api.post("/v1/workers/w/claims", claims, headers=headers)).json()["claimed"]
    assert sorted(one["execution_id"] for one in got) == sorted(mine)
    got = (await api.post("/v1/workers/w/claims", claims)).json()["claimed"]
    assert [one["execution_id"] for one in got] == [theirs], "the slot is free"
