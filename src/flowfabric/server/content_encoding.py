"""Large answers to GET: an entity tag, so that a poll which finds nothing new gets 304, and gzip if it is accepted.

Small answers are not changed: the header would cost more than it saves. Neither are answers that must not be stored,
because they may hold a token, and what an attacker adds to a compressed answer can reveal the rest by its length.
"""

from __future__ import annotations

import gzip
import hashlib

from flowfabric.server.routing import Response

MIN_BYTES = 8 * 1024
GZIP_LEVEL = 3  # a graph of 10,000 nodes in about 10 ms, to a tenth of its size
COMPRESSED_TYPES = ("application/json", "text/html", "text/css", "text/javascript", "text/csv")


def encode_response(method: str, headers: dict[bytes, bytes], response: Response) -> Response:
    """Return the response with an entity tag and compressed, or 304, if it is a large one to GET or HEAD."""
    if method not in ("GET", "HEAD") or response.status != 200 or len(response.body) < MIN_BYTES:
        return response
    if not response.content_type.startswith(COMPRESSED_TYPES):
        return response
    names = {name for name, _ in response.headers}
    if {"content-encoding", "etag"} & names or ("cache-control", "no-store") in response.headers:
        return response
    tag = f'W/"{hashlib.sha256(response.body).hexdigest()[:32]}"'
    added = (*response.headers, ("etag", tag), ("vary", "accept-encoding"))
    if tag in _tags(headers.get(b"if-none-match", b"")):
        return Response(304, b"", "", added)
    if not _accepts_gzip(headers.get(b"accept-encoding", b"")):
        return Response(200, response.body, response.content_type, added)
    body = gzip.compress(response.body, GZIP_LEVEL, mtime=0)
    return Response(200, body, response.content_type, (*added, ("content-encoding", "gzip")))


def _tags(value: bytes) -> set[str]:
    return {tag.strip() for tag in value.decode("latin-1").split(",")}


def _accepts_gzip(value: bytes) -> bool:
    for part in value.decode("latin-1").lower().split(","):
        name, _, quality = part.strip().partition(";")
        if name.strip() in ("gzip", "*"):
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
