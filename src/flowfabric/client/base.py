"""The base of all parts of the remote engine."""

from __future__ import annotations

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


def execution_path(execution_id: str, *rest: str) -> str:
    """Return the path of an execution, or of a resource below it."""
    return "/".join(("/v1/executions", quote_segment(parse_execution_id(execution_id)), *rest))
