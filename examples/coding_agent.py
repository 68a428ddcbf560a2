"""An agent writes code, runs the tests, and asks a person; the review is the input of the next round.

Each model call and each test run is a step: after a crash none of them is paid for twice.

    python examples/coding_agent.py
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from stage import reached, say, store, working

from flowfabric import Context, Fabric, current

app = Fabric(store())


@dataclass
class Patch:
    code: str
    round: int


@dataclass
class Review:
    verdict: str  # "merge", "change" or "stop"
    comment: str = ""


async def write_code(task: str, wishes: list[str], number: int) -> Patch:
    """Act as a model whose first answer is wrong."""
    await asyncio.sleep(0.05)
    body = "return a + b" if number > 0 else "return a - b"
    doc = '    """Add two numbers."""\n' if any("docstring" in wish for wish in wishes) else ""
    return Patch(f"def add(a, b):\n{doc}    {body}\n", number)


async def run_tests(patch: Patch) -> str:
    """Test the patch; return the failure, or an empty text if all is well."""
    names: dict[str, object] = {}
    exec(patch.code, names)
    got = names["add"](2, 2)  # type: ignore[operator]
    return "" if got == 4 else f"add(2, 2) is {got}, not 4"


async def note(line: str) -> None:
    """Write to the log in a step, so that it happens once: the function runs again from the top after every wait."""
    await current().stream("log").write(line)


@app.task
async def agent(ctx: Context, task: str) -> str:
    wishes: list[str] = []
    for number in range(10):
        patch = await ctx.step(write_code, task, wishes, number)
        failure = await ctx.step(run_tests, patch)
        await ctx.step(note, f"round {number + 1}: {failure or 'tests pass'}\n")
        if failure:
            wishes = [*wishes, failure]
            continue
        await ctx.progress({"pct": 90, "phase": "review", "code": patch.code})
        review = await ctx.receive("review", Review, timeout="2d")  # no slot is held while the person reads
        if review is None or review.verdict == "stop":
            return "abandoned"
        if review.verdict == "merge":
            return patch.code
        wishes = [*wishes, review.comment]
    return "too many rounds"


async def main() -> None:
    async with working(app):
        run = await agent.submit("write add(a, b)")
        for review in (Review("change", "please add a docstring"), Review("merge")):
            await reached(run, "suspended")
            say("the agent waits for a review; the reviewer says:", review.verdict, review.comment)
            await run.signal("review", review)
        say("merged:\n" + await run.result(timeout=20))
        async for frame in run.stream("log"):
            say("log:", getattr(frame, "text", "").strip())


if __name__ == "__main__":
    asyncio.run(main())
