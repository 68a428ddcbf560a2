"""Schedules over HTTP."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric.api.schedules import PutScheduleResponse, RetiredSchedulesResponse, ScheduleChangedResponse
from flowfabric.client.base import ClientBase, refuse_namespaces
from flowfabric.client.decoding import decode_variant
from flowfabric.client.executions import encode_create
from flowfabric.client.transport import quote_segment
from flowfabric.engine.schedules.operator import SchedulePage
from flowfabric.engine.types import Backfilled, CreateExecution, PutOutcome, ScheduleDescription
from flowfabric.engine.validation.schedule import validate_schedule_name
from flowfabric.model.answers import execution as answers
from flowfabric.model.scheduling.schedule import Overlap, ScheduleSpec


class ClientSchedules(ClientBase):
    """Operations on schedules."""

    async def put_schedule(
        self,
        name: str,
        spec: ScheduleSpec,
        run: CreateExecution,
        *,
        owner: str | None = None,
        only_new: bool = False,
    ) -> PutOutcome:
        body = {"spec": msgspec.to_builtins(spec), "run": encode_create(run), "owner": owner, "only_new": only_new}
        return (await self.transport.fetch(PutScheduleResponse, "PUT", _path(name), body)).outcome

    async def list_schedules(
        self,
        *,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> SchedulePage:
        refuse_namespaces(namespaces)
        query = {"namespace": namespace, "cursor": cursor, "limit": limit}
        return await self.transport.fetch(SchedulePage, "GET", "/v1/schedules", query=query)

    async def describe_schedule(self, name: str, *, namespace: str = "default") -> ScheduleDescription:
        return await self.transport.fetch(ScheduleDescription, "GET", _path(name), query={"namespace": namespace})

    async def pause_schedule(self, name: str, *, note: str = "", namespace: str = "default") -> bool:
        return await self._change("POST", _path(name, "pause"), namespace, {"note": note})

    async def resume_schedule(self, name: str, *, namespace: str = "default") -> bool:
        return await self._change("POST", _path(name, "resume"), namespace)

    async def trigger_schedule(
        self, name: str, *, trigger_id: str | None = None, namespace: str = "default"
    ) -> answers.Created | answers.Duplicate:
        body = {"trigger_id": trigger_id or self.minter.ordered_uuid()}  # sent again, it is the same run
        response = await self.transport.request("POST", _path(name, "trigger"), body, query={"namespace": namespace})
        return decode_variant(response.body, answers.Created, answers.Duplicate)

    async def backfill_schedule(
        self, name: str, start: int, end: int, *, overlap: Overlap | str = Overlap.QUEUE, namespace: str = "default"
    ) -> Backfilled:
        body, query = {"start": start, "end": end, "overlap": overlap}, {"namespace": namespace}
        return await self.transport.fetch(Backfilled, "POST", _path(name, "backfill"), body, query=query)

    async def delete_schedule(self, name: str, *, namespace: str = "default") -> bool:
        return await self._change("DELETE", _path(name), namespace)

    async def retire_schedules(
        self,
        owner: str,
        *,
        keep: Sequence[str],
        note: str = "",
        remove: bool = False,
        namespace: str = "default",
    ) -> list[str]:
        body = {"owner": owner, "keep": list(keep), "note": note, "remove": remove, "namespace": namespace}
        return (await self.transport.fetch(RetiredSchedulesResponse, "POST", "/v1/schedules/retire", body)).retired

    async def _change(self, method: str, path: str, namespace: str, body: object = None) -> bool:
        query = {"namespace": namespace}
        return (await self.transport.fetch(ScheduleChangedResponse, method, path, body, query=query)).changed


def _path(name: str, *rest: str) -> str:
    return "/".join(("/v1/schedules", quote_segment(validate_schedule_name(name)), *rest))
