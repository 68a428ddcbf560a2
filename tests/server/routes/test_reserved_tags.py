"""Reserved tags over HTTP: what an approver sees is not rewritten with a `submit` token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.asking import Asking, path
from tests.server.routes.test_leases import claimed, said

SHOWN = "ff.show"


async def tags(ask: Asking, execution_id: str) -> Any:
    snapshot = await ask.engine.describe_execution(execution_id)
    assert snapshot is not None
    return snapshot.tags


async def test_a_caller_does_not_rewrite_what_an_approver_sees(ask: Asking) -> None:
    work = await claimed(ask)
    assert (await said(ask, "tags", work, tags={SHOWN: '"pay 10"'})).json() == {"set": 1}
    refused = await ask.put(path(work["execution_id"], "tags"), {"tags": {SHOWN: '"pay 1"'}})

    assert refused.status_code == 400
    assert refused.json()["error"].startswith(f"invalid_tag_key: {SHOWN}")
    assert await tags(ask, work["execution_id"]) == {SHOWN: '"pay 10"'}


@pytest.mark.parametrize("key", [SHOWN, "ff.ask.11111111", "ff.traceparent"])
async def test_a_create_with_a_reserved_tag_is_refused(ask: Asking, key: str) -> None:
    body = ask.creation(tags={key: "x"})
    answers = [
        await ask.post("/v1/executions", body),
        await ask.post("/v1/executions/bulk", {"executions": [body]}),
        await ask.post("/v1/flows/graph", {"flow_id": body["execution_id"][7:], "nodes": [body], "edges": []}),
    ]

    assert key in answers[0].json()["error"]
    assert answers[0].status_code == answers[2].status_code == 400
    assert answers[1].status_code == 400 or answers[1].json()["results"][0]["code"] == "invalid_tag_key"
    assert (await ask.get(path(body["execution_id"], "state"))).status_code == 404


async def test_a_holder_without_its_lease_sets_no_tags(ask: Asking) -> None:
    work = await claimed(ask)
    await said(ask, "complete", work)

    assert (await said(ask, "tags", work, tags={SHOWN: "1"})).status_code == 409
    assert await tags(ask, work["execution_id"]) == {}
