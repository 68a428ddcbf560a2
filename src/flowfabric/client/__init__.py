"""An engine elsewhere: the verbs that applications and workers live on, asked of a server over HTTP."""

from flowfabric.client.engine import RemoteEngine

__all__ = ["RemoteEngine"]
