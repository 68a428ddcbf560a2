"""Flows, budgets, quotas: scenarios R46 to R57, S-004, S-039, S-058, S-096, S-097."""

from __future__ import annotations

import uuid
from urllib.parse import quote

import pytest

from flowfabric.ids import ExecutionId, FlowId, flow_partition, partition_of
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CancelBacklog, PendingMemberCancel
from flowfabric.stores.queries import Read
from tests.executions import claim_one
from tests.server.api_client import NOW, ApiClient, new_execution_id, path

STALE = {"error": "contention: StaleGraphRevision", "kind": "contention", "retryable": True}


@pytest.mark.spec("R46")
async def test_an_edge_is_staged_and_applied_once(api: ApiClient) -> None:
    flow_id, [a, b] = await api.create_flow(2)
    edge = api.edge_body(flow_id, a, b)
    url = f"/v1/flows/{flow_id}/edges"
    assert await api.post_json(url, edge | {"expected_graph_revision": 2}) == (
        201,
        {"Staged": {"edge_id": edge["edge_id"], "new_graph_revision": 3}},
    )
    applied = [await api.post(f"{url}/apply", edge | {"graph_revision": 3}) for _ in range(2)]

    assert [(one.status_code, one.json()) for one in applied] == [
        (200, {"Applied": {"unsatisfied_count": 1}}),
        (200, "AlreadyApplied"),
    ]
    assert await api.state(b) == "waiting_children"


@pytest.mark.spec("R47")
async def test_a_stale_graph_revision_is_a_conflict(api: ApiClient) -> None:
    flow_id, [a, b] = await api.create_flow(2)
    answer = await api.post(f"/v1/flows/{flow_id}/edges", api.edge_body(flow_id, a, b, expected_graph_revision=1))

    assert (answer.status_code, answer.json()) == (409, STALE)


@pytest.mark.spec("R48")
async def test_an_edge_that_closes_a_cycle_is_refused(api: ApiClient) -> None:
    flow_id, [a, b] = await api.create_flow(2)
    await api.apply_edge(flow_id, a, b)
    answer = await api.post(f"/v1/flows/{flow_id}/edges", api.edge_body(flow_id, b, a, expected_graph_revision=3))

    assert (answer.status_code, answer.json()["kind"], answer.json()["retryable"]) == (409, "cycle_detected", False)


@pytest.mark.spec("R49")
async def test_a_downstream_waits_until_its_upstream_succeeds(api: ApiClient) -> None:
    flow_id, [a, b] = await api.create_flow(2)
    await api.apply_edge(flow_id, a, b)
    held = await claim_one(api.engine, "L")
    assert held.execution_id == a
    await api.engine.complete(held.handle)
    await api.engine.dispatcher.wait_idle()

    assert await api.state(b) == "waiting"


def cancellation(flow_id: str, policy: str) -> dict[str, object]:
    return {"flow_id": flow_id, "reason": "r", "cancellation_policy": policy, "now": NOW}


@pytest.mark.spec("R50")
async def test_a_second_cancel_returns_the_first_policy(api: ApiClient) -> None:
    flow_id, members = await api.create_flow(1)
    url = f"/v1/flows/{flow_id}/cancel"
    first = await api.post(url, cancellation(flow_id, "cancel_all"))
    assert first.json()["CancellationScheduled"]["member_count"] == 1
    assert await api.post_json(url, cancellation(flow_id, "flow_only")) == (
        200,
        {"Cancelled": {"cancellation_policy": "cancel_all", "member_execution_ids": members}},
    )


@pytest.mark.spec("S-039")
async def test_a_cancel_that_waits_cancels_every_member(api: ApiClient) -> None:
    flow_id, members = await api.create_flow(3)
    held = await api.engine.claim_many("L", 2, worker_id="w", worker_instance_id="w-1")
    await api.engine.complete(held[0].handle)
    answer = await api.post(f"/v1/flows/{flow_id}/cancel?wait=true", cancellation(flow_id, "cancel_all"))

    assert answer.status_code == 200
    assert sorted(answer.json()["Cancelled"]["member_execution_ids"]) == sorted(members)
    states = {member: await api.state(member) for member in members}
    assert states.pop(held[0].execution_id) == "completed"
    assert set(states.values()) == {"cancelled"}
    rows = [rows[0] for rows in (await api.engine.runtime.load([Read(Execution, (name,)) for name in states])).rows]
    assert {(row.cancellation_reason, row.cancelled_by) for row in rows} == {("r", "operator_override")}
    assert (
        await api.engine.runtime.load((Read(PendingMemberCancel, (flow_id,)), Read(CancelBacklog, (flow_id,))))
    ).rows == [
        [],
        [],
    ]


async def test_a_cancel_that_waits_ends_at_its_timeout(api: ApiClient) -> None:
    flow_id, _ = await api.create_flow(1)
    url, body = f"/v1/flows/{flow_id}/cancel", {"flow_id": flow_id, "reason": "", "cancellation_policy": "cancel_all"}

    assert (await api.post(f"{url}?wait=true&timeout_ms=soon", body)).status_code == 400
    assert await api.post_json(f"{url}?wait=true&timeout_ms=0", body) == (
        504,
        {"error": "timeout: cancel_flow", "kind": "timeout", "retryable": False},
    )
    assert (await api.get(f"/v1/flows/{flow_id}")).json()["public_flow_state"] == "cancelled"


@pytest.mark.spec("S-004")
async def test_a_member_on_another_partition_than_its_flow_is_refused(api: ApiClient) -> None:
    flow_id, [member] = await api.create_flow(1)
    elsewhere = (partition_of(ExecutionId(member)) + 1) % 256
    for flow in (flow_id, str(uuid.uuid4())):
        there = new_execution_id((flow_partition(FlowId(flow), api.engine.partitions) + 1) % 256)
        answer = await api.post(f"/v1/flows/{flow}/members", {"flow_id": flow, "execution_id": there, "now": NOW})
        assert (answer.status_code, answer.json().get("kind")) == (400, None)
    known = await api.create(execution_id=new_execution_id(elsewhere))
    answer = await api.post(f"/v1/flows/{flow_id}/members", {"flow_id": flow_id, "execution_id": known, "now": NOW})
    assert answer.status_code == 400


async def test_an_unknown_cancellation_policy_is_refused_and_an_alias_is_accepted(api: ApiClient) -> None:
    flow_id, _ = await api.create_flow()
    url = f"/v1/flows/{flow_id}/cancel"

    assert (await api.post(url, cancellation(flow_id, "some"))).status_code == 400
    assert (await api.post(url, cancellation(flow_id, "cancel_flow_only"))).status_code == 200


@pytest.mark.spec("S-096")
async def test_errors_of_flows_have_their_status_and_kind(api: ApiClient) -> None:
    unknown = str(uuid.uuid4())
    flow_id, [a, b] = await api.create_flow(2)
    held = await api.create_claimed()

    async def answer(url: str, body: object) -> tuple[int, str | None, bool | None]:
        reply = await api.post(url, body)
        return reply.status_code, reply.json().get("kind"), reply.json().get("retryable")

    assert await answer(f"/v1/flows/{unknown}/cancel", cancellation(unknown, "cancel_all")) == (404, None, None)
    stale = api.edge_body(flow_id, a, b, expected_graph_revision=9)
    assert await answer(f"/v1/flows/{flow_id}/edges", stale) == (409, "contention", True)
    own = api.edge_body(flow_id, a, a)
    assert await answer(f"/v1/flows/{flow_id}/edges", own) == (409, "self_referencing_edge", False)
    other = await api.create(execution_id=f"{a.partition('}')[0]}}}:{unknown}")
    outside = api.edge_body(flow_id, a, other)
    assert await answer(f"/v1/flows/{flow_id}/edges", outside) == (409, "state_conflict", False)
    await api.apply_edge(flow_id, a, b)
    assert await answer(f"/v1/flows/{flow_id}/edges", api.edge_body(flow_id, b, a)) == (409, "cycle_detected", False)
    assert await answer(path(held.execution_id, "replay"), None) == (409, "execution_not_terminal", False)
    wrong = {"flow_id": flow_id, "execution_id": a, "now": NOW}
    assert await answer(f"/v1/flows/{unknown}/members", wrong) == (400, None, None)
    assert await api.get_json(f"/v1/budgets/{unknown}") == (404, {"error": "not found: budget"})
    budget = await api.create_budget(95)
    breach = await api.post(f"{budget}/usage", {"dimensions": {"tokens": 10}, "now": NOW})
    body = {"HardBreach": {"dimension": "tokens", "current_usage": 95, "hard_limit": 100}}
    assert (breach.status_code, breach.json()) == (200, body)
    assert (await api.post(f"/v1/flows/{flow_id}/cancel", cancellation(flow_id, "flow_only"))).status_code == 200
    late = {"flow_id": flow_id, "execution_id": other, "now": NOW}
    assert await answer(f"/v1/flows/{flow_id}/members", late) == (409, "flow_already_terminal", False)


async def test_adding_to_a_cancelled_flow_is_a_conflict(api: ApiClient) -> None:
    flow_id, [member] = await api.create_flow(1)
    await api.post(f"/v1/flows/{flow_id}/cancel", cancellation(flow_id, "flow_only"))
    partition = member.partition("}")[0]
    late = await api.create(execution_id=f"{partition}}}:{uuid.uuid4()}")
    answer = await api.post(f"/v1/flows/{flow_id}/members", {"flow_id": flow_id, "execution_id": late, "now": NOW})

    assert (answer.status_code, answer.json()["kind"]) == (409, "flow_already_terminal")


@pytest.mark.spec("S-097")
async def test_the_first_create_has_status_201_and_the_second_200(api: ApiClient) -> None:
    flow_id, quota_id, budget = str(uuid.uuid4()), str(uuid.uuid4()), api.budget_body()
    here = flow_partition(FlowId(flow_id), api.engine.partitions)
    members = [await api.create(execution_id=new_execution_id(here)) for _ in range(2)]
    limits = {"window_seconds": 60, "max_requests_per_window": 5, "max_concurrent": 2}
    for url, body, first, again in (
        (
            "/v1/flows",
            {"flow_id": flow_id, "flow_kind": "dag", "namespace": "ns", "now": NOW},
            {"Created": {"flow_id": flow_id}},
            {"AlreadySatisfied": {"flow_id": flow_id}},
        ),
        *(
            (
                f"/v1/flows/{flow_id}/members",
                {"flow_id": flow_id, "execution_id": member, "now": NOW},
                {"Added": {"execution_id": member, "new_node_count": place + 1}},
                {"AlreadyMember": {"execution_id": member, "node_count": place + 1}},
            )
            for place, member in enumerate(members)
        ),
        (
            "/v1/budgets",
            budget,
            {"Created": {"budget_id": budget["budget_id"]}},
            {"AlreadySatisfied": {"budget_id": budget["budget_id"]}},
        ),
        (
            "/v1/quotas",
            {"quota_policy_id": quota_id, "now": NOW} | limits,
            {"Created": {"quota_policy_id": quota_id}},
            {"AlreadySatisfied": {"quota_policy_id": quota_id}},
        ),
    ):
        answers = [await api.post(url, body) for _ in range(2)]
        assert [(one.status_code, one.json()) for one in answers] == [(201, first), (200, again)]
    edge = api.edge_body(flow_id, *members)
    assert (await api.post(f"/v1/flows/{flow_id}/edges", edge)).status_code == 201
    assert (await api.post(f"/v1/flows/{flow_id}/edges/apply", edge)).status_code == 200


@pytest.mark.parametrize(
    ("url", "text"), [("/v1/flows/x", "invalid flow_id: "), ("/v1/budgets/x", "invalid budget_id: ")]
)
async def test_an_invalid_id_in_a_path_is_reported(api: ApiClient, url: str, text: str) -> None:
    answer = await api.get(url)

    assert answer.status_code == 400
    assert answer.json()["error"].startswith(text)


# ---------------------------------------------------------------------------------------------------------------
# Budgets and quotas


@pytest.mark.spec("R51")
async def test_a_budget_is_created_once(api: ApiClient) -> None:
    body = api.budget_body()
    answers = [await api.post("/v1/budgets", body) for _ in range(2)]

    assert [(one.status_code, one.json()) for one in answers] == [
        (201, {"Created": {"budget_id": body["budget_id"]}}),
        (200, {"AlreadySatisfied": {"budget_id": body["budget_id"]}}),
    ]
    assert (await api.post("/v1/budgets", api.budget_body(hard_limits=[1, 2]))).status_code == 400


@pytest.mark.spec("R52")
async def test_status(api: ApiClient) -> None:
    status = (await api.get(await api.create_budget())).json()

    assert not status["usage"].get("tokens")
    assert (status["hard_limits"], status["soft_limits"]) == ({"tokens": 100}, {"tokens": 50})
    assert (status["last_breach_at"], status["breach_count"]) == (None, 0)
    assert {"last_breach_dim", "next_reset_at", "created_at"} <= set(status)


async def usage(api: ApiClient, url: str, tokens: int, **given: object) -> object:
    answer = await api.post(f"{url}/usage", {"dimensions": {"tokens": tokens}, "now": NOW} | given)
    assert answer.status_code == 200
    return answer.json()


async def used(api: ApiClient, url: str) -> int:
    return int((await api.get(url)).json()["usage"].get("tokens", 0))


@pytest.mark.spec("R53")
async def test_usage_above_the_soft_limit_is_recorded(api: ApiClient) -> None:
    url = await api.create_budget(45)
    reply = await usage(api, url, 10)

    assert reply == {"SoftBreach": {"dimension": "tokens", "current_usage": 55, "soft_limit": 50}}
    assert await used(api, url) == 55


@pytest.mark.spec("R54")
async def test_usage_above_the_hard_limit_is_not_recorded(api: ApiClient) -> None:
    url = await api.create_budget(95)
    reply = await usage(api, url, 10)

    assert reply == {"HardBreach": {"dimension": "tokens", "current_usage": 95, "hard_limit": 100}}
    assert await used(api, url) == 95
    assert (await api.get(url)).json()["breach_count"] == 1


@pytest.mark.spec("R54")
async def test_the_dimensions_of_a_usage_report_are_checked_in_alphabetical_order(api: ApiClient) -> None:
    body = api.budget_body(dimensions=["y", "x"], hard_limits=[1, 1], soft_limits=[0, 0])
    await api.post("/v1/budgets", body)
    url = f"/v1/budgets/{body['budget_id']}/usage"

    reply = (await api.post(url, {"dimensions": {"y": 2, "x": 2}, "now": NOW})).json()

    assert reply["HardBreach"]["dimension"] == "x"


@pytest.mark.spec("R55")
async def test_usage_with_the_same_dedup_key_is_recorded_once(api: ApiClient) -> None:
    url = await api.create_budget()

    assert await usage(api, url, 10, dedup_key="d1") == "Ok"
    assert await usage(api, url, 10, dedup_key="d1") == "AlreadyApplied"
    assert await used(api, url) == 10


@pytest.mark.spec("R56")
async def test_a_reset_clears_the_usage(api: ApiClient) -> None:
    url = await api.create_budget(40)
    assert await api.post_json(f"{url}/reset") == (200, {"Reset": {"next_reset_at": 0}})
    assert await used(api, url) == 0


@pytest.mark.spec("R57")
async def test_create(api: ApiClient) -> None:
    quota = {
        "quota_policy_id": str(uuid.uuid4()),
        "window_seconds": 60,
        "max_requests_per_window": 5,
        "max_concurrent": 2,
        "now": NOW,
    }
    answers = [await api.post("/v1/quotas", quota) for _ in range(2)]
    ref = {"quota_policy_id": quota["quota_policy_id"]}

    assert [(one.status_code, one.json()) for one in answers] == [
        (201, {"Created": ref}),
        (200, {"AlreadySatisfied": ref}),
    ]
    shown = (await api.get(f"/v1/quotas/{quota['quota_policy_id']}")).json()
    assert (shown["max_requests_per_window"], shown["active_concurrency_cap"]) == (5, 2)


@pytest.mark.parametrize("form", ["{}", "urn:uuid:{}", "{{{}}}"])
async def test_every_form_of_a_flow_id_names_the_same_flow(api: ApiClient, form: str) -> None:
    flow_id, (member,) = await api.create_flow(1)
    written = form.format(flow_id.upper())
    body = {"flow_id": written, "flow_kind": "dag", "namespace": "ns", "now": NOW}

    assert (await api.post("/v1/flows", body)).json() == {"AlreadySatisfied": {"flow_id": flow_id}}
    url = f"/v1/flows/{quote(written, safe='')}"
    assert (await api.get(url)).json()["flow_id"] == flow_id
    again = await api.post(f"{url}/members", {"flow_id": flow_id, "execution_id": member, "now": NOW})
    assert again.json() == {"AlreadyMember": {"execution_id": member, "node_count": 1}}
