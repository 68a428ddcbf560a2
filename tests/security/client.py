"""Sends a request to the ASGI application, with a bounded read of streaming responses."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlencode

import msgspec

from flowfabric.server import App

TIMEOUT_S = 20.0


class Request(msgspec.Struct, frozen=True):
    """A request without its token. `until` is the text that ends the reading of a feed."""

    method: str
    path: str
    query: dict[str, str] = {}
    body: Any = None
    until: str = ""

    @property
    def text(self) -> str:
        """The whole request as text."""
        return f"{self.path}?{self.query} {msgspec.json.encode(self.body).decode()}"


class Answer(msgspec.Struct, frozen=True):
    """A whole response, or the beginning of a streaming one."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The whole response as text, without the request id and the length."""
        shown = {name: value for name, value in self.headers.items() if name not in ("x-request-id", "content-length")}
        return f"{self.status} {shown} {self.body.decode('utf-8', 'replace')}"


async def send(app: App, request: Request, authorization: str | None = None) -> Answer:
    """Send a request; read a feed up to the text `until` of the request."""
    body = request.body if isinstance(request.body, bytes) else b""
    headers = [(b"host", b"localhost")]
    if request.body is not None and not isinstance(request.body, bytes):
        body = msgspec.json.encode(request.body)
        headers.append((b"content-type", b"application/json"))
    if authorization is not None:
        headers.append((b"authorization", authorization.encode()))
    scope = {
        "type": "http",
        "method": request.method,
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": urlencode(request.query).encode(),
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }
    status, received, parts = 0, dict[str, str](), list[bytes]()
    requested, enough = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not requested.is_set():
            requested.set()
            return {"type": "http.request", "body": body}
        await enough.wait()
        return {"type": "http.disconnect"}

    async def sent(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            received.update((name.decode(), value.decode("latin-1")) for name, value in message["headers"])
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))
            if request.until and request.until.encode() in b"".join(parts):
                enough.set()

    async with asyncio.timeout(TIMEOUT_S):
        await app(scope, receive, sent)
    return Answer(status, received, b"".join(parts))
