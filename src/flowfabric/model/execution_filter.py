"""The filter of lists and bulk operations: which executions are meant."""

from __future__ import annotations

import msgspec

from flowfabric.model.states import PublicState


class ExecutionFilter(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Executions that meet every condition that is set."""

    namespaces: tuple[str, ...] | None = None  # None: all; a token may be bound to several
    kind: str | None = None  # the execution kind, which is the name of its task
    states: tuple[PublicState, ...] = ()  # any of these; empty: all
    lane_id: str | None = None
    tag: tuple[str, str] | None = None  # key and value
    flow_id: str | None = None
    parent_id: str | None = None
    worker_instance_id: str | None = None  # the worker that holds it, or that held it last
    error: str | None = None  # occurs in the reason of its failure, with the same letters in the same case
    created_from: int | None = None
    created_before: int | None = None
