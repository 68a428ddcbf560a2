"""The base of the parts of a context: what each of them uses of the attempt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.handles import Handle
    from flowfabric.sdk.durable.attempt import DurableAttempt
    from flowfabric.sdk.fabric import Fabric


class ContextPart(ABC):
    """A part of a context."""

    app: Fabric
    engine: EngineAPI
    run_id: str
    origin: str

    @property
    @abstractmethod
    def handle(self) -> Handle:
        """The handle of the lease under which this attempt runs."""

    @property
    @abstractmethod
    def durable(self) -> DurableAttempt:
        """The replay state of this attempt."""
