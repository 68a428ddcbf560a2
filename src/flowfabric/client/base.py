"""What every part of the engine elsewhere stands on."""

from __future__ import annotations

from flowfabric.client.transport import Wire, segment
from flowfabric.clock import Estimate
from flowfabric.ids import Minter, PartitionCounts, parse_execution_id
from flowfabric.settings import Settings


class Asking:
    """A server to be asked, and what is known of its store."""

    wire: Wire
    minter: Minter
    partitions: PartitionCounts
    estimate: Estimate
    settings: Settings


def execution_path(execution_id: str, *rest: str) -> str:
    """The path of an execution, or of something below it."""
    return "/".join(("/v1/executions", segment(parse_execution_id(execution_id)), *rest))
