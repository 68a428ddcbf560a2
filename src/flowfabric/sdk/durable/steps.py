"""Steps: their identity (name and occurrence), the digest of their input, and the encoding of their result."""

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
    """A step of a durable function, identified by name and occurrence; the digest of its input detects changes."""

    label: str
    name: str
    occurrence: int
    digest: str
    codec: ValueCodec
    memo: StepMemo | None = None

    @property
    def fault_point(self) -> str:
        """The name of the step in a test's fault injection."""
        return f"step:{self.label}"

    @property
    def is_recorded(self) -> bool:
        """True if the step has a recorded result."""
        return self.memo is not None

    def with_memo(self, memo: StepMemo) -> StepCall:
        """Return the step with its recorded result."""
        return msgspec.structs.replace(self, memo=memo)

    def encode(self, value: Any) -> bytes:
        """Encode the step's result for the store."""
        return self.codec.to_json(value, self.label)

    def result(self) -> Any:
        """Decode the recorded result."""
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
    """Number the step at this point of the function; with `key` it needs no number."""
    if not callable(function):
        raise InvalidInput(f"step: {function!r} is no function; write ctx.step(function, argument), without a call")
    label = str(key or name or getattr(function, "__name__", "step"))
    full_name, occurrence = (f"key:{key}", 0) if key else durable.next_occurrence(label)
    codec = _result_codec(getattr(function, "handler", function))
    return StepCall(label, full_name, occurrence, _input_digest(args, kwargs), codec)


def step_function(function: Any, context: Context) -> Any:
    """Return what a step calls: the function, the handler if it is a task, or the stub that a test put in its place."""
    stubs = context.app.stubs
    if stubs and isinstance(function, Hashable) and function in stubs:
        return stubs[function]
    handler = getattr(function, "handler", function)
    if handler is function or function.signature.context_name is None:
        return handler

    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound: dict[str, Any] = function.with_context(function.signature.bind(args, kwargs), lambda: context)
        return bound

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await handler(**arguments(args, kwargs))

    return call_async if function.is_async else lambda *args, **kwargs: handler(**arguments(args, kwargs))


async def run_step(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a step's function; a plain function runs in a thread, so that it cannot block the loop."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await asyncio.to_thread(call_future_safe, function, *args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def _input_digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        builtins = msgspec.to_builtins(_without_tokens([args, kwargs]), str_keys=True, enc_hook=_to_plain)
        encoded = msgspec.json.encode(builtins)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"step: its input has no digest: {error}") from error
    return hashlib.sha256(encoded).hexdigest()[:32]


def _without_tokens(value: Any) -> Any:
    """Replace approval links by their paths: their tokens change when a signing key is rotated."""
    match value:
        case ApprovalLink():
            return value.path
        case list() | tuple():
            return [_without_tokens(item) for item in value]
        case dict():
            return {key: _without_tokens(item) for key, item in value.items()}
        case _:
            return value


def _to_plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if callable(value):
        return getattr(value, "__qualname__", repr(type(value)))
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _result_codec(function: Any) -> ValueCodec:
    try:
        return _cached_result_codec(function)
    except TypeError:  # a callable that is not hashable
        return ValueCodec(_result_type(function))


@lru_cache(maxsize=1000)
def _cached_result_codec(function: Any) -> ValueCodec:
    return ValueCodec(_result_type(function))


def _result_type(function: Any) -> Any:
    try:
        return typing.get_type_hints(function).get("return", Any)
    except (TypeError, NameError):
        return Any
