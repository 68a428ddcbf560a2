"""A web service that submits and streams: POST a question, read the answer while it is written or later.

`uvicorn fastapi_app:web` runs the service, `ff worker fastapi_app:app` a worker; any number of each may run. As a
script, this file runs both on a free port, and a client:

    python examples/fastapi_app.py
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from stage import say, store, working

from flowfabric import Context, Fabric, FabricError

app = Fabric(store())


class Question(BaseModel):
    text: str
    words: int = 6


@app.task
async def answer(ctx: Context, question: Question) -> str:
    out = ctx.stream("answer")
    for number in range(question.words):
        await asyncio.sleep(0.05)
        await out.write(f"word-{number + 1} ")
    return out.text().strip()


@asynccontextmanager
async def app_lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with app:
        yield


web = FastAPI(lifespan=app_lifespan)


@web.post("/questions", status_code=202)
async def submit(question: Question) -> dict[str, str]:
    run = await answer.submit(question)
    return {"id": run.id}


@web.get("/questions/{run_id}")
async def state(run_id: str) -> dict[str, str]:
    try:
        return {"state": (await answer.run(run_id).state()).value}
    except FabricError as unknown:
        raise HTTPException(404, str(unknown)) from unknown


@web.get("/questions/{run_id}/stream")
async def stream(run_id: str) -> StreamingResponse:
    """Stream server-sent events; late readers get everything from the beginning."""

    async def events() -> AsyncIterator[str]:
        async for frame in answer.run(run_id).stream("answer"):
            yield f"data: {json.dumps(getattr(frame, 'text', None))}\n\n"
        yield f"event: end\ndata: {json.dumps(await answer.run(run_id).result())}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free.listen()
        # The worker already keeps the app open, so the lifespan is off.
        server = uvicorn.Server(uvicorn.Config(web, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[free]))
        async with working(app), httpx2.AsyncClient(base_url=f"http://127.0.0.1:{free.getsockname()[1]}") as browser:
            refused = await browser.post("/questions", json={"words": 3})
            say("a question without a text is refused with", refused.status_code)
            run_id = (await browser.post("/questions", json={"text": "what is durable?"})).json()["id"]
            say("submitted as", run_id)
            async with browser.stream("GET", f"/questions/{run_id}/stream") as events:
                async for line in events.aiter_lines():
                    if line:
                        say(line)
            say("asked again later:", (await browser.get(f"/questions/{run_id}")).json()["state"])
            server.should_exit = True
            await serving


if __name__ == "__main__":
    asyncio.run(main())
