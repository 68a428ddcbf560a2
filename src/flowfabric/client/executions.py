"""Executions and flows over HTTP: create, cancel, replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.api import executions
from flowfabric.api.encoding import BULK_LIMIT, CREATE_LIMIT
from flowfabric.client.base import execution_path, fields_except
from flowfabric.client.decoding import convert_variant, decode_as, decode_variant
from flowfabric.client.errors import error_in_batch
from flowfabric.client.lanes import ClientLanes
from flowfabric.client.transport import quote_segment
from flowfabric.engine.operations.create import ExecutionCreator
from flowfabric.engine.operations.flows import NO_WAIT, FlowCancel, GraphEdge, Wait, WaitTimeout, max_wait_ms_of
from flowfabric.engine.types import CreateExecution, Fence, KeyPolicy, MessageArgs
from flowfabric.engine.validation import execution as validate
from flowfabric.model.answers import execution as answers
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.flow import CancellationPolicy

MAX_CREATES_PER_REQUEST = 1000
NO_FENCE = Fence()
_ENVELOPE = 1024  # bytes that JSON adds to a body


class ClientExecutions(ClientLanes):
    """Operations of applications on executions and flows."""

    create_execution = ExecutionCreator.create_execution

    async def create(self, ask: CreateExecution) -> answers.Created | answers.Duplicate:
        self._refresh_lanes_if_old()
        body = encode_create(ask)
        if _size(body) > CREATE_LIMIT - _ENVELOPE:  # too large for a single create; the bulk route takes more
            [answer] = await self._create_batch([body])
            if isinstance(answer, errors.FabricError):
                raise answer
            return answer
        response = await self.transport.request("POST", "/v1/executions", body)
        return decode_variant(response.body, answers.Created, answers.Duplicate)

    async def start_by_key(
        self, ask: CreateExecution, policy: KeyPolicy, *, message: MessageArgs | None = None
    ) -> answers.Submitted:
        """Create an execution under its key, or do with the one that has the key what the policy says."""
        self._refresh_lanes_if_old()
        body = msgspec.structs.asdict(policy) | {"execution": encode_create(ask)}
        if message is not None:
            own = fields_except(message, "execution_id", "payload", "idempotency_key", "dedup_ttl_ms")
            body["message"] = own | {"payload_b64": message.payload}
        return await self.transport.fetch(answers.Submitted, "POST", _key_path(ask.idempotency_key or ""), body)

    async def find_by_key(
        self, idempotency_key: str, *, namespace: str = "default", lane_id: str = "default"
    ) -> str | None:
        query = {"namespace": namespace, "lane_id": lane_id}
        holder = await self.transport.find(executions.KeyHolderResponse, _key_path(idempotency_key), query=query)
        return None if holder is None else holder.execution_id

    async def create_executions(
        self, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate | errors.FabricError]:
        self._refresh_lanes_if_old()
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
        return decode_variant(response.body, flow_answers.GraphCreated, flow_answers.FlowExists)

    # -- existing executions ------------------------------------------------------------------------------------------

    async def cancel_execution(
        self, execution_id: str, *, reason: str = "", source: str = "operator_override", fence: Fence = NO_FENCE
    ) -> answers.Cancelled:
        body = {
            "execution_id": execution_id,
            "reason": reason,
            "source": source,
            "lease_id": fence.lease_id,
            "lease_epoch": fence.lease_epoch,
            "attempt_id": fence.attempt_id,
        }
        response = await self.transport.request("POST", execution_path(execution_id, "cancel"), body)
        return decode_variant(response.body, answers.Cancelled)

    async def cancel_flow(
        self,
        flow_id: str,
        *,
        policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        reason: str = "",
        wait: Wait = NO_WAIT,
    ) -> FlowCancel:
        longest_ms = max_wait_ms_of(wait)
        query = {
            "wait": None if longest_ms is None else "true",
            "timeout_ms": longest_ms if isinstance(wait, WaitTimeout) else None,
        }
        body = {"flow_id": flow_id, "reason": reason, "cancellation_policy": str(policy)}
        where = f"/v1/flows/{quote_segment(flow_id)}/cancel"
        response = await self.transport.request("POST", where, body, query=query, wait_ms=longest_ms)
        return decode_variant(
            response.body,
            flow_answers.FlowCancelled,
            flow_answers.CancellationScheduled,
            flow_answers.PartiallyCancelled,
        )

    async def replay_execution(self, execution_id: str) -> answers.Replayed:
        response = await self.transport.request("POST", execution_path(execution_id, "replay"))
        return decode_variant(response.body, answers.Replayed)

    async def change_priority(self, execution_id: str, new_priority: int, *, lane_id: str = "") -> answers.Changed:
        path, body = execution_path(execution_id, "priority"), {"new_priority": new_priority}
        response = await self.transport.request("PUT", path, body)
        return decode_variant(response.body, answers.Changed)

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
        answer = decode_variant(response.body, executions.RevokeLeaseResponse, answers.NothingToDo)
        if isinstance(answer, answers.NothingToDo):
            return answer
        return answers.Revoked(answer.lease_id, int(answer.lease_epoch))

    async def set_execution_tags(self, execution_id: str, pairs: Mapping[str, str]) -> int:
        """Set tags, all or none; return how many were new or changed."""
        response = await self.transport.request("PUT", execution_path(execution_id, "tags"), {"tags": dict(pairs)})
        return int(decode_as(response.body, dict[str, int])["set"])


def encode_create(ask: CreateExecution) -> dict[str, Any]:
    """Encode a create request; a malformed id is refused here by name."""
    ids.parse_execution_id(ask.execution_id)
    ids.parse_lane_id(ask.lane_id)
    fields = fields_except(ask, "partition", "input_payload", "policy")
    fields |= {"input_payload_b64": ask.input_payload, "policy": _policy(ask.policy)}
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


def _key_path(idempotency_key: str) -> str:
    """Return the path of a key; its segments are the task and what follows it."""
    task, separator, key = idempotency_key.partition("|")
    if not (task and separator and key):
        raise errors.InvalidInput(f"idempotency_key: {idempotency_key!r} is not task|key")
    return f"/v1/keys/{quote_segment(task)}/{quote_segment(key)}"
