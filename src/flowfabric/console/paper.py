"""Templates and static files. Templates escape by default and are compiled at their first use.

A digest in the name of a static file makes it immutable.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from flowfabric.console import charts, show
from flowfabric.keyed_create import key_of
from flowfabric.server.errors import not_found
from flowfabric.server.request import Request
from flowfabric.server.routing import HTML, Response, RouteGroup

routes = RouteGroup("static files", is_documented=False)

STATIC_PATH = "/ui/static"

CONTENT_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
IMMUTABLE = (("cache-control", "public, max-age=31536000, immutable"), ("x-content-type-options", "nosniff"))


@cache
def hashed_names() -> dict[str, str]:
    """Return the public name of each file: `console.css` is served as `console.<digest>.css`."""
    return {name: _hashed(name, content) for name, content in _contents().items()}


def asset(public_name: str) -> Response:
    """Return a file by its public name; raise 404 for any other, also for one of another release."""
    for name, hashed in hashed_names().items():
        if hashed == public_name:
            return Response(200, _contents()[name], CONTENT_TYPES[name.rpartition(".")[2]], IMMUTABLE)
    raise not_found("there is no such file")


@routes.get("/ui/static/{name}", {200: HTML}, scope=None)
async def static_file(request: Request[None]) -> Response:
    """Return a static file."""
    return asset(request.path_params[0])


@cache
def _contents() -> dict[str, bytes]:
    folder = files(__package__) / "static"
    return {
        entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.rpartition(".")[2] in CONTENT_TYPES
    }


def _hashed(name: str, content: bytes) -> str:
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.{hashlib.sha256(content).hexdigest()[:12]}.{suffix}"


@cache
def templates() -> jinja2.Environment:
    """Return the templates of the console."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flowfabric.console"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(show.FILTERS)
    environment.globals.update(spark=charts.spark, gauge=charts.gauge, is_link=show.is_link, key_of=key_of)
    return environment


def static_url(mount_path: str, name: str) -> str:
    """Return the URL of a static file."""
    return f"{mount_path}{STATIC_PATH}/{hashed_names()[name]}"


def render(mount_path: str, template: str, **values: Any) -> bytes:
    """Render a page that stands alone, such as the one behind the link of an approval."""
    return (
        templates().get_template(template).render(static=lambda name: static_url(mount_path, name), **values).encode()
    )
