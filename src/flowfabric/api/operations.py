"""Schemas of bulk operations."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from flowfabric.api.encoding import I32, Natural, RequestBody
from flowfabric.model.bulk_operation import BulkVerb

DEFAULT_CEILING = 10_000


class BulkCriteria(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The filters of a search; an execution has to match all that are given."""

    namespace: str | None = None
    kind: str | None = None
    public_state: list[str] | str | None = None
    lane_id: str | None = None
    tag: Annotated[list[str], Meta(min_length=2, max_length=2)] | None = None
    flow_id: str | None = None
    parent_id: str | None = None
    worker_instance_id: str | None = None
    error: str | None = None
    created_from: Natural | None = None
    created_before: Natural | None = None

    def given(self) -> dict[str, Any]:
        """Return the filters that are set."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


class PreviewOperationRequest(RequestBody, frozen=True):
    verb: BulkVerb
    criteria: BulkCriteria


class StartOperationRequest(RequestBody, frozen=True):
    """A bulk operation; the same request again under the same `operation_id` changes nothing."""

    verb: BulkVerb
    criteria: BulkCriteria
    reason: str
    ceiling: Natural = DEFAULT_CEILING
    priority: I32 | None = None
    requested_by: str = ""
    operation_id: str | None = None
    uuid_fields: ClassVar = ("operation_id",)
