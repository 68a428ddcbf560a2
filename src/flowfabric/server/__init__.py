"""The REST server: the operations of an engine over HTTP."""

from flowfabric.server.app import App, create_app
from flowfabric.server.settings import ConfigError, ServerSettings

__all__ = ["App", "ConfigError", "ServerSettings", "create_app"]
