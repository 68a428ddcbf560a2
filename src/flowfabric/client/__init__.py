"""The client: an engine whose operations are requests to a server."""

from flowfabric.client.engine import RemoteEngine

__all__ = ["RemoteEngine"]
