"""A flow with a fixed graph: probe a film, encode and caption it in parallel, mirror it and publish it.

A node as an argument is an edge, and passes the node's result. The whole graph is submitted in one call.

    python examples/media_pipeline.py
"""

from __future__ import annotations

import asyncio
import hashlib

from stage import say, store, working

from flowfabric import AnyOf, Fabric, Flow, Quorum
from flowfabric.sdk.flows import Node

app = Fabric(store())


@app.task
async def probe(file: str) -> dict[str, int]:
    say(f"probe {file}")
    return {"seconds": 5, "height": 2160}


@app.task(lane="gpu")
def encode(source: dict[str, int], height: int) -> str:
    """CPU work in a plain function: it runs in a thread, or in a process with isolation="process"."""
    digest = hashlib.sha256(repr((source, height)).encode() * 1000).hexdigest()[:6]
    say(f"encoded {height}p")
    return f"{height}p-{digest}"


@app.task
async def mirror(rendition: str, site: str) -> str:
    if site == "down":
        raise ConnectionError("no route to the mirror")
    await asyncio.sleep(0.05)
    return f"{site}:{rendition.partition('-')[0]}"


@app.task
async def captions(source: dict[str, int]) -> str:
    return f"{source['seconds']} captions"


@app.task
async def publish(renditions: list[str], subtitles: str) -> str:
    return f"published {len(renditions)} renditions with {subtitles}"


@app.task
async def announce(copies: list[str | None]) -> str:
    return "on " + " and ".join(sorted(copy for copy in copies if copy))


@app.task
async def alert() -> str:
    say("alert: something failed")
    return "notified the operators"


def film(file: str) -> tuple[Flow, dict[str, Node[str]]]:
    """Build the graph; return it with its last nodes by name."""
    flow = app.flow("film")
    source = flow.add(probe, file)
    renditions = [flow.add(encode, source, height) for height in (480, 1080, 2160)]
    published = flow.add(publish, renditions, flow.add(captions, source))  # all of them have to succeed
    copies = [flow.add(mirror, renditions[0], site) for site in ("east", "west", "down")]
    announced = flow.add(announce, copies, join=Quorum(2))  # two of three copies are enough
    alerted = flow.add(alert, join=AnyOf(*(copy.failed for copy in copies)))
    return flow, {"published": published, "announced": announced, "alerted": alerted}


async def main() -> None:
    flow, ends = film("holiday.mov")
    shape = flow.graph()
    say(f"{len(shape.nodes)} nodes, {len(shape.edges)} edges")
    async with working(app):
        run = await flow.submit(key="holiday.mov")  # submitting the same film again returns the same flow
        for what, node in ends.items():
            say(f"{what}: {await run[node].result(timeout=20)}")
        say("all of it:", await run.result(timeout=20))  # a failure that a node handles does not fail the flow
        states = [state.value for state in (await run.states()).values()]
        say(f"{states.count('completed')} completed, {states.count('failed')} failed")


if __name__ == "__main__":
    asyncio.run(main())
