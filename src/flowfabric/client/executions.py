"""Executions and flows over HTTP: create, cancel, replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.api.encoding import BULK_LIMIT, CREATE_LIMIT
from flowfabric.client.base import ClientBase, execution_path
from flowfabric.client.decoding import convert_variant, decode_as, decode_variant
from flowfabric.client.errors import error_in_batch
from flowfabric.client.transport import quote_segment
from flowfabric.engine.operations.flows import NO_WAIT, FlowCancel, GraphEdge, Wait, WaitTimeout, max_wait_ms_of
from flowfabric.engine.types import CreateExecution, Fence
from flowfabric.engine.validation import execution as validate
from flowfabric.model.answers import execution as answers
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.flow import CancellationPolicy

MAX_CREATES_PER_REQUEST = 1000
NO_FENCE = Fence()
_ENVELOPE = 1024  # bytes that JSON adds to a body


class ClientExecutions(ClientBase):
    """Operations of applications on executions and flows."""

    async def create(self, ask: CreateExecution) -> answers.Created | answers.Duplicate:
        """Create an execution under its own id; a repeated call returns Duplicate."""
        body = encode_create(ask)
        if _size(body) > CREATE_LIMIT - _ENVELOPE:  # too large for a single create; the bulk route takes more
            [answer] = await self._create_batch([body])
            if isinstance(answer, errors.FabricError):
                raise answer
            return answer
        response = await self.transport.request("POST", "/v1/executions", body)
        created: answers.Created | answers.Duplicate = decode_variant(response.body, answers.Created, answers.Duplicate)
        return created

    async def create_execution(
        self,
        *,
        execution_id: str,
        namespace: str = "default",
        lane_id: str = "default",
        execution_kind: str = "task",
        input_payload: bytes = b"",
        payload_encoding: str | None = None,
        priority: int = 0,
        creator_identity: str = "",
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
        policy: str | Mapping[str, Any] | None = None,
        delay_until: int | None = None,
        execution_deadline_at: int | None = None,
        parent_id: str | None = None,
    ) -> answers.Created | answers.Duplicate:
        """Create an execution; return Duplicate if its id or its idempotency key exists."""
        return await self.create(
            CreateExecution(
                execution_id=execution_id,
                partition=0,
                namespace=namespace,
                lane_id=lane_id,
                execution_kind=execution_kind,
                input_payload=input_payload,
                payload_encoding=payload_encoding,
                priority=priority,
                creator_identity=creator_identity,
                idempotency_key=idempotency_key,
                tags={} if tags is None else tags,  # type: ignore[arg-type]
                policy=validate.policy_text(policy),
                delay_until=delay_until,
                execution_deadline_at=execution_deadline_at,
                parent_id=parent_id,
            )
        )

    async def create_executions(
        self, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate | errors.FabricError]:
        """Create many executions in few round trips; each gets its own result or error."""
        results: list[answers.Created | answers.Duplicate | errors.FabricError] = []
        for batch in _batches([encode_create(ask) for ask in asks]):
            results += await self._create_batch(batch)
        return results

    async def _create_batch(
        self, bodies: list[dict[str, Any]]
    ) -> list[answers.Created | answers.Duplicate | errors.FabricError]:
        response = await self.transport.request("POST", "/v1/executions/bulk", {"executions": bodies})
        results: list[dict[str, Any]] = decode_as(response.body, dict[str, Any])["results"]
        return [error_in_batch(item) or convert_variant(item, answers.Created, answers.Duplicate) for item in results]

    async def create_within(
        self, connection: Any, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate]:
        """Refuse: a server cannot join the caller's transaction."""
        raise errors.InvalidInput("using: a server cannot join this transaction; open the Postgres store itself")

    async def create_flow_graph(
        self,
        flow_id: str,
        nodes: Iterable[CreateExecution],
        edges: Iterable[GraphEdge] = (),
        *,
        policies: Mapping[str, Mapping[str, Any]] | None = None,
        flow_kind: str = "dag",
        namespace: str = "default",
    ) -> flow_answers.GraphCreated | flow_answers.FlowExists:
        """Create a whole flow atomically."""
        body = {
            "flow_id": flow_id,
            "nodes": [encode_create(node) for node in nodes],
            "edges": [
                {
                    "upstream_execution_id": edge.upstream,
                    "downstream_execution_id": edge.downstream,
                    "dependency_kind": edge.dependency_kind,
                    "data_passing_ref": edge.data_passing_ref,
                    "edge_id": edge.edge_id,
                }
                for edge in edges
            ],
            "policies": policies or {},
            "flow_kind": flow_kind,
            "namespace": namespace,
        }
        response = await self.transport.request("POST", "/v1/flows/graph", body)
        created: flow_answers.GraphCreated | flow_answers.FlowExists = decode_variant(
            response.body, flow_answers.GraphCreated, flow_answers.FlowExists
        )
        return created

    # -- existing executions ------------------------------------------------------------------------------------------

    async def cancel_execution(
        self, execution_id: str, *, reason: str = "", source: str = "operator_override", fence: Fence = NO_FENCE
    ) -> answers.Cancelled:
        """Cancel an execution in any state."""
        body = {
            "execution_id": execution_id,
            "reason": reason,
            "source": source,
            "lease_id": fence.lease_id,
            "lease_epoch": fence.lease_epoch,
            "attempt_id": fence.attempt_id,
        }
        response = await self.transport.request("POST", execution_path(execution_id, "cancel"), body)
        cancelled: answers.Cancelled = decode_variant(response.body, answers.Cancelled)
        return cancelled

    async def cancel_flow(
        self,
        flow_id: str,
        *,
        policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        reason: str = "",
        wait: Wait = NO_WAIT,
    ) -> FlowCancel:
        """Cancel a flow and the members that the policy selects."""
        longest_ms = max_wait_ms_of(wait)
        query = {
            "wait": None if longest_ms is None else "true",
            "timeout_ms": longest_ms if isinstance(wait, WaitTimeout) else None,
        }
        body = {"flow_id": flow_id, "reason": reason, "cancellation_policy": str(policy)}
        where = f"/v1/flows/{quote_segment(flow_id)}/cancel"
        response = await self.transport.request("POST", where, body, query=query, wait_ms=longest_ms)
        cancelled: FlowCancel = decode_variant(
            response.body,
            flow_answers.FlowCancelled,
            flow_answers.CancellationScheduled,
            flow_answers.PartiallyCancelled,
        )
        return cancelled

    async def replay_execution(self, execution_id: str) -> answers.Replayed:
        """Start another life of an ended execution."""
        response = await self.transport.request("POST", execution_path(execution_id, "replay"))
        replayed: answers.Replayed = decode_variant(response.body, answers.Replayed)
        return replayed

    async def revoke_lease(
        self,
        execution_id: str,
        *,
        expected_lease_id: str = "",
        worker_instance_id: str = "",
        reason: str = "operator_revoke",
    ) -> answers.Revoked | answers.NothingToDo:
        """Revoke the lease at once; the server ignores the other arguments and records its own reason."""
        response = await self.transport.request("POST", execution_path(execution_id, "revoke-lease"))
        answer = decode_as(response.body, dict[str, dict[str, Any]])
        if "Revoked" in answer:
            return answers.Revoked(answer["Revoked"]["lease_id"], int(answer["Revoked"]["lease_epoch"]))
        satisfied: answers.NothingToDo = convert_variant(answer, answers.NothingToDo)
        return satisfied

    async def set_execution_tags(self, execution_id: str, pairs: Mapping[str, str]) -> int:
        """Set tags, all or none; return how many were new or changed."""
        response = await self.transport.request("PUT", execution_path(execution_id, "tags"), {"tags": dict(pairs)})
        return int(decode_as(response.body, dict[str, int])["set"])


def encode_create(ask: CreateExecution) -> dict[str, Any]:
    """Encode a create request; a malformed id is refused here by name."""
    ids.parse_execution_id(ask.execution_id)
    ids.parse_lane_id(ask.lane_id)
    fields = {
        "execution_id": ask.execution_id,
        "namespace": ask.namespace,
        "lane_id": ask.lane_id,
        "execution_kind": ask.execution_kind,
        "input_payload_b64": ask.input_payload,
        "payload_encoding": ask.payload_encoding,
        "priority": ask.priority,
        "creator_identity": ask.creator_identity,
        "idempotency_key": ask.idempotency_key,
        "tags": ask.tags,
        "policy": _policy(ask.policy),
        "delay_until": ask.delay_until,
        "execution_deadline_at": ask.execution_deadline_at,
        "parent_id": ask.parent_id,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _policy(fields: object) -> dict[str, Any] | None:
    """Return a policy as a JSON object; an invalid one raises the same error as the engine."""
    text = validate.policy_text(fields)
    if text is None:
        return None
    try:
        document = msgspec.json.decode(text)
    except (ValueError, RecursionError) as fault:
        raise errors.InvalidPolicyJson("malformed") from fault
    if not isinstance(document, dict):
        raise errors.InvalidPolicyJson("not_object")
    return document


def _size(body: dict[str, Any]) -> int:
    """Estimate the encoded size in bytes."""
    return len(body["input_payload_b64"]) * 4 // 3 + len(msgspec.json.encode({**body, "input_payload_b64": b""}))


def _batches(bodies: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Split bodies into batches that fit into one request each."""
    batch: list[dict[str, Any]] = []
    length = 0
    for body in bodies:
        size = _size(body)
        if batch and (len(batch) == MAX_CREATES_PER_REQUEST or length + size > BULK_LIMIT - _ENVELOPE):
            yield batch
            batch, length = [], 0
        batch.append(body)
        length += size
    if batch:
        yield batch
