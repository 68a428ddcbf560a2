"""Flows, budgets, quotas: scenarios R46 to R57, S-004, S-039, S-058, S-096, S-097."""

from __future__ import annotations

import uuid
from urllib.parse import quote

import pytest

from flowfabric.ids import ExecutionId, FlowId, flow_partition, partition_of
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CancelBacklog, PendingMemberCancel
from flowfabric.stores.queries import Read
from tests.server.asking import NOW, Asking, fresh, path

STALE = {"error": "contention: StaleGraphRevision", "kind": "contention", "retryable": True}


@pytest.mark.spec("R46")
async def test_stage_and_apply(ask: Asking) -> None:
    flow_id, [a, b] = await ask.flow(2)
    edge = ask.edge(flow_id, a, b)
    where = f"/v1/flows/{flow_id}/edges"
    staged = await ask.post(where, edge | {"expected_graph_revision": 2})
    assert (staged.status_code, staged.json()) == (
        201,
        {"Staged": {"edge_id": edge["edge_id"], "new_graph_revision": 3}},
    )
    applied = [await ask.post(f"{where}/apply", edge | {"graph_revision": 3}) for _ in range(2)]

    assert [(one.status_code, one.json()) for one in applied] == [
        (200, {"Applied": {"unsatisfied_count": 1}}),
        (200, "AlreadyApplied"),
    ]
    assert await ask.state(b) == "waiting_children"


@pytest.mark.spec("R47")
async def test_stale_revision(ask: Asking) -> None:
    flow_id, [a, b] = await ask.flow(2)
    answer = await ask.post(f"/v1/flows/{flow_id}/edges", ask.edge(flow_id, a, b, expected_graph_revision=1))

    assert (answer.status_code, answer.json()) == (409, STALE)


@pytest.mark.spec("R48")
async def test_cycle(ask: Asking) -> None:
    flow_id, [a, b] = await ask.flow(2)
    await ask.connected(flow_id, a, b)
    answer = await ask.post(f"/v1/flows/{flow_id}/edges", ask.edge(flow_id, b, a, expected_graph_revision=3))

    assert (answer.status_code, answer.json()["kind"], answer.json()["retryable"]) == (409, "cycle_detected", False)


@pytest.mark.spec("R49")
async def test_dependent_runs_after_success(ask: Asking) -> None:
    flow_id, [a, b] = await ask.flow(2)
    await ask.connected(flow_id, a, b)
    held = await ask.engine.claim("L", worker_id="w", worker_instance_id="w-1")
    assert held is not None
    assert held.execution_id == a
    await ask.engine.complete(held.handle)
    await ask.engine.dispatcher.wait_idle()

    assert await ask.state(b) == "waiting"


def cancellation(flow_id: str, policy: str) -> dict[str, object]:
    return {"flow_id": flow_id, "reason": "r", "cancellation_policy": policy, "now": NOW}


@pytest.mark.spec("R50")
async def test_cancel_again(ask: Asking) -> None:
    flow_id, members = await ask.flow(1)
    where = f"/v1/flows/{flow_id}/cancel"
    first = await ask.post(where, cancellation(flow_id, "cancel_all"))
    assert first.json()["CancellationScheduled"]["member_count"] == 1
    again = await ask.post(where, cancellation(flow_id, "flow_only"))

    assert (again.status_code, again.json()) == (
        200,
        {"Cancelled": {"cancellation_policy": "cancel_all", "member_execution_ids": members}},
    )


@pytest.mark.spec("S-039")
async def test_wait_mode_cancels_everybody(ask: Asking) -> None:
    flow_id, members = await ask.flow(3)
    held = await ask.engine.claim_many("L", 2, worker_id="w", worker_instance_id="w-1")
    await ask.engine.complete(held[0].handle)
    answer = await ask.post(f"/v1/flows/{flow_id}/cancel?wait=true", cancellation(flow_id, "cancel_all"))

    assert answer.status_code == 200
    assert sorted(answer.json()["Cancelled"]["member_execution_ids"]) == sorted(members)
    states = {member: await ask.state(member) for member in members}
    assert states.pop(held[0].execution_id) == "completed"
    assert set(states.values()) == {"cancelled"}
    rows = [rows[0] for rows in (await ask.engine.runtime.load([Read(Execution, (name,)) for name in states])).rows]
    assert {(row.cancellation_reason, row.cancelled_by) for row in rows} == {("r", "operator_override")}
    assert (
        await ask.engine.runtime.load((Read(PendingMemberCancel, (flow_id,)), Read(CancelBacklog, (flow_id,))))
    ).rows == [
        [],
        [],
    ]


async def test_a_wait_for_a_cancel_ends_when_the_caller_says_so(ask: Asking) -> None:
    flow_id, _ = await ask.flow(1)
    where, body = f"/v1/flows/{flow_id}/cancel", {"flow_id": flow_id, "reason": "", "cancellation_policy": "cancel_all"}

    assert (await ask.post(f"{where}?wait=true&timeout_ms=soon", body)).status_code == 400
    late = await ask.post(f"{where}?wait=true&timeout_ms=0", body)

    assert (late.status_code, late.json()) == (
        504,
        {"error": "timeout: cancel_flow", "kind": "timeout", "retryable": False},
    )
    assert (await ask.get(f"/v1/flows/{flow_id}")).json()["public_flow_state"] == "cancelled"


@pytest.mark.spec("S-004")
async def test_partition_co_location_is_enforced(ask: Asking) -> None:
    flow_id, [member] = await ask.flow(1)
    elsewhere = (partition_of(ExecutionId(member)) + 1) % 256
    for flow in (flow_id, str(uuid.uuid4())):
        there = fresh((flow_partition(FlowId(flow), ask.engine.partitions) + 1) % 256)
        answer = await ask.post(f"/v1/flows/{flow}/members", {"flow_id": flow, "execution_id": there, "now": NOW})
        assert (answer.status_code, answer.json().get("kind")) == (400, None)
    known = await ask.created(execution_id=fresh(elsewhere))
    answer = await ask.post(f"/v1/flows/{flow_id}/members", {"flow_id": flow_id, "execution_id": known, "now": NOW})
    assert answer.status_code == 400


async def test_a_policy_that_is_none_is_refused_and_an_alias_is_known(ask: Asking) -> None:
    flow_id, _ = await ask.flow()
    where = f"/v1/flows/{flow_id}/cancel"

    assert (await ask.post(where, cancellation(flow_id, "some"))).status_code == 400
    assert (await ask.post(where, cancellation(flow_id, "cancel_flow_only"))).status_code == 200


@pytest.mark.spec("S-096")
async def test_status_mapping(ask: Asking) -> None:
    unknown = str(uuid.uuid4())
    flow_id, [a, b] = await ask.flow(2)
    held = await ask.claimed()

    async def answer(where: str, body: object) -> tuple[int, str | None, bool | None]:
        told = await ask.post(where, body)
        return told.status_code, told.json().get("kind"), told.json().get("retryable")

    assert await answer(f"/v1/flows/{unknown}/cancel", cancellation(unknown, "cancel_all")) == (404, None, None)
    stale = ask.edge(flow_id, a, b, expected_graph_revision=9)
    assert await answer(f"/v1/flows/{flow_id}/edges", stale) == (409, "contention", True)
    own = ask.edge(flow_id, a, a)
    assert await answer(f"/v1/flows/{flow_id}/edges", own) == (409, "self_referencing_edge", False)
    other = await ask.created(execution_id=f"{a.partition('}')[0]}}}:{unknown}")
    outside = ask.edge(flow_id, a, other)
    assert await answer(f"/v1/flows/{flow_id}/edges", outside) == (409, "state_conflict", False)
    await ask.connected(flow_id, a, b)
    assert await answer(f"/v1/flows/{flow_id}/edges", ask.edge(flow_id, b, a)) == (409, "cycle_detected", False)
    assert await answer(path(held.execution_id, "replay"), None) == (409, "execution_not_terminal", False)
    wrong = {"flow_id": flow_id, "execution_id": a, "now": NOW}
    assert await answer(f"/v1/flows/{unknown}/members", wrong) == (400, None, None)
    told = await ask.get(f"/v1/budgets/{unknown}")
    assert (told.status_code, told.json()) == (404, {"error": "not found: budget"})
    budget = await ask.budgeted(95)
    breach = await ask.post(f"{budget}/usage", {"dimensions": {"tokens": 10}, "now": NOW})
    body = {"HardBreach": {"dimension": "tokens", "current_usage": 95, "hard_limit": 100}}
    assert (breach.status_code, breach.json()) == (200, body)
    assert (await ask.post(f"/v1/flows/{flow_id}/cancel", cancellation(flow_id, "flow_only"))).status_code == 200
    late = {"flow_id": flow_id, "execution_id": other, "now": NOW}
    assert await answer(f"/v1/flows/{flow_id}/members", late) == (409, "flow_already_terminal", False)


async def test_adding_to_a_cancelled_flow_is_a_conflict(ask: Asking) -> None:
    flow_id, [member] = await ask.flow(1)
    await ask.post(f"/v1/flows/{flow_id}/cancel", cancellation(flow_id, "flow_only"))
    partition = member.partition("}")[0]
    late = await ask.created(execution_id=f"{partition}}}:{uuid.uuid4()}")
    answer = await ask.post(f"/v1/flows/{flow_id}/members", {"flow_id": flow_id, "execution_id": late, "now": NOW})

    assert (answer.status_code, answer.json()["kind"]) == (409, "flow_already_terminal")


@pytest.mark.spec("S-097")
async def test_creation_statuses(ask: Asking) -> None:
    flow_id, quota_id, budget = str(uuid.uuid4()), str(uuid.uuid4()), ask.budget()
    here = flow_partition(FlowId(flow_id), ask.engine.partitions)
    members = [await ask.created(execution_id=fresh(here)) for _ in range(2)]
    limits = {"window_seconds": 60, "max_requests_per_window": 5, "max_concurrent": 2}
    for where, body, first, again in (
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
        answers = [await ask.post(where, body) for _ in range(2)]
        assert [(one.status_code, one.json()) for one in answers] == [(201, first), (200, again)]
    edge = ask.edge(flow_id, *members)
    assert (await ask.post(f"/v1/flows/{flow_id}/edges", edge)).status_code == 201
    assert (await ask.post(f"/v1/flows/{flow_id}/edges/apply", edge)).status_code == 200


@pytest.mark.parametrize(
    ("where", "text"), [("/v1/flows/x", "invalid flow_id: "), ("/v1/budgets/x", "invalid budget_id: ")]
)
async def test_a_bad_id_in_a_path_is_named(ask: Asking, where: str, text: str) -> None:
    answer = await ask.get(where)

    assert answer.status_code == 400
    assert answer.json()["error"].startswith(text)


# ---------------------------------------------------------------------------------------------------------------
# Budgets and quotas


@pytest.mark.spec("R51")
async def test_a_budget_is_created_once(ask: Asking) -> None:
    body = ask.budget()
    answers = [await ask.post("/v1/budgets", body) for _ in range(2)]

    assert [(one.status_code, one.json()) for one in answers] == [
        (201, {"Created": {"budget_id": body["budget_id"]}}),
        (200, {"AlreadySatisfied": {"budget_id": body["budget_id"]}}),
    ]
    assert (await ask.post("/v1/budgets", ask.budget(hard_limits=[1, 2]))).status_code == 400


@pytest.mark.spec("R52")
async def test_status(ask: Asking) -> None:
    status = (await ask.get(await ask.budgeted())).json()

    assert not status["usage"].get("tokens")
    assert (status["hard_limits"], status["soft_limits"]) == ({"tokens": 100}, {"tokens": 50})
    assert (status["last_breach_at"], status["breach_count"]) == (None, 0)
    assert {"last_breach_dim", "next_reset_at", "created_at"} <= set(status)


async def usage(ask: Asking, where: str, tokens: int, **given: object) -> object:
    answer = await ask.post(f"{where}/usage", {"dimensions": {"tokens": tokens}, "now": NOW} | given)
    assert answer.status_code == 200
    return answer.json()


async def used(ask: Asking, where: str) -> int:
    return int((await ask.get(where)).json()["usage"].get("tokens", 0))


@pytest.mark.spec("R53")
async def test_soft_breach(ask: Asking) -> None:
    where = await ask.budgeted(45)
    told = await usage(ask, where, 10)

    assert told == {"SoftBreach": {"dimension": "tokens", "current_usage": 55, "soft_limit": 50}}
    assert await used(ask, where) == 55


@pytest.mark.spec("R54")
async def test_hard_breach_applies_nothing(ask: Asking) -> None:
    where = await ask.budgeted(95)
    told = await usage(ask, where, 10)

    assert told == {"HardBreach": {"dimension": "tokens", "current_usage": 95, "hard_limit": 100}}
    assert await used(ask, where) == 95
    assert (await ask.get(where)).json()["breach_count"] == 1


@pytest.mark.spec("R54")
async def test_the_dimensions_of_a_report_are_looked_at_by_name(ask: Asking) -> None:
    body = ask.budget(dimensions=["y", "x"], hard_limits=[1, 1], soft_limits=[0, 0])
    await ask.post("/v1/budgets", body)
    where = f"/v1/budgets/{body['budget_id']}/usage"

    told = (await ask.post(where, {"dimensions": {"y": 2, "x": 2}, "now": NOW})).json()

    assert told["HardBreach"]["dimension"] == "x"


@pytest.mark.spec("R55")
async def test_dedup(ask: Asking) -> None:
    where = await ask.budgeted()

    assert await usage(ask, where, 10, dedup_key="d1") == "Ok"
    assert await usage(ask, where, 10, dedup_key="d1") == "AlreadyApplied"
    assert await used(ask, where) == 10


@pytest.mark.spec("R56")
async def test_reset(ask: Asking) -> None:
    where = await ask.budgeted(40)
    answer = await ask.post(f"{where}/reset")

    assert (answer.status_code, answer.json()) == (200, {"Reset": {"next_reset_at": 0}})
    assert await used(ask, where) == 0


@pytest.mark.spec("R57")
async def test_create(ask: Asking) -> None:
    quota = {
        "quota_policy_id": str(uuid.uuid4()),
        "window_seconds": 60,
        "max_requests_per_window": 5,
        "max_concurrent": 2,
        "now": NOW,
    }
    answers = [await ask.post("/v1/quotas", quota) for _ in range(2)]
    ref = {"quota_policy_id": quota["quota_policy_id"]}

    assert [(one.status_code, one.json()) for one in answers] == [
        (201, {"Created": ref}),
        (200, {"AlreadySatisfied": ref}),
    ]
    shown = (await ask.get(f"/v1/quotas/{quota['quota_policy_id']}")).json()
    assert (shown["max_requests_per_window"], shown["active_concurrency_cap"]) == (5, 2)


@pytest.mark.parametrize("form", ["{}", "urn:uuid:{}", "{{{}}}"])
async def test_a_flow_is_the_same_however_its_id_is_written(ask: Asking, form: str) -> None:
    flow_id, (member,) = await ask.flow(1)
    written = form.format(flow_id.upper())
    body = {"flow_id": written, "flow_kind": "dag", "namespace": "ns", "now": NOW}

    assert (await ask.post("/v1/flows", body)).json() == {"AlreadySatisfied": {"flow_id": flow_id}}
    where = f"/v1/flows/{quote(written, safe='')}"
    assert (await ask.get(where)).json()["flow_id"] == flow_id
    again = await ask.post(f"{where}/members", {"flow_id": flow_id, "execution_id": member, "now": NOW})
    assert again.json() == {"AlreadyMember": {"execution_id": member, "node_count": 1}}
