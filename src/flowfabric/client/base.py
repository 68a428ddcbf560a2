"""The base of all parts of the remote engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.client.transport import HttpTransport, quote_segment
from flowfabric.clock import StoreClockEstimate
from flowfabric.ids import Minter, PartitionCounts, parse_execution_id
from flowfabric.settings import Settings


class ClientBase:
    """The transport to a server, and what is known of its store."""

    transport: HttpTransport
    minter: Minter
    partitions: PartitionCounts
    estimate: StoreClockEstimate
    settings: Settings


def refuse_namespaces(namespaces: Sequence[str] | None) -> None:
    """Raise InvalidInput if a caller names namespaces to search: those of the token are searched."""
    if namespaces is not None:
        raise errors.InvalidInput("namespaces: a server searches those of the token")


def execution_path(execution_id: str, *rest: str) -> str:
    """Return the path of an execution, or of a resource below it."""
    return "/".join(("/v1/executions", quote_segment(parse_execution_id(execution_id)), *rest))


def fields_except(args: msgspec.Struct, *names: str) -> dict[str, Any]:
    """Return the fields of a record of arguments without those that are sent in another form, or not at all."""
    return {name: getattr(args, name) for name in args.__struct_fields__ if name not in names}
