"""Reads over HTTP: states, results, explanations, output."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.api import executions, streams
from flowfabric.api.encoding import variant_name
from flowfabric.client.base import ClientBase, execution_path, refuse_namespaces
from flowfabric.client.errors import BACKEND
from flowfabric.client.transport import quote_segment
from flowfabric.engine.durable.approval_inbox import ApprovalPage
from flowfabric.engine.operations.pages import ExecutionListPage, HistoryEntry, IdMatches
from flowfabric.engine.operations.streams import Visibility
from flowfabric.engine.types import ExecutionInput, ExecutionSnapshot, FlowGraph, FrameView, StateVector, StreamPage
from flowfabric.ids import id_prefixes, parse_uuid
from flowfabric.model import obstacles
from flowfabric.model.answers.execution import AttemptView
from flowfabric.model.obstacles import Explanation
from flowfabric.model.states import PublicState


class ClientReads(ClientBase):
    """Read operations."""

    async def read_execution_state(self, execution_id: str) -> PublicState | None:
        return await self.transport.find(PublicState, execution_path(execution_id, "state"))

    async def describe_execution(self, execution_id: str) -> ExecutionSnapshot | None:
        return await self.transport.find(ExecutionSnapshot, execution_path(execution_id, "snapshot"))

    async def read_total_attempt_count(self, execution_id: str) -> int:
        snapshot = await self.describe_execution(execution_id)
        if snapshot is None:
            raise errors.NotFound("execution", execution_id=execution_id)
        return snapshot.total_attempt_count

    async def read_current_attempt_index(self, execution_id: str) -> int:
        info = await self.transport.find(executions.ExecutionInfoResponse, execution_path(execution_id))
        if info is None:
            raise errors.NotFound("execution", execution_id=execution_id)
        return info.current_attempt_index

    async def read_input(self, execution_id: str) -> ExecutionInput:
        path = execution_path(execution_id, "input")
        found = await self.transport.fetch(executions.ExecutionInputResponse, "GET", path)
        return ExecutionInput(
            found.execution_kind,
            found.input_payload_b64,
            found.payload_encoding,
            found.creator_identity,
            found.policy,
        )

    async def read_kinds(self, execution_ids: Iterable[str]) -> dict[str, str]:
        wanted = list(execution_ids)
        found = await asyncio.gather(
            *(self.transport.find(executions.ExecutionInfoResponse, execution_path(one)) for one in wanted)
        )
        return {one: info.execution_kind for one, info in zip(wanted, found, strict=True) if info is not None}

    async def read_state_vector(self, execution_id: str) -> StateVector | None:
        info = await self.transport.find(executions.ExecutionInfoResponse, execution_path(execution_id))
        return None if info is None else msgspec.convert(info.state_vector, StateVector)

    async def lease_history(self, execution_id: str) -> list[HistoryEntry]:
        return await self.transport.fetch(list[HistoryEntry], "GET", execution_path(execution_id, "leases"))

    async def attempt_history(self, execution_id: str) -> list[AttemptView]:
        return await self.transport.fetch(list[AttemptView], "GET", execution_path(execution_id, "attempts"))

    async def read_progress(self, execution_id: str) -> tuple[int | None, str | None]:
        path = execution_path(execution_id, "progress")
        progress = await self.transport.fetch(executions.ReadProgressResponse, "GET", path)
        return progress.pct, progress.message

    async def explain(self, execution_id: str) -> Explanation:
        path = execution_path(execution_id, "explain")
        results = await self.transport.fetch(executions.ExplanationResponse, "GET", path)
        kind = {variant_name(kind): kind for kind in obstacles.Obstacle.__subclasses__()}[results.obstacle]
        return Explanation(
            results.execution_id, PublicState(results.public_state), msgspec.convert(results.facts, kind)
        )

    async def search_executions(
        self,
        *,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        kind: str | None = None,
        public_state: PublicState | str | Sequence[PublicState | str] | None = None,
        lane_id: str | None = None,
        tag: tuple[str, str] | None = None,
        flow_id: str | None = None,
        parent_id: str | None = None,
        worker_instance_id: str | None = None,
        error: str | None = None,
        created_from: int | None = None,
        created_before: int | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> ExecutionListPage:
        refuse_namespaces(namespaces)
        states = (public_state,) if isinstance(public_state, str) else public_state
        query = {
            "namespace": namespace,
            "kind": kind,
            "state": None if states is None else ",".join(states),
            "lane": lane_id,
            "tag": None if tag is None else "=".join(tag),
            "flow_id": flow_id,
            "parent_id": parent_id,
            "worker": worker_instance_id,
            "error": error,
            "created_from": created_from,
            "created_before": created_before,
            "cursor": cursor,
            "limit": limit,
        }
        return await self.transport.fetch(ExecutionListPage, "GET", "/v1/executions/search", query=query)

    async def list_children(
        self, execution_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> ExecutionListPage:
        path, query = execution_path(execution_id, "children"), {"cursor": cursor, "limit": limit}
        return await self.transport.fetch(ExecutionListPage, "GET", path, query=query)

    async def list_approvals(
        self,
        *,
        execution_id: str | None = None,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> ApprovalPage:
        refuse_namespaces(namespaces)
        query = {"execution_id": execution_id, "namespace": namespace, "cursor": cursor, "limit": limit}
        return await self.transport.fetch(ApprovalPage, "GET", "/v1/approvals", query=query)

    async def read_flow_graph(self, flow_id: str) -> FlowGraph:
        path = f"/v1/flows/{quote_segment(parse_uuid(flow_id, 'flow_id'))}/graph"
        return await self.transport.fetch(FlowGraph, "GET", path)

    async def find_executions(
        self, prefix: str, *, namespaces: Sequence[str] | None = None, limit: int = 10
    ) -> IdMatches:
        refuse_namespaces(namespaces)
        id_prefixes(prefix, self.partitions)  # a malformed prefix is refused here, as on a store
        query = {"prefix": prefix, "limit": limit}
        return await self.transport.fetch(IdMatches, "GET", "/v1/executions/ids", query=query)

    # -- results --------------------------------------------------------------------------------------------------

    async def get_execution_result(self, execution_id: str) -> bytes | None:
        response = await self.transport.request("GET", execution_path(execution_id, "result"), allow_not_found=True)
        return None if response.status == 404 else response.body

    async def read_results(
        self, execution_ids: Sequence[str], *, namespace: str | None = None
    ) -> dict[str, bytes | None]:
        """Return the results of many executions, or None; an execution of another namespace is a conflict."""
        results: dict[str, bytes | None] = {}
        remaining = list(execution_ids)
        while remaining:
            batch, remaining = remaining[: executions.MAX_RESULTS], remaining[executions.MAX_RESULTS :]
            body: dict[str, Any] = {"execution_ids": batch}
            if namespace is not None:
                body["namespace"] = namespace
            page = await self.transport.fetch(executions.ReadResultsResponse, "POST", "/v1/executions/results", body)
            if not page.results:
                raise errors.StoreUnavailable("server: no results in its answer", backend=BACKEND)
            results |= page.results
            remaining = page.rest + remaining
        return results

    # -- output ---------------------------------------------------------------------------------------------------

    async def tail_stream(
        self,
        execution_id: str,
        attempt_index: int,
        after: str = "0-0",
        block_ms: int = 0,
        count_limit: int = 50,
        visibility: Visibility | str = Visibility.ALL,
    ) -> StreamPage:
        if visibility != Visibility.ALL:
            raise errors.InvalidInput("visibility: a server tails everything or nothing")
        wait_ms = min(block_ms, streams.MAX_BLOCK_MS)
        query: dict[str, Any] = {
            "after": after,
            "block_ms": wait_ms,
            "limit": min(count_limit, streams.MAX_FRAMES_PER_READ),
        }
        path = execution_path(execution_id, "attempts", str(attempt_index), "stream", "tail")
        response = await self.transport.fetch(streams.ReadStreamResponse, "GET", path, query=query, wait_ms=wait_ms)
        return StreamPage(
            [FrameView(frame.id, frame.fields) for frame in response.frames],
            None if response.closed_at is msgspec.UNSET else response.closed_at,
            None if response.closed_reason is msgspec.UNSET else response.closed_reason,
        )
