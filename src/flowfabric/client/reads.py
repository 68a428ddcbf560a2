"""Looking: states, results, explanations, output."""

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
from flowfabric.engine.operations.reads import ExecutionSnapshot, HistoryEntry, IdMatches, SnapshotPage
from flowfabric.engine.operations.streams import Visibility
from flowfabric.engine.types import FrameView, StateVector, StreamPage
from flowfabric.ids import id_prefixes
from flowfabric.model import obstacles
from flowfabric.model.answers.execution import AttemptView
from flowfabric.model.obstacles import Explanation
from flowfabric.model.states import PublicState


class ClientReads(ClientBase):
    """What anybody may look at."""

    async def read_execution_state(self, execution_id: str) -> PublicState | None:
        """The one public word; None when there is no such execution."""
        told = await self.transport.request("GET", execution_path(execution_id, "state"), allow_not_found=True)
        return None if told.status == 404 else decode_as(told.body, PublicState)

    async def describe_execution(self, execution_id: str) -> ExecutionSnapshot | None:
        """Everything people want to know of it."""
        told = await self.transport.request("GET", execution_path(execution_id, "snapshot"), allow_not_found=True)
        return None if told.status == 404 else decode_as(told.body, ExecutionSnapshot)

    async def read_total_attempt_count(self, execution_id: str) -> int:
        """How many attempts there were."""
        snapshot = await self.describe_execution(execution_id)
        if snapshot is None:
            raise errors.NotFound("execution", execution_id=execution_id)
        return snapshot.total_attempt_count

    async def read_current_attempt_index(self, execution_id: str) -> int:
        """The number of the current attempt."""
        told = await self.transport.request("GET", execution_path(execution_id), allow_not_found=True)
        if told.status == 404:
            raise errors.NotFound("execution", execution_id=execution_id)
        return decode_as(told.body, executions.ExecutionInfoResponse).current_attempt_index

    async def read_kinds(self, execution_ids: Iterable[str]) -> dict[str, str]:
        """What kinds these executions are of; one that does not exist has none."""
        wanted = list(execution_ids)
        asked = (self.transport.request("GET", execution_path(one), allow_not_found=True) for one in wanted)
        told = zip(wanted, await asyncio.gather(*asked), strict=True)
        return {
            one: decode_as(answer.body, executions.ExecutionInfoResponse).execution_kind
            for one, answer in told
            if answer.status != 404
        }

    async def read_state_vector(self, execution_id: str) -> StateVector | None:
        """The seven dimensions."""
        told = await self.transport.request("GET", execution_path(execution_id), allow_not_found=True)
        if told.status == 404:
            return None
        return msgspec.convert(decode_as(told.body, executions.ExecutionInfoResponse).state_vector, StateVector)

    async def lease_history(self, execution_id: str) -> list[HistoryEntry]:
        """What happened to the leases of an execution, oldest first."""
        return decode_as(
            (await self.transport.request("GET", execution_path(execution_id, "leases"))).body, list[HistoryEntry]
        )

    async def attempt_history(self, execution_id: str) -> list[AttemptView]:
        """Every attempt so far."""
        return decode_as(
            (await self.transport.request("GET", execution_path(execution_id, "attempts"))).body, list[AttemptView]
        )

    async def read_progress(self, execution_id: str) -> tuple[int | None, str | None]:
        """What the holder last said of its progress."""
        told = await self.transport.request("GET", execution_path(execution_id, "progress"))
        said = decode_as(told.body, executions.ReadProgressResponse)
        return said.pct, said.message

    async def explain(self, execution_id: str) -> Explanation:
        """Why it is not running."""
        told = await self.transport.request("GET", execution_path(execution_id, "explain"))
        found = decode_as(told.body, executions.ExplanationResponse)
        kind = {variant_name(kind): kind for kind in obstacles.Obstacle.__subclasses__()}[found.obstacle]
        return Explanation(found.execution_id, PublicState(found.public_state), msgspec.convert(found.facts, kind))

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
        """Executions that meet every filter, by id."""
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
        """Executions whose id begins like this, within the namespaces of the token."""
        if namespaces is not None:
            raise errors.InvalidInput("namespaces: a server looks in those of the token")
        id_prefixes(prefix, self.partitions)  # refused here as it would be on a store
        query = {"prefix": prefix, "limit": limit}
        return decode_as((await self.transport.request("GET", "/v1/executions/ids", query=query)).body, IdMatches)

    # -- results --------------------------------------------------------------------------------------------------

    async def get_execution_result(self, execution_id: str) -> bytes | None:
        """The result's exact bytes; None until one is stored."""
        told = await self.transport.request("GET", execution_path(execution_id, "result"), allow_not_found=True)
        return None if told.status == 404 else told.body

    async def read_results(
        self, execution_ids: Sequence[str], *, namespace: str | None = None
    ) -> dict[str, bytes | None]:
        """The results of many; None for an execution that has none. One of another namespace is a conflict."""
        found: dict[str, bytes | None] = {}
        wanted = list(execution_ids)
        while wanted:
            asked, wanted = wanted[: executions.MAX_RESULTS], wanted[executions.MAX_RESULTS :]
            body: dict[str, Any] = {"execution_ids": asked}
            if namespace is not None:
                body["namespace"] = namespace
            told = await self.transport.request("POST", "/v1/executions/results", body)
            page = decode_as(told.body, executions.ReadResultsResponse)
            if not page.results:
                raise errors.StoreUnavailable("server: no results in its answer", backend=BACKEND)
            found |= page.results
            wanted = page.rest + wanted
        return found

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
        """Frames after a place, waited for; the end of the stream ends the wait."""
        if visibility != Visibility.ALL:
            raise errors.InvalidInput("visibility: a server tails everything or nothing")
        wait_ms = min(block_ms, streams.MAX_BLOCK_MS)
        query: dict[str, Any] = {
            "after": after,
            "block_ms": wait_ms,
            "limit": min(count_limit, streams.MAX_FRAMES_PER_READ),
        }
        path = execution_path(execution_id, "attempts", str(attempt_index), "stream", "tail")
        told = decode_as(
            (await self.transport.request("GET", path, query=query, wait_ms=wait_ms)).body, streams.ReadStreamResponse
        )
        return StreamPage(
            [FrameView(frame.id, frame.fields) for frame in told.frames],
            None if told.closed_at is msgspec.UNSET else told.closed_at,
            None if told.closed_reason is msgspec.UNSET else told.closed_reason,
        )
