"""Outcomes: the one word with which an attempt ends, wherever its handler ran."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec

from flowfabric.engine.engine import Engine
from flowfabric.errors import InvalidInput
from flowfabric.handles import Handle
from flowfabric.sdk.codec import json_bytes
from flowfabric.sdk.failing import BudgetExceeded, Fatal, RetryAfter
from flowfabric.sdk.task import Task

LONGEST_REASON = 8000


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It returned; the result as JSON."""

    result: bytes


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It raised."""

    reason: str
    category: str


class Later(msgspec.Struct, frozen=True, tag="later"):
    """It wants to go on after a while, as the same attempt."""

    after_ms: int


class Away(msgspec.Struct, frozen=True, tag="away"):
    """The run was put away, or the worker died on purpose: there is nothing to say any more."""


Outcome = Done | Failed | Later | Away
AWAY = Away()


def returned(task: Task[..., Any], value: Any) -> Outcome:
    """What a handler's value means; one that does not fit its annotation is a failure."""
    try:
        return Done(json_bytes(task.signature.result.dump(value, "result")))
    except InvalidInput as wrong:
        return raised(wrong)


def raised(failure: BaseException) -> Outcome:
    """What a handler's exception means."""
    match failure:
        case RetryAfter():
            return Later(failure.after_ms)
        case Fatal() | InvalidInput():
            return Failed(reason_of(failure), "permanent")
        case TimeoutError():
            return Failed(reason_of(failure), "timeout")
        case BudgetExceeded():
            return Failed(reason_of(failure), "budget_exceeded")
        case _:
            return Failed(reason_of(failure), type(failure).__name__)


async def tell(engine: Engine, handle: Handle, outcome: Outcome) -> None:
    """End the attempt with this word."""
    match outcome:
        case Done(result=result):
            await engine.complete(handle, result=result, encoding="json")
        case Failed(reason=reason, category=category):
            await engine.fail(handle, reason=reason, category=category)
        case Later(after_ms=after_ms):
            await engine.delay_for(handle, after_ms)
        case Away():
            pass


def reason_of(failure: BaseException) -> str:
    """The failure in a line, and where it happened."""
    line = f"{type(failure).__name__}: {failure}"
    where = "".join(traceback.format_tb(failure.__traceback__)[-3:])
    text = f"{line}\n{where}" if where else line
    return text.replace("\x00", "\\0").encode("utf-8", "backslashreplace")[:LONGEST_REASON].decode("utf-8", "ignore")
