"""One step of a durable function: answered from what the run remembers (`ledger`), or run, with tries and pauses.

The engine side of a step runs on the event loop, its function wherever the caller runs it: on the loop, or in the
thread of a plain handler. So a step is a small state machine that both drive:

    execution = await StepExecution.begin(context, function, args, kwargs, options)
    while execution.is_due:
        ...                                     # call the function inside `execution.running()`, then `end_try`
    return execution.result()
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import msgspec

from flowfabric.engine.types import GateArgs
from flowfabric.errors import (
    InvalidInput,
    OperationTimeout,
    ResourceExhausted,
    StoreUnavailable,
    Unauthorized,
    Unavailable,
)
from flowfabric.model.gate import GateKind, StepMemo, StepState
from flowfabric.sdk.durable.attempt import DurableAttempt, current_step
from flowfabric.sdk.durable.branches import Branch, current_branch, current_scope
from flowfabric.sdk.durable.ledger import Pending
from flowfabric.sdk.durable.parker import ContextCall, HandlerUnwound
from flowfabric.sdk.durable.step_identity import (
    StepCall,
    StepOptions,
    check_step_function,
    identify_step,
    observed,
    options_of,
    step_function,
)
from flowfabric.sdk.durations import to_ms
from flowfabric.sdk.exceptions import Fatal, RetryAfter, StepInterrupted, is_lease_loss
from flowfabric.sdk.serialization.failures import remember_failure

if TYPE_CHECKING:
    from flowfabric.sdk.context import Context

MAX_PAUSE_IN_PLACE_MS = 1000  # a longer pause between two tries frees the slot
MAX_LAST_CHARS = 500

_RANDOM = random.Random()  # not the shared one, which applications seed


class Tries(msgspec.Struct, frozen=True):
    """The failed tries of a step, as they are recorded. `of` is the number of tries at most; None without an end."""

    count: int = 0
    of: int | None = None
    first_at: int = 0
    next_at: int = 0
    waits: int = 0  # pauses so far, those that cost no try included
    last: str = ""  # text of what the last try raised
    started_at: int | None = None  # when the first try began


class Start(msgspec.Struct, frozen=True):
    """The start of a try of a step that must not run twice."""

    at: int
    number: int  # the number of failed tries before it


class RunningTry:
    """The block in which the function of a step runs; a class, because a generator costs a step 2 µs more."""

    __slots__ = ("_call", "_scope", "_tokens")

    def __init__(self, scope: ContextCall | None, call: StepCall) -> None:
        self._scope = scope
        self._call = call

    def __enter__(self) -> None:
        step = f"{self._call.name}#{self._call.occurrence}/"
        self._tokens = current_scope.set(self._scope), current_step.set(step)

    def __exit__(self, *_: object) -> None:
        scope, step = self._tokens
        current_step.reset(step)
        current_scope.reset(scope)


class RunnableStep(Protocol):
    """A step whose tries the caller makes while it is due."""

    call: StepCall
    options: StepOptions
    function: Any
    is_due: bool

    def running(self) -> AbstractContextManager[None]:
        """Mark the block as the try."""
        ...

    async def end_try(self, value: Any, error: BaseException | None) -> None:
        """Take what the try returned or raised."""

    def expire(self) -> None:
        """Refuse what a thread that runs on after its timeout asks of the context."""

    def result(self) -> Any:
        """Return the result of a step that is not due any more."""


class StepExecution:
    """A step that runs, or is answered from what the run remembers."""

    __slots__ = (
        "_branch",
        "_context",
        "_durable",
        "_has_fault_points",
        "_memo",
        "_place",
        "_scope",
        "_started_at",
        "_tries",
        "call",
        "function",
        "is_due",
        "options",
    )

    def __init__(
        self,
        context: Context,
        durable: DurableAttempt,
        call: StepCall,
        options: StepOptions,
        branch: Branch,
        function: Any,
    ) -> None:
        self.call = call
        self.options = options
        self.function = observed(step_function(function, context), context, call)
        self.is_due = False  # True while a try has to be made
        self._context = context
        self._durable = durable
        self._has_fault_points = context.app.on_fault_point is not None
        self._place = call.place
        self._branch = branch
        self._tries = Tries()
        self._started_at: int | None = None  # when the first try began
        self._scope: ContextCall | None = None
        self._memo: StepMemo | None = None

    @classmethod
    async def begin(
        cls, context: Context, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: StepOptions
    ) -> StepExecution:
        """Return the step at this point of the function, ready for a try, or with its remembered result.

        Raises its remembered failure.
        """
        check_step_function(function)
        options = options_of(function, given)
        durable = context.durable
        try:
            branch = await durable.begin_operation()
        except asyncio.CancelledError:
            call = identify_step(durable, function, args, kwargs, options)
            durable.note_left(current_branch(durable.branches), call.place, is_gate=False)
            raise
        call = identify_step(durable, function, args, kwargs, options)
        execution = cls(context, durable, call, options, branch, function)
        await execution._find()
        return execution

    def result(self) -> Any:
        """Decode the recorded result."""
        assert self._memo is not None
        return self.call.decode(self._memo.result)

    async def _find(self) -> None:
        ledger, call = self._durable.ledger, self.call
        if ledger.find_left(self._place):
            await self._durable.wait_until_left(self._branch)
        try:
            self._memo = await ledger.find_step(self._branch, self._place, call.digest)
        except asyncio.CancelledError:
            self._note_left()
            raise
        if self._memo is not None:
            if self._memo.state is StepState.FAILED:
                raise self._durable.decode_remembered(self._place, self._memo)
            return
        if (tries := ledger.find_tries(self._place)) is not None:
            self._tries = msgspec.json.decode(tries.result, type=Tries)
            self._started_at = self._tries.started_at
        if self.options.at_most_once and (began := ledger.find_start(self._place)) is not None:
            start = msgspec.json.decode(began.result, type=Start)
            if start.number >= self._tries.waits:
                at = datetime.fromtimestamp(start.at / 1000, UTC).isoformat(timespec="seconds")
                raise self._note_failure(StepInterrupted(call.label, self._context.run_id, at), is_final=False)
        try:
            if self._tries.next_at:
                await self._pause()
            await self._begin_try()
        except (asyncio.CancelledError, HandlerUnwound):
            self._note_left()
            raise

    # -- a try ------------------------------------------------------------------------------------------------------

    async def _begin_try(self) -> None:
        self._scope = await self._durable.parker.begin_call()
        try:
            now = self._context.engine.estimate.now()
            if self._started_at is None:
                self._started_at = now
            if self.options.at_most_once:
                start = Start(now, self._tries.waits)
                await self._durable.record_step(self._place, msgspec.json.encode(start), state=StepState.BEGAN)
            if self._has_fault_points:
                await self._reach_fault_point("before_effect")
        except BaseException:
            self._end_call()
            raise
        self.is_due = True

    def running(self) -> RunningTry:
        """Mark the block as the try: tasks made in it are no branches, and parking does not interrupt it."""
        return RunningTry(self._scope, self.call)

    async def end_try(self, value: Any, error: BaseException | None) -> None:
        """Record what the try returned, or decide what follows what it raised: a pause and another try, or the end."""
        try:
            if error is None:
                error = await self._succeed(value)
        except (asyncio.CancelledError, HandlerUnwound):
            self._note_left()
            raise
        finally:
            self._end_call()
        if error is None:
            self.is_due = False
            return
        if isinstance(error, asyncio.CancelledError | HandlerUnwound):
            self._note_left()
        if not is_failure(error, self._context.run_id):
            raise error
        try:
            await self._fail(error)
        except (asyncio.CancelledError, HandlerUnwound):
            self._note_left()
            raise

    def _note_left(self) -> None:
        self._durable.note_left(self._branch, self._place, is_gate=False)

    def expire(self) -> None:
        """Refuse what a thread that runs on after its timeout asks of the context."""
        if self._scope is not None:
            self._scope.is_expired = True

    def _end_call(self) -> None:
        if self._scope is not None:
            self._durable.parker.end_call(self._scope)
            self._scope = None

    async def _succeed(self, value: Any) -> InvalidInput | None:
        """Record the result; return why it does not fit the annotation of the function, if it does not."""
        call = self.call
        if self._has_fault_points:
            await self._reach_fault_point("after_effect")
        try:
            result = call.encode(value)
        except InvalidInput as unfit:
            return unfit
        memo = await self._durable.record_step(self._place, result, digest=call.digest, started_at=self._started_at)
        if memo.state is StepState.FAILED:
            raise RuntimeError(f"step {call.label!r} has been recorded by another attempt meanwhile")
        self._memo = memo
        if self._has_fault_points:
            await self._reach_fault_point("after_commit")
        return None

    async def _reach_fault_point(self, moment: str) -> None:
        await self._context.reach_fault_point(self.call.fault_point, moment)

    # -- failures and retries ---------------------------------------------------------------------------------------

    async def _fail(self, error: Exception) -> None:
        """Pause before the next try, or raise the failure if none follows."""
        retry, now = self.options.retry, self._context.engine.estimate.now()
        delay_ms = None if retry is None else self._delay_ms(error, now)
        if delay_ms is None:
            failure = self._note_failure(error, is_final=retry is not None and not isinstance(error, RetryAfter))
            if self.options.at_most_once:
                pending = self._durable.ledger.pending
                await self._durable.record_pending([one for one in pending if one.place == self._place])
            self.is_due = False
            raise failure
        assert retry is not None
        self._tries = Tries(
            count=self._tries.count + (not isinstance(error, RetryAfter)),
            of=None if retry.max is None else retry.max + 1,
            first_at=self._tries.first_at or now,
            next_at=now + delay_ms,
            waits=self._tries.waits + 1,
            last=f"{type(error).__name__}: {error}"[:MAX_LAST_CHARS],
            started_at=self._started_at,
        )
        await self._durable.record_step(self._place, msgspec.json.encode(self._tries), state=StepState.TRIES)
        await self._pause()
        await self._begin_try()

    def _delay_ms(self, error: Exception, now: int) -> int | None:
        """Return the pause before the next try; None if the tries are over."""
        retry = self.options.retry
        assert retry is not None
        if isinstance(error, Fatal):
            return None
        if isinstance(error, RetryAfter):
            delay_ms = error.after_ms
        elif not retry.covers(error) or (retry.max is not None and self._tries.count >= retry.max):
            return None
        else:
            delay_ms = retry.backoff_ms(self._tries.count, _RANDOM.random())
        first_at = self._tries.first_at or now
        if retry.within is not None and now + delay_ms > first_at + to_ms(retry.within, "within"):
            return None
        return delay_ms

    async def _pause(self) -> None:
        """Wait until the next try may begin: in place if that is soon, else parked."""
        left_ms = self._tries.next_at - self._context.engine.estimate.now()
        if left_ms <= 0:
            return
        if left_ms <= MAX_PAUSE_IN_PLACE_MS:
            await asyncio.sleep(left_ms / 1000)
            return
        name, occurrence = self._place
        gate = f"retry:{name}#{occurrence}.{self._tries.waits}"
        await self._durable.open_and_wait(GateArgs(name=gate, kind=GateKind.TIMER, expires_at=self._tries.next_at))

    def _note_failure(self, error: Exception, *, is_final: bool) -> Exception:
        """Keep a failure pending until the function moves past it; return what to raise."""
        call = self.call
        data, failure = remember_failure(error)
        failed = Pending(self._branch, self._place, call.label, data, call.digest, self._started_at)
        self._durable.note_failed(failed)
        self._durable.note_raised(failure, None if is_final else self._place)
        if failure is not error:
            failure = failure.with_traceback(error.__traceback__)
            failure.__suppress_context__ = True
        return failure


def is_failure(error: BaseException | None, run_id: str) -> TypeGuard[Exception]:
    """True for an exception of the function; False for an error of the store, and for a lost lease."""
    if not isinstance(error, Exception):
        return False
    is_fault = isinstance(error, StoreUnavailable | Unavailable | OperationTimeout | Unauthorized | ResourceExhausted)
    return not is_fault and not is_lease_loss(error, run_id)


async def drive(execution: RunnableStep, call: Callable[[], Any]) -> Any:
    """Make the tries of a step on the event loop; return its result."""
    while execution.is_due:
        value: Any = None
        raised: BaseException | None = None
        try:
            with execution.running():
                value = await call()
        except BaseException as error:
            raised = error
        await execution.end_try(value, raised)
    return execution.result()
