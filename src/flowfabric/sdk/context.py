"""The context: what a handler knows of its run, and what it can do that survives."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import inspect
import random
import typing
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from flowfabric.errors import InvalidInput
from flowfabric.handles import Handle
from flowfabric.sdk.approvals import Link
from flowfabric.sdk.codec import Shape, from_json, json_bytes
from flowfabric.sdk.durable import Durable
from flowfabric.sdk.waiting import Waiting

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine
    from flowfabric.model.answers import Claimed
    from flowfabric.sdk.fabric import Fabric

T = TypeVar("T")

_current: contextvars.ContextVar[Context] = contextvars.ContextVar("flowfabric_context")


class Context(Waiting):
    """One attempt at one run, in the hands of a handler."""

    def __init__(self, app: Fabric, engine: Engine, claimed: Claimed, task: str, *, is_async: bool = True) -> None:
        self.app = app
        self.engine = engine
        self._claimed = claimed
        self._durable: Durable | None = None
        self.task = task
        self.root = asyncio.current_task() if is_async else None
        self.run_id = claimed.execution_id
        self.attempt = claimed.attempt_index
        self.random = random.Random(self.run_id)  # the same numbers in the same order on every attempt

    @property
    def handle(self) -> Handle:
        """The lease under which this attempt runs."""
        return self._claimed.handle

    @property
    def durable(self) -> Durable:
        """What earlier attempts left behind; read when first needed, so that plain tasks pay nothing for it."""
        if self._durable is None:
            self._durable = Durable(self.engine, self.handle, self.root)
        return self._durable

    @property
    def is_parked(self) -> bool:
        """Whether the run was put away: this attempt's handler is over, whatever it still does."""
        return self._durable is not None and self._durable.parked is not None

    def key(self, name: str) -> str:
        """An idempotency key for a call to the outside: the same on every attempt of this run."""
        return hashlib.sha256(f"{self.run_id}|{name}".encode()).hexdigest()

    # -- steps ----------------------------------------------------------------------------------------------------

    @overload
    async def step(
        self,
        function: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        name: str | None = None,
        key: str | None = None,
        **kwargs: Any,
    ) -> T: ...
    @overload
    async def step(
        self, function: Callable[..., T], /, *args: Any, name: str | None = None, key: str | None = None, **kwargs: Any
    ) -> T: ...
    async def step(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        name: str | None = None,
        key: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a function once: its result is remembered, and later attempts return it without running it.

        A step is known by its name (by default the function's) and how often that occurred in its branch; `key`
        names one explicitly, wherever it occurs.
        """
        label = str(key or name or getattr(function, "__name__", "step"))
        known, occurrence = (f"key:{key}", 0) if key else self.durable.place(label)
        digest = _digest(args, kwargs)
        shape = Shape(_result_of(function))
        memo = await self.durable.step_memo(known, occurrence, digest)
        if memo is None:
            await self._at(f"step:{label}", "before_effect")
            value = await _run(function, args, kwargs)
            await self._at(f"step:{label}", "after_effect")
            result = json_bytes(shape.dump(value, label))
            memo = await self.engine.record_step(self.handle, known, occurrence, result, encoding="json", digest=digest)
            await self._at(f"step:{label}", "after_commit")
        return shape.load(from_json(memo.result), label)

    async def _at(self, point: str, moment: str) -> None:
        if self.app.on_point is not None:
            await self.app.on_point(self, point, moment)

    async def now(self) -> int:
        """The time when this was first asked, in milliseconds since the epoch; the same on every attempt."""
        return await self.step(self._now, name="now")

    async def _now(self) -> int:
        return self.engine.estimate.now()

    def uuid(self) -> uuid.UUID:
        """A fresh id that is the same on every attempt."""
        name, occurrence = self.durable.place("uuid")
        return uuid.uuid5(uuid.NAMESPACE_OID, f"{self.run_id}|{name}|{occurrence}")

    # -- saying ---------------------------------------------------------------------------------------------------

    async def progress(self, done: dict[str, Any] | str | None = None, *, pct: int | None = None) -> None:
        """Say how far the work is: a percentage, a message, or both as `{"pct": 50, "phase": …}`."""
        message = done if isinstance(done, str) else None
        if isinstance(done, dict):
            pct = done.get("pct", pct)
            message = msgspec.json.encode(done).decode()
        await self.engine.progress(self.handle, pct=pct, message=message)

    def stream(self, name: str) -> Output:
        """The attempt's output of this name; readers see it while it is written."""
        return Output(self, name)


class Output:
    """What a handler writes while it works. Frames belong to the attempt: a retry begins anew."""

    def __init__(self, context: Context, name: str) -> None:
        self._context = context
        self._name = name
        self._written: list[str] = []

    async def write(self, piece: str | bytes | dict[str, Any] | Sequence[Any]) -> None:
        """Add a piece; refused for a worker that lost its lease."""
        if isinstance(piece, bytes):
            payload = piece
        elif isinstance(piece, str):
            payload = piece.encode()
        else:
            payload = json_bytes(piece)
        await self._context.engine.append_frame(self._context.handle, payload, frame_type=self._name)
        self._written.append(payload.decode("utf-8", "replace"))

    def text(self) -> str:
        """Everything that was written so far."""
        return "".join(self._written)


def current() -> Context:
    """The context of the handler that is running, from anywhere below it."""
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError("no handler of FlowFabric is running here") from None


def entered(context: Context) -> contextvars.Token[Context]:
    """Make a context the current one of this task or thread."""
    return _current.set(context)


def _digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        plain = json_bytes(msgspec.to_builtins(_placed([args, kwargs]), str_keys=True, enc_hook=_plain))
    except TypeError as fault:
        raise InvalidInput(f"step: its input cannot be told apart from others: {fault}") from fault
    return hashlib.sha256(plain).hexdigest()[:32]


def _placed(value: Any) -> Any:
    """Links by where they lead: their tokens come and go."""
    match value:
        case Link():
            return value.place
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


def _result_of(function: Any) -> Any:
    function = getattr(function, "handler", function)  # a task used as a step
    try:
        return typing.get_type_hints(function).get("return", Any)
    except (TypeError, NameError):
        return Any


async def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    function = getattr(function, "handler", function)
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await asyncio.to_thread(function, *args, **kwargs)
    return await value if inspect.isawaitable(value) else value
