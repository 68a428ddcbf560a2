"""A browser without JavaScript: follows links, sends forms with their hidden fields, and keeps cookies."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlsplit

import httpx2

BASE = "http://127.0.0.1:9090"


class Form:
    """A form of a page: where it posts, and its fields with their values."""

    def __init__(self, action: str, method: str) -> None:
        self.action = action
        self.method = method
        self.fields: dict[str, str] = {}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.forms: list[Form] = []
        self.links: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag == "form":
            self.forms.append(Form(values.get("action") or "", values.get("method") or "get"))
        elif tag == "input" and self.forms and values.get("name") and values.get("type") == "hidden":
            self.forms[-1].fields[values["name"] or ""] = values.get("value") or ""
        elif tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")


class Visitor:
    """A visitor of one server, which runs in this process."""

    def __init__(self, app: Any, prefix: str = "") -> None:
        self.prefix = prefix
        self.client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url=BASE)
        self.client.headers["sec-fetch-site"] = "same-origin"

    async def get(self, path: str, **options: Any) -> httpx2.Response:
        return await self.client.get(f"{self.prefix}/ui{path}", **options)

    async def post(self, path: str, fields: dict[str, str], **options: Any) -> httpx2.Response:
        return await self.client.post(f"{self.prefix}/ui{path}", data=fields, **options)

    async def log_in(self, token: str, name: str = "") -> httpx2.Response:
        return await self.post("/login", {"token": token, "name": name})

    async def forms(self, path: str) -> list[Form]:
        """Return the forms of a page that post."""
        answer = await self.get(path)
        assert answer.status_code == 200, answer.text
        return [form for form in read(answer.text).forms if form.method == "post"]

    async def send(self, path: str, ending: str, **fields: str) -> httpx2.Response:
        """Send the form of a page whose action ends so, with these fields filled in."""
        form = next(form for form in await self.forms(path) if urlsplit(form.action).path.endswith(ending))
        return await self.client.post(form.action, data=form.fields | fields)


def read(html: str) -> _Reader:
    """Parse a page."""
    reader = _Reader()
    reader.feed(html)
    return reader
