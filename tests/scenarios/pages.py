"""All pages of a list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any


async def all_pages(listing: Callable[..., Awaitable[Any]], *, cursor: str | None = None, **asked: Any) -> list[Any]:
    """Return the pages of a list from a cursor to its end."""
    pages = [await listing(cursor=cursor, **asked)]
    while pages[-1].next_cursor is not None:
        pages.append(await listing(cursor=pages[-1].next_cursor, **asked))
    return pages
