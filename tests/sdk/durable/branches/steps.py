"""Steps of the functions in these tests, and the effects that they had."""

from __future__ import annotations

import asyncio

effects: list[str] = []


async def pay(whom: str) -> str:
    effects.append(whom)
    return f"{whom} is paid"


async def check(ms: int = 50) -> None:
    await asyncio.sleep(ms / 1000)
