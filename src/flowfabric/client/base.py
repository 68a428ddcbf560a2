"""What every part of the engine elsewhere stands on."""

from __future__ import annotations

from flowfabric.client.transport import HttpTransport, quote_segment
from flowfabric.clock import StoreClockEstimate
from flowfabric.ids import Minter, PartitionCounts, parse_execution_id
from flowfabric.settings import Settings


class ClientBase:
    """A server to be asked, and what is known of its store."""

    transport: HttpTransport
    minter: Minter
    partitions: PartitionCounts
    estimate: StoreClockEstimate
    settings: Settings


def execution_path(execution_id: str, *rest: str) -> str:
    """The path of an execution, or of something below it."""
    return "/".join(("/v1/executions", quote_segment(parse_execution_id(execution_id)), *rest))
