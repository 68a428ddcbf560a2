"""Debounce and batch: many submits are one run, which starts when they pause, or when there are enough of them.

python examples/debounced_index.py
"""

from __future__ import annotations

import asyncio

from stage import say, store, working

from flowfabric import Fabric, Key

app = Fabric(store())


@app.task(key=Key.debounce("user", "500ms", latest="1m"))
async def reindex(user: str, version: int) -> str:
    return f"{user} is indexed once, at version {version}"


@app.task(key=Key.batch(lambda text: "all", most=3, within="10s"))
async def embed(texts: list[str]) -> list[int]:
    say(f"one call for {', '.join(texts)}")
    return [len(text) for text in texts]


async def main() -> None:
    async with working(app):
        runs = [await reindex.submit("ana", version) for version in range(1, 6)]
        say(f"{len(runs)} submits, {len({run.id for run in runs})} run")
        say(await runs[0].result(timeout=20))
        texts = ("one", "three", "eleven")
        parts = [await embed.submit(text) for text in texts]
        for text, part in zip(texts, parts, strict=True):
            say(f"{text}: {await part.result(timeout=20)}")


if __name__ == "__main__":
    asyncio.run(main())
