"""Reads over HTTP: states, results, explanations, output."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.api import executions, streams
from flowfabric.api.encoding import variant_name
from flowfabric.client.base import ClientBase, execution_path
from flowfabric.client.decoding import decode_as
from flowfabric.client.errors import BACKEND
from flowfabric.engine.operations.pages import HistoryEntry, IdMatches, SnapshotPage
from flowfabric.engine.operations.streams import Visibility
from flowfabric.engine.types import ExecutionSnapshot, FrameView, StateVector, StreamPage
from flowfabric.ids import id_prefixes
from flowfabric.model import obstacles
from flowfabric.model.answers.execution import AttemptView
from flowfabric.model.obstacles import Explanation
from flowfabric.model.states import PublicState


class ClientReads(ClientBase):
    """Read operations."""

    async def read_execution_state(self, execution_id: str) -> PublicState | None:
        """Return the public state of an execution."""
        response = await self.transport.request("GET", execution_path(execution_id, "state"), allow_not_found=True)
        return None if response.status == 404 else decode_as(response.body, PublicState)

    async def describe_execution(self, execution_id: str) -> ExecutionSnapshot | None:
        """Return an execution with its lease, waitpoint and tags."""
        response = await self.transport.request("GET", execution_path(execution_id, "snapshot"), allow_not_found=True)
        return None if response.status == 404 else decode_as(response.body, ExecutionSnapshot)

    async def read_total_attempt_count(self, execution_id: str) -> int:
        """Return how many attempts an execution has had."""
        snapshot = await self.describe_execution(execution_id)
        if snapshot is None:
            raise errors.NotFound("execution", execution_id=execution_id)
        return snapshot.total_attempt_count

    async def read_current_attempt_index(self, execution_id: str) -> int:
        """Return the index of the current attempt."""
        response = await self.transport.request("GET", execution_path(execution_id), allow_not_found=True)
        if response.status == 404:
            raise errors.NotFound("execution", execution_id=execution_id)
        return decode_as(response.body, executions.ExecutionInfoResponse).current_attempt_index

    async def read_kinds(self, execution_ids: Iterable[str]) -> dict[str, str]:
        """Return the kinds of executions by id."""
        remaining = list(execution_ids)
        batch = (
            self.transport.request("GET", execution_path(execution_id), allow_not_found=True)
            for execution_id in remaining
        )
        response = zip(remaining, await asyncio.gather(*batch), strict=True)
        return {
            execution_id: decode_as(answer.body, executions.ExecutionInfoResponse).execution_kind
            for execution_id, answer in response
            if answer.status != 404
        }

    async def read_state_vector(self, execution_id: str) -> StateVector | None:
        """Return the full state vector of an execution."""
        response = await self.transport.request("GET", execution_path(execution_id), allow_not_found=True)
        if response.status == 404:
            return None
        return msgspec.convert(decode_as(response.body, executions.ExecutionInfoResponse).state_vector, StateVector)

    async def lease_history(self, execution_id: str) -> list[HistoryEntry]:
        """Return the lease events of an execution, oldest first."""
        return decode_as(
            (await self.transport.request("GET", execution_path(execution_id, "leases"))).body, list[HistoryEntry]
        )

    async def attempt_history(self, execution_id: str) -> list[AttemptView]:
        """Return every attempt by index."""
        return decode_as(
            (await self.transport.request("GET", execution_path(execution_id, "attempts"))).body, list[AttemptView]
        )

    async def read_progress(self, execution_id: str) -> tuple[int | None, str | None]:
        """Return the last reported progress as percentage and message."""
        response = await self.transport.request("GET", execution_path(execution_id, "progress"))
        progress = decode_as(response.body, executions.ReadProgressResponse)
        return progress.pct, progress.message

    async def explain(self, execution_id: str) -> Explanation:
        """Explain why an execution is not running."""
        response = await self.transport.request("GET", execution_path(execution_id, "explain"))
        results = decode_as(response.body, executions.ExplanationResponse)
        kind = {variant_name(kind): kind for kind in obstacles.Obstacle.__subclasses__()}[results.obstacle]
        return Explanation(
            results.execution_id, PublicState(results.public_state), msgspec.convert(results.facts, kind)
        )

    async def search_executions(
        self,
        *,
        namespace: str | None = None,
        lane_id: str | None = None,
        public_state: PublicState | str | None = None,
        flow_id: str | None = None,
        created_from: int | None = None,
        created_before: int | None = None,
        tag: tuple[str, str] | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> SnapshotPage:
        """Return executions of all partitions that match every filter, by id."""
        query = {
            "namespace": namespace,
            "lane": lane_id,
            "state": None if public_state is None else str(public_state),
            "flow_id": flow_id,
            "created_from": created_from,
            "created_before": created_before,
            "tag": None if tag is None else "=".join(tag),
            "cursor": cursor,
            "limit": limit,
        }
        return decode_as((await self.transport.request("GET", "/v1/executions/search", query=query)).body, SnapshotPage)

    async def find_executions(
        self, prefix: str, *, namespaces: Sequence[str] | None = None, limit: int = 10
    ) -> IdMatches:
        """Return executions whose id begins with a prefix."""
        if namespaces is not None:
            raise errors.InvalidInput("namespaces: a server looks in those of the token")
        id_prefixes(prefix, self.partitions)  # a malformed prefix is refused here, as on a store
        query = {"prefix": prefix, "limit": limit}
        return decode_as((await self.transport.request("GET", "/v1/executions/ids", query=query)).body, IdMatches)

    # -- results --------------------------------------------------------------------------------------------------

    async def get_execution_result(self, execution_id: str) -> bytes | None:
        """Return the result of an execution; None if there is none."""
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
            response = await self.transport.request("POST", "/v1/executions/results", body)
            page = decode_as(response.body, executions.ReadResultsResponse)
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
        """Return frames after a cursor; wait up to `block_ms` for the first one."""
        if visibility != Visibility.ALL:
            raise errors.InvalidInput("visibility: a server tails everything or nothing")
        wait_ms = min(block_ms, streams.MAX_BLOCK_MS)
        query: dict[str, Any] = {
            "after": after,
            "block_ms": wait_ms,
            "limit": min(count_limit, streams.MAX_FRAMES_PER_READ),
        }
        path = execution_path(execution_id, "attempts", str(attempt_index), "stream", "tail")
        response = decode_as(
            (await self.transport.request("GET", path, query=query, wait_ms=wait_ms)).body, streams.ReadStreamResponse
        )
        return StreamPage(
            [FrameView(frame.id, frame.fields) for frame in response.frames],
            None if response.closed_at is msgspec.UNSET else response.closed_at,
            None if response.closed_reason is msgspec.UNSET else response.closed_reason,
        )
