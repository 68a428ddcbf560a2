"""The REST server: the engine's verbs over HTTP, safe to expose."""

from flowfabric.server.app import App, create_app
from flowfabric.server.settings import ConfigError, ServerSettings

__all__ = ["App", "ConfigError", "ServerSettings", "create_app"]
