"""Steps: how one is told apart from others, and what it returned."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import typing
from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.errors import InvalidInput
from flowfabric.model.gate import StepMemo
from flowfabric.sdk.approvals import ApprovalLink
from flowfabric.sdk.serialization.values import ValueCodec
from flowfabric.sdk.worker.threads import call_future_safe

if TYPE_CHECKING:
    from flowfabric.sdk.context import Context
    from flowfabric.sdk.durable.attempt import DurableAttempt


class StepCall(msgspec.Struct, frozen=True):
    """One step of a durable function: by name and occurrence, with a digest of its input as a check."""

    label: str
    name: str
    occurrence: int
    digest: str
    codec: ValueCodec
    memo: StepMemo | None = None

    @property
    def fault_point(self) -> str:
        """How a test names it."""
        return f"step:{self.label}"

    @property
    def is_recorded(self) -> bool:
        """Whether it ran before."""
        return self.memo is not None

    def with_memo(self, memo: StepMemo) -> StepCall:
        """The step with what it returned."""
        return msgspec.structs.replace(self, memo=memo)

    def encode(self, value: Any) -> bytes:
        """What it returned, on its way into the store."""
        return self.codec.to_json(value, self.label)

    def result(self) -> Any:
        """What it returned."""
        assert self.memo is not None
        return self.codec.from_json(self.memo.result, self.label)


def identify_step(
    durable: DurableAttempt,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str | None,
    key: str | None,
) -> StepCall:
    """The step that this call is, at the place where it stands."""
    if not callable(function):
        raise InvalidInput(f"step: {function!r} is no function; write ctx.step(function, argument), without a call")
    label = str(key or name or getattr(function, "__name__", "step"))
    known, occurrence = (f"key:{key}", 0) if key else durable.next_occurrence(label)
    return StepCall(label, known, occurrence, _digest(args, kwargs), _shape_of(getattr(function, "handler", function)))


def step_function(function: Any, context: Context) -> Any:
    """What a step really calls: the function, the handler of a task that is used as one, or a test's stub for it."""
    stubs = context.app.stubs
    if stubs and isinstance(function, Hashable) and function in stubs:
        return stubs[function]
    handler = getattr(function, "handler", function)
    if handler is function or function.signature.context_name is None:
        return handler

    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        given: dict[str, Any] = function.with_context(function.signature.bound(args, kwargs), lambda: context)
        return given

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return await handler(**arguments(args, kwargs))

    return awaited if function.is_async else lambda *args, **kwargs: handler(**arguments(args, kwargs))


async def run_step(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call it; a plain function runs in a thread, so that it cannot block the loop."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await asyncio.to_thread(call_future_safe, function, *args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def _digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        plain = msgspec.json.encode(msgspec.to_builtins(_placed([args, kwargs]), str_keys=True, enc_hook=_plain))
    except (TypeError, ValueError, RecursionError) as fault:
        raise InvalidInput(f"step: its input cannot be told apart from others: {fault}") from fault
    return hashlib.sha256(plain).hexdigest()[:32]


def _placed(value: Any) -> Any:
    """Links by where they lead: their tokens come and go."""
    match value:
        case ApprovalLink():
            return value.path
        case list() | tuple():
            return [_placed(item) for item in value]
        case dict():
            return {key: _placed(item) for key, item in value.items()}
        case _:
            return value


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if callable(value):
        return getattr(value, "__qualname__", repr(type(value)))
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _shape_of(function: Any) -> ValueCodec:
    try:
        return _known_shape(function)
    except TypeError:  # something callable that cannot be remembered
        return ValueCodec(_result_of(function))


@lru_cache(maxsize=1000)
def _known_shape(function: Any) -> ValueCodec:
    return ValueCodec(_result_of(function))


def _result_of(function: Any) -> Any:
    try:
        return typing.get_type_hints(function).get("return", Any)
    except (TypeError, NameError):
        return Any
