"""Handing work over, one by one, in bulk or as a flow, and ending or repeating it."""

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
from flowfabric.engine.operations.creating import ExecutionCreator
from flowfabric.engine.operations.flow_cancels import NO_WAIT, FlowCancel, Wait, WaitTimeout, max_wait_ms_of
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.engine.types import CreateExecution, Fence
from flowfabric.engine.validation import execution as validate
from flowfabric.model.answers import execution as answers
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.flow import CancellationPolicy

MAX_CREATES_PER_REQUEST = 1000
NO_FENCE = Fence()
_ENVELOPE = 1024  # what JSON adds to a body beside its parts


class ClientExecutions(ClientBase, ExecutionCreator):
    """What callers do."""

    async def create(self, ask: CreateExecution) -> answers.Created | answers.Duplicate:
        """Create an execution under its own id; asking again is harmless."""
        body = encode_create(ask)
        if _size(body) > CREATE_LIMIT - _ENVELOPE:  # more than one of the reference's requests holds
            [answer] = await self._bulk([body])
            if isinstance(answer, errors.FabricError):
                raise answer
            return answer
        told = await self.transport.request("POST", "/v1/executions", body)
        created: answers.Created | answers.Duplicate = decode_variant(told.body, answers.Created, answers.Duplicate)
        return created

    async def create_executions(
        self, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate | errors.FabricError]:
        """Create many in few trips; each answer stands for itself."""
        answered: list[answers.Created | answers.Duplicate | errors.FabricError] = []
        for part in _parts([encode_create(ask) for ask in asks]):
            answered += await self._bulk(part)
        return answered

    async def _bulk(
        self, bodies: list[dict[str, Any]]
    ) -> list[answers.Created | answers.Duplicate | errors.FabricError]:
        told = await self.transport.request("POST", "/v1/executions/bulk", {"executions": bodies})
        results: list[dict[str, Any]] = decode_as(told.body, dict[str, Any])["results"]
        return [error_in_batch(one) or convert_variant(one, answers.Created, answers.Duplicate) for one in results]

    async def create_within(
        self, connection: Any, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate]:
        """Refused: a server cannot join its client's transaction."""
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
        """Create a whole flow, all of it or nothing."""
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
        told = await self.transport.request("POST", "/v1/flows/graph", body)
        created: flow_answers.GraphCreated | flow_answers.FlowExists = decode_variant(
            told.body, flow_answers.GraphCreated, flow_answers.FlowExists
        )
        return created

    # -- afterwards -----------------------------------------------------------------------------------------------

    async def cancel_execution(
        self, execution_id: str, *, reason: str = "", source: str = "operator_override", fence: Fence = NO_FENCE
    ) -> answers.Cancelled:
        """End it, whatever it is doing."""
        body = {
            "execution_id": execution_id,
            "reason": reason,
            "source": source,
            "lease_id": fence.lease_id,
            "lease_epoch": fence.lease_epoch,
            "attempt_id": fence.attempt_id,
        }
        told = await self.transport.request("POST", execution_path(execution_id, "cancel"), body)
        cancelled: answers.Cancelled = decode_variant(told.body, answers.Cancelled)
        return cancelled

    async def cancel_flow(
        self,
        flow_id: str,
        *,
        policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        reason: str = "",
        wait: Wait = NO_WAIT,
    ) -> FlowCancel:
        """Cancel a flow and those of its members that the policy selects."""
        longest_ms = max_wait_ms_of(wait)
        query = {
            "wait": None if longest_ms is None else "true",
            "timeout_ms": longest_ms if isinstance(wait, WaitTimeout) else None,
        }
        body = {"flow_id": flow_id, "reason": reason, "cancellation_policy": str(policy)}
        where = f"/v1/flows/{quote_segment(flow_id)}/cancel"
        told = await self.transport.request("POST", where, body, query=query, wait_ms=longest_ms)
        cancelled: FlowCancel = decode_variant(
            told.body, flow_answers.FlowCancelled, flow_answers.CancellationScheduled, flow_answers.PartiallyCancelled
        )
        return cancelled

    async def replay_execution(self, execution_id: str) -> answers.Replayed:
        """Give an execution that has ended another life."""
        told = await self.transport.request("POST", execution_path(execution_id, "replay"))
        replayed: answers.Replayed = decode_variant(told.body, answers.Replayed)
        return replayed

    async def revoke_lease(
        self,
        execution_id: str,
        *,
        expected_lease_id: str = "",
        worker_instance_id: str = "",
        reason: str = "operator_revoke",
    ) -> answers.Revoked | answers.NothingToDo:
        """Take the lease away at once; the server asks for nothing else and notes its own reason."""
        told = await self.transport.request("POST", execution_path(execution_id, "revoke-lease"))
        answer = decode_as(told.body, dict[str, dict[str, Any]])
        if "Revoked" in answer:
            return answers.Revoked(answer["Revoked"]["lease_id"], int(answer["Revoked"]["lease_epoch"]))
        satisfied: answers.NothingToDo = convert_variant(answer, answers.NothingToDo)
        return satisfied

    async def set_execution_tags(self, execution_id: str, pairs: Mapping[str, str]) -> int:
        """Set some tags, all of them or none; how many were new or changed."""
        told = await self.transport.request("PUT", execution_path(execution_id, "tags"), {"tags": dict(pairs)})
        return int(decode_as(told.body, dict[str, int])["set"])


def encode_create(ask: CreateExecution) -> dict[str, Any]:
    """A create on the wire. What cannot be an id is refused here, with its name."""
    ids.parse_execution_id(ask.execution_id)
    ids.parse_lane_id(ask.lane_id)
    given = {
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
    return {name: value for name, value in given.items() if value is not None}


def _policy(given: object) -> dict[str, Any] | None:
    """A policy as the document that a body holds; what is none is refused here, in the engine's words."""
    text = validate.policy_text(given)
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
    """About how long it will be."""
    return len(body["input_payload_b64"]) * 4 // 3 + len(msgspec.json.encode({**body, "input_payload_b64": b""}))


def _parts(bodies: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """As many in one request as it holds."""
    part: list[dict[str, Any]] = []
    length = 0
    for body in bodies:
        size = _size(body)
        if part and (len(part) == MAX_CREATES_PER_REQUEST or length + size > BULK_LIMIT - _ENVELOPE):
            yield part
            part, length = [], 0
        part.append(body)
        length += size
    if part:
        yield part
