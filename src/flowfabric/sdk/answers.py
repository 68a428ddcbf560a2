"""Messages to runs, and what runs answer: replies to messages, and the first value of a fact."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.engine.types import MessageArgs
from flowfabric.errors import FabricError, InvalidInput, StoreUnavailable, TargetNotSignalable
from flowfabric.model.gate import Fact, Reply, ReplyState
from flowfabric.sdk.exceptions import NotAnswered, Refused
from flowfabric.sdk.serialization.inputs import JSON_ENCODING
from flowfabric.sdk.serialization.values import json_bytes, to_plain

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.run import Run

MAX_POLL_MS = 30_000
PAUSE_S = 0.5  # pause before a question whose answer was lost is asked again


class Deadline:
    """The time left of a timeout, at most one poll; without a timeout there is always some."""

    def __init__(self, timeout_s: float | None, *, max_poll_ms: int = MAX_POLL_MS) -> None:
        self._clock = asyncio.get_running_loop().time
        self._until = None if timeout_s is None else self._clock() + timeout_s
        self._max_poll_ms = max_poll_ms

    @property
    def left_ms(self) -> int:
        if self._until is None:
            return self._max_poll_ms
        return min(max(0, round((self._until - self._clock()) * 1000)), self._max_poll_ms)


def make_message(
    engine: EngineAPI, app: Fabric, task: str, run_id: str, name: str, value: Any, key: str | None = None
) -> MessageArgs:
    """Return a message with an id of its own, sent by this process; one that the task does not take is refused."""
    declared = app.tasks.get(task)
    if declared is None or not declared.inbox:
        payload = json_bytes(to_plain(value))
    elif (codec := declared.inbox.get(name)) is not None:
        payload = codec.to_json(value, name)
    else:
        raise InvalidInput(f"{task} takes no {name!r}; its inbox has {', '.join(sorted(declared.inbox))}")
    return MessageArgs(
        execution_id=run_id,
        mailbox=name,
        message_id=engine.minter.uuid(),
        payload=payload,
        payload_encoding=JSON_ENCODING,
        sender=app.identity,
        idempotency_key=key,
    )


async def read_answer(engine: EngineAPI, message: MessageArgs, timeout_s: float | None, run: Run[Any]) -> Reply:
    """Ask, and return the answer. While the store is unavailable it is asked again under the same id."""
    deadline = Deadline(timeout_s)
    while True:
        try:
            reply = await engine.ask(message, max_wait_ms=deadline.left_ms)
        except TargetNotSignalable:
            raise await not_answered(engine, run) from None
        except StoreUnavailable:
            if not deadline.left_ms:
                raise
            await asyncio.sleep(min(PAUSE_S, deadline.left_ms / 1000))
            continue
        match reply.state:
            case ReplyState.ANSWERED:
                return reply
            case ReplyState.REFUSED:
                raise Refused(reply.reason or "")
            case ReplyState.NOT_ANSWERED:
                raise NotAnswered(run.id, reply.reason or "ended")
        if not deadline.left_ms:
            error = TimeoutError(f"{run.task} {run.id} has not answered {message.mailbox!r} within {timeout_s:g} s")
            error.add_note(f"{await _doing(engine, run)}; with key= the question can be asked again for its answer")
            raise error
        message = msgspec.structs.replace(message, message_id=reply.message_id)


async def not_answered(engine: EngineAPI, run: Run[Any]) -> NotAnswered:
    """Return the error of a question to a run that has ended."""
    ended = await engine.await_end(run.id)
    return NotAnswered(run.id, f"ended as {'done' if ended is None else ended.outcome.value}")


async def read_first(engine: EngineAPI, run: Run[Any], name: str, wait_s: float | None) -> Fact | None:
    """Return a fact, or wait for its first value; without a time to wait, None if there is none."""
    deadline = Deadline(wait_s or 0)
    while True:
        reading = await engine.read_fact(run.id, name, max_wait_ms=deadline.left_ms)
        if reading.fact is not None or wait_s is None:
            return reading.fact
        if reading.has_ended:
            raise TimeoutError(f"{run.task} {run.id} has set no {name!r}, and has ended")
        if not deadline.left_ms:
            doing = await _doing(engine, run)
            raise TimeoutError(f"{run.task} {run.id} has set no {name!r} within {wait_s:g} s; {doing}")


async def _doing(engine: EngineAPI, run: Run[Any]) -> str:
    """Say what the run does or waits for."""
    try:
        sentence = (await engine.explain(run.id)).sentence
    except FabricError:
        return f"`ff explain {run.id}` says what it waits for"
    return sentence[:1].lower() + sentence[1:].rstrip(".")
