"""Bulk operations over HTTP."""

from __future__ import annotations

from typing import Any

from flowfabric.client.base import ClientBase
from flowfabric.client.transport import quote_segment
from flowfabric.engine.operations.bulk import DEFAULT_CEILING, BulkPage, BulkPreview
from flowfabric.engine.types import BulkStatus
from flowfabric.ids import parse_uuid
from flowfabric.model.bulk_operation import BulkVerb


class ClientBulk(ClientBase):
    """Operations on many executions at once."""

    async def preview_operation(self, verb: BulkVerb | str, criteria: dict[str, Any]) -> BulkPreview:
        body = {"verb": verb, "criteria": criteria}
        return await self.transport.fetch(BulkPreview, "POST", "/v1/operations/preview", body)

    async def start_operation(
        self,
        verb: BulkVerb | str,
        criteria: dict[str, Any],
        *,
        reason: str,
        ceiling: int = DEFAULT_CEILING,
        priority: int | None = None,
        requested_by: str = "",
        operation_id: str | None = None,
    ) -> BulkStatus:
        body = {
            "verb": verb,
            "criteria": criteria,
            "reason": reason,
            "ceiling": ceiling,
            "priority": priority,
            "requested_by": requested_by,
            "operation_id": operation_id or self.minter.uuid(),  # a request that is sent again starts nothing new
        }
        return await self.transport.fetch(BulkStatus, "POST", "/v1/operations", body)

    async def read_operation(self, operation_id: str) -> BulkStatus:
        return await self.transport.fetch(BulkStatus, "GET", _operation_path(operation_id))

    async def list_operations(self, *, cursor: str | None = None, limit: int = 50) -> BulkPage:
        query = {"cursor": cursor, "limit": limit}
        return await self.transport.fetch(BulkPage, "GET", "/v1/operations", query=query)

    async def cancel_operation(self, operation_id: str) -> BulkStatus:
        path = f"{_operation_path(operation_id)}/cancel"
        return await self.transport.fetch(BulkStatus, "POST", path)


def _operation_path(operation_id: str) -> str:
    return f"/v1/operations/{quote_segment(parse_uuid(operation_id, 'operation_id'))}"
