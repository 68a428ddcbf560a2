"""Print the OpenAPI document: `python -m flowfabric.server > docs/openapi.json`."""

from __future__ import annotations

import sys

import msgspec

from flowfabric.server import openapi
from flowfabric.server.routes import ROUTE_GROUPS
from flowfabric.server.routing import Router


def render_document() -> str:
    """Return the document as indented JSON."""
    return (
        msgspec.json.format(msgspec.json.encode(openapi.build_document(Router(*ROUTE_GROUPS))), indent=2).decode()
        + "\n"
    )


if __name__ == "__main__":
    sys.stdout.write(render_document())
