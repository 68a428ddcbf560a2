"""Steps: their identity (name and occurrence), the digest of their input, and the encoding of their result."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import typing
import warnings
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from flowfabric.engine.validation.suspension import RESERVED_STEP_PREFIXES
from flowfabric.errors import InvalidInput
from flowfabric.sdk.approvals import ApprovalLink
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.exceptions import StepTimeout
from flowfabric.sdk.retry import Retry
from flowfabric.sdk.serialization.values import ValueCodec
from flowfabric.sdk.worker.threads import call_future_safe

if TYPE_CHECKING:
    from flowfabric.sdk.context import Context

logger = logging.getLogger("flowfabric.durable")


F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = "__flowfabric_step__"


class StepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a step is run: what it is called, how it is retried, and how long a try may take."""

    name: str | None = None
    key: str | None = None
    retry: Retry | None = None
    timeout: Duration | None = None
    at_most_once: bool | None = None

    def __post_init__(self) -> None:
        if self.retry is not None and not isinstance(self.retry, Retry):
            raise InvalidInput(f"retry: {self.retry!r} is no Retry; write retry=Retry(max=3)")
        if self.timeout is not None:
            to_ms(self.timeout, "timeout", minimum_ms=1)

    @property
    def timeout_s(self) -> float | None:
        """Seconds that a try may take."""
        return None if self.timeout is None else to_ms(self.timeout, "timeout") / 1000

    def over(self, other: StepOptions) -> StepOptions:
        """Return these options, with those of another in place of the ones that are not given."""
        given = {field: value for field in self.__struct_fields__ if (value := getattr(self, field)) is not None}
        return msgspec.structs.replace(other, **given)


DEFAULTS = StepOptions()


def step(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    at_most_once: bool | None = None,
) -> Callable[[F], F]:
    """Say where a function is defined how it is run as a step. The function itself stays as it is.

        @step(retry=Retry(max=5), timeout="10s")
        async def charge(card: str, cents: int) -> Receipt: ...

    `ctx.options(…)` takes precedence over it.
    """
    options = StepOptions(name=name, retry=retry, timeout=timeout, at_most_once=at_most_once)

    def decorate(function: F) -> F:
        setattr(function, _OPTIONS, options)
        return function

    return decorate


def options_of(function: object, given: StepOptions) -> StepOptions:
    """Return the options of a call: those given, and for the rest those of the function."""
    own = getattr(function, _OPTIONS, None)
    return given if own is None else given.over(own)


def named_in_call(kwargs: dict[str, Any]) -> StepOptions:
    """Take `name` and `key` out of the arguments of `ctx.step`, where they were given in earlier releases."""
    if "name" not in kwargs and "key" not in kwargs:
        return DEFAULTS
    warnings.warn(
        "name= and key= in ctx.step are going to be arguments of the function; write ctx.options(name=…).step(…)",
        DeprecationWarning,
        stacklevel=3,
    )
    return StepOptions(name=kwargs.pop("name", None), key=kwargs.pop("key", None))


class StepCall(msgspec.Struct, frozen=True):
    """A step of a durable function, identified by name and occurrence; the digest of its input detects changes."""

    label: str
    name: str
    occurrence: int
    digest: str
    codec: ValueCodec

    @property
    def place(self) -> tuple[str, int]:
        """Its qualified name, and how often that name occurred before."""
        return self.name, self.occurrence

    @property
    def fault_point(self) -> str:
        """The name of the step in a test's fault injection."""
        return f"step:{self.label}"

    def encode(self, value: Any) -> bytes:
        """Encode the step's result for the store."""
        return self.codec.to_json(value, self.label)

    def decode(self, result: bytes) -> Any:
        """Decode a recorded result."""
        return self.codec.from_json(result, self.label)


class NumbersNames(Protocol):
    """Numbers the operations of a function by name."""

    def next_place(self, label: str) -> tuple[str, int]:
        """Return the qualified name for a label, and how often that name occurred before."""


def identify_step(
    durable: NumbersNames, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: StepOptions
) -> StepCall:
    """Number the step at this point of the function; with a key it needs no number."""
    key = options.key
    label = str(key or options.name or getattr(function, "__name__", "step"))
    full_name, occurrence = (f"key:{key}", 0) if key else durable.next_place(label)
    if full_name.partition(":")[0] in RESERVED_STEP_PREFIXES:
        raise InvalidInput(f"step {label!r}: names that begin with {full_name.partition(':')[0]}: are reserved")
    codec = _result_codec(getattr(function, "handler", function))
    return StepCall(label, full_name, occurrence, _input_digest(args, kwargs), codec)


def check_step_function(function: object) -> None:
    """Refuse what is no function, such as a coroutine."""
    if not callable(function):
        raise InvalidInput(f"step: {function!r} is no function; write ctx.step(function, argument), without a call")


def step_function(function: Any, context: Context) -> Any:
    """Return what a step calls: the function, the handler if it is a task, or the stub that a test put in its place."""
    stubs = context.app.stubs
    if stubs and isinstance(function, Hashable) and function in stubs:
        return stubs[function]
    handler = getattr(function, "handler", function)
    if handler is function or function.handler_signature.context_name is None:
        return handler

    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound: dict[str, Any] = function.with_context(function.handler_signature.bind(args, kwargs), lambda: context)
        return bound

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await handler(**arguments(args, kwargs))

    return call_async if function.is_async else lambda *args, **kwargs: handler(**arguments(args, kwargs))


def observed(function: Any, context: Context, call: StepCall) -> Any:
    """Return the function of a step; in a test, one that the test sees first, and may fail instead."""
    on_step = context.app.on_step
    if on_step is None:
        return function

    def fail_if_told() -> None:
        if (failure := on_step(context, call.place, call.label)) is not None:
            raise failure

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        fail_if_told()
        return await function(*args, **kwargs)

    def call_plain(*args: Any, **kwargs: Any) -> Any:
        fail_if_told()
        return function(*args, **kwargs)

    return call_async if inspect.iscoroutinefunction(function) else call_plain


async def run_step(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    label: str,
    timeout_s: float | None,
    on_timeout: Callable[[], None],
) -> Any:
    """Call a step's function; a plain function runs in a thread, so that it cannot block the loop."""
    if _is_async(function):
        awaitable = function(*args, **kwargs)
        return await (awaitable if timeout_s is None else _within(timeout_s, awaitable, label))
    call = asyncio.ensure_future(asyncio.to_thread(call_future_safe, function, *args, **kwargs))
    try:
        done, _ = await asyncio.wait((call,), timeout=timeout_s)
    except BaseException:
        call.cancel()
        raise
    if not done:
        call.add_done_callback(_forget_result)
        on_timeout()
        warn_of_late_thread(label)
        raise StepTimeout(label, timeout_s or 0)
    value = call.result()
    if not inspect.isawaitable(value):
        return value
    return await (value if timeout_s is None else _within(timeout_s, value, label))


async def _within(timeout_s: float, awaitable: Any, label: str) -> Any:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await awaitable
    except TimeoutError:
        if not limit.expired():  # the function raised it itself
            raise
        raise StepTimeout(label, timeout_s) from None


PLAIN_TYPES = frozenset({int, str, float, bool, type(None)})  # of arguments that are their own JSON form
_warned_of: set[str] = set()


def warn_of_late_thread(label: str) -> None:
    """Log, once for each step, that a thread could not be stopped."""
    if label not in _warned_of:
        _warned_of.add(label)
        logger.warning(
            "step %r: its thread runs on after the timeout and keeps its slot; what it still does happens. A task with "
            'isolation="process" can be stopped',
            label,
        )


def _forget_result(call: asyncio.Future[Any]) -> None:
    if not call.cancelled():
        call.exception()  # retrieved, or asyncio would warn


def _input_digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        plain: Any = (args, kwargs)
        if not PLAIN_TYPES.issuperset(map(type, (*args, *kwargs.values()))):
            plain = msgspec.to_builtins(_without_tokens([args, kwargs]), str_keys=True, enc_hook=_to_plain)
        encoded = msgspec.json.encode(plain)
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


def _is_async(function: Any) -> bool:
    try:
        return _cached_is_async(function)
    except TypeError:  # a callable that is not hashable
        return inspect.iscoroutinefunction(function)


@lru_cache(maxsize=1000)
def _cached_is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function)


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
