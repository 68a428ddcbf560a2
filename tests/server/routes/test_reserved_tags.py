"""Reserved tags over HTTP: only the lease holder can set the tags that an approver sees."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api_client import ApiClient, path
from tests.server.routes.test_leases import call_lease, claim_new

SHOWN = "ff.show"


async def tags(api: ApiClient, execution_id: str) -> Any:
    snapshot = await api.engine.describe_execution(execution_id)
    assert snapshot is not None
    return snapshot.tags


async def test_a_caller_cannot_change_the_show_tag_of_an_approval(api: ApiClient) -> None:
    work = await claim_new(api)
    assert (await call_lease(api, "tags", work, tags={SHOWN: '"pay 10"'})).json() == {"set": 1}
    refused = await api.put(path(work["execution_id"], "tags"), {"tags": {SHOWN: '"pay 1"'}})

    assert refused.status_code == 400
    assert refused.json()["error"].startswith(f"invalid_tag_key: {SHOWN}")
    assert await tags(api, work["execution_id"]) == {SHOWN: '"pay 10"'}


@pytest.mark.parametrize("key", [SHOWN, "ff.ask.11111111", "ff.traceparent"])
async def test_a_create_with_a_reserved_tag_is_refused(api: ApiClient, key: str) -> None:
    body = api.create_body(tags={key: "x"})
    answers = [
        await api.post("/v1/executions", body),
        await api.post("/v1/executions/bulk", {"executions": [body]}),
        await api.post("/v1/flows/graph", {"flow_id": body["execution_id"][7:], "nodes": [body], "edges": []}),
    ]

    assert key in answers[0].json()["error"]
    assert answers[0].status_code == answers[2].status_code == 400
    assert answers[1].status_code == 400 or answers[1].json()["results"][0]["code"] == "invalid_tag_key"
    assert (await api.get(path(body["execution_id"], "state"))).status_code == 404


async def test_a_former_holder_cannot_set_tags(api: ApiClient) -> None:
    work = await claim_new(api)
    await call_lease(api, "complete", work)

    assert (await call_lease(api, "tags", work, tags={SHOWN: "1"})).status_code == 409
    assert await tags(api, work["execution_id"]) == {}
