"""`Task`: a function that can be submitted, together with the options of its runs.

Calls of a task and of its submitters (`sdk/submitter.py`) end in `Task.build_create`, which turns a call into the
engine's `CreateExecution`.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import msgspec
from msgspec.structs import replace

from flowfabric.engine.types import BATCH_MAILBOX, CreateExecution, KeyMode, KeyPolicy, MessageArgs
from flowfabric.errors import InvalidInput, KeyElsewhere, KeyTaken
from flowfabric.keyed_create import MAX_MINTS
from flowfabric.sdk import validation
from flowfabric.sdk.call import Call, TaskOptions, validate_submit_options
from flowfabric.sdk.context import Context, run_with_context, set_current
from flowfabric.sdk.durable.inbox import Codecs
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.exceptions import Fatal
from flowfabric.sdk.keys.key import BatchKey, RunKey, item_signature, validate_key
from flowfabric.sdk.limits import Budget, CallLimits, ScopeSelector, resolve_scope
from flowfabric.sdk.retry import Retry
from flowfabric.sdk.run import BatchedRun, Run
from flowfabric.sdk.serialization.inputs import (
    JSON_ENCODING,
    JSON_WITH_RESULTS_ENCODING,
    InputWithResults,
)
from flowfabric.sdk.serialization.values import Signature
from flowfabric.sdk.submitter import Submitter, with_fresh_id

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.keys.keyed import Keyed
    from flowfabric.sdk.sync import SyncSubmitter

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

NO_CALL_LIMITS = CallLimits()


def as_call(target: Any, /, *args: Any, **kwargs: Any) -> Call[Any]:
    """Return a call as it is, or the call of a task with these arguments."""
    if isinstance(target, Task | Submitter):
        return target.s(*args, **kwargs)
    if not isinstance(target, Call):
        raise InvalidInput(f"{target!r} is neither a task nor a call; write task.s(argument)")
    if args or kwargs:
        raise InvalidInput(f"a call of {target.task.name} has its arguments already")
    return target


def child_calls(members: tuple[Any, ...]) -> list[Any] | None:
    """Return the children among the arguments of `gather`: calls, or one iterable of calls. None for awaitables."""
    first = members[0] if len(members) == 1 else None
    if isinstance(first, Iterable) and not isinstance(first, Awaitable | str | bytes):
        return list(first)
    return list(members) if any(isinstance(member, Call) for member in members) or not members else None


class Task(Generic[P, R]):
    """A function whose calls are durable: `submit` stores a call for a worker to run; a plain call just runs it."""

    def __init__(
        self,
        app: Fabric,
        handler: Callable[..., Any],
        *,
        name: str,
        isolation: str,
        on_mismatch: str,
        pin: bool,
        inbox: Codecs,
        options: TaskOptions,
        key: RunKey | None = None,
    ) -> None:
        if isolation == "process" and "<locals>" in handler.__qualname__:
            raise InvalidInput(f'{name}: isolation="process" needs a function at the top level of a module')
        self.app = app
        self.name = name
        self.handler = handler
        self.module = handler.__module__
        self.isolation = isolation
        self.on_mismatch = on_mismatch
        self.pin = pin
        self.inbox = inbox  # what its runs take, by the name of the message; empty if it is not declared
        self.default_options = options
        validation.validate_keyword_parameters(handler)
        self.handler_signature = self.signature = Signature(handler, Context)
        self.key = key
        if isinstance(key, BatchKey):  # a submit has one item, and its run one result
            self.signature = item_signature(handler, self.handler_signature, Context)
        if key is not None:
            key.check(name, self.signature)
        self.is_async = inspect.iscoroutinefunction(handler)
        self.timeout_s = None if options.timeout_ms is None else options.timeout_ms / 1000
        self.__doc__ = handler.__doc__
        self.__name__ = getattr(handler, "__name__", name)
        self.__wrapped__ = handler

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the function directly, as in a unit test: no engine is involved, and the context is a `LocalContext`."""
        name = self.handler_signature.context_name
        if name is None or any(isinstance(value, Context) for value in (*args, *kwargs.values())):
            return self.handler(*args, **kwargs)
        from flowfabric.sdk.local_context import LocalContext

        context = LocalContext(self)
        arguments = self.with_context(self.handler_signature.bind(args, kwargs), lambda: context)
        if self.is_async:
            return run_with_context(context, self.handler(**arguments))
        surroundings = contextvars.copy_context()
        surroundings.run(set_current, context)
        return surroundings.run(lambda: self.handler(**arguments))

    @property
    def is_batch(self) -> bool:
        """True if one run has the inputs of many submits."""
        return isinstance(self.key, BatchKey)

    def check_result(self, value: Any, arguments: Mapping[str, Any]) -> None:
        """Refuse the result of a batch that has not one element for each input."""
        if self.is_batch:
            [inputs] = (arguments[name] for name in self.handler_signature.parameter_codecs)
            if not isinstance(value, list) or len(value) != len(inputs):
                count = f"{len(value)} results" if isinstance(value, list) else f"a {type(value).__name__}"
                raise Fatal(
                    f"{self.name} returned {count} for {len(inputs)} inputs; return one for each, in their order"
                )

    def with_context(self, arguments: dict[str, Any], context: Callable[[], Context]) -> dict[str, Any]:
        """Add the context to the arguments of the handler, if it has a parameter for it."""
        name = self.handler_signature.context_name
        return arguments if name is None else {**arguments, name: context()}

    def options(
        self,
        *,
        delay: Duration | None = None,
        key: str | None = None,
        tags: Mapping[str, str] | None = None,
        priority: int | None = None,
        lane: str | None = None,
        deadline: datetime | None = None,
        retry: Retry | None = None,
        fair: ScopeSelector | None = None,
        weight: int | None = None,
        detached: bool | None = None,
        using: object | None = None,
    ) -> Submitter[P, R]:
        """Return the task with changed options for the submits made through it. `key` makes a submit idempotent.

        A key is valid for 24 hours after the submit that first used it. Until then a submit with the same key returns
        the same run, whether it has ended or not; afterwards it creates a new run. Keys belong to the task: another
        task may use the same key, and changing the lane does not change the key's meaning.
        A `detached` child is left alone when its parent is cancelled or expires.
        `using` is a connection to the store's own Postgres database: the run is created by that connection's
        transaction, and exists when it commits.
        """
        changes: dict[str, Any] = {"delay_ms": None if delay is None else to_ms(delay, "delay")}
        values: dict[str, Any] = {"key": key, "tags": tags, "priority": priority, "lane": lane, "deadline": deadline}
        values |= {"retry": retry, "fair": fair, "weight": weight}
        if detached is not None:
            changes["detached"] = bool(detached)
        changes |= validate_submit_options(**{name: value for name, value in values.items() if value is not None})
        return Submitter(self, msgspec.structs.replace(self.default_options, **changes), using)

    @property
    def sync(self) -> SyncSubmitter[P, R]:
        """The blocking twin of this object, for code that cannot await."""
        return Submitter(self, self.default_options).sync

    @overload
    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    async def submit(self, *args: Any, using: object, **kwargs: Any) -> Run[R]: ...
    async def submit(self, *args: Any, **kwargs: Any) -> Run[R]:
        """Submit a call. The run is stored when this returns, or with `using`, when that transaction commits."""
        return await Submitter(self, self.default_options).submit(*args, **kwargs)

    async def submit_many(self, inputs: Iterable[Any]) -> list[Run[R]]:
        """Submit many calls in one round trip. Each input is the only argument of a call, or a call made with `s`."""
        return await Submitter(self, self.default_options).submit_many(inputs)

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Return a call with these arguments, to be submitted later."""
        return Call(self, args, kwargs, self.default_options)

    def at(self, key: str) -> Keyed[P, R]:
        """Return the run that has a key of this task now, with everything that a run can do; no round trip."""
        from flowfabric.sdk.keys.keyed import Keyed

        return Keyed(self, validate_key(key))

    async def find(self, key: str) -> Run[R] | None:
        """Return the run that has a key of this task: one that has not ended, or else the last one; None without."""
        engine = await self.app.engine()
        found = await engine.find_by_key(
            f"{self.name}|{validate_key(key)}", namespace=self.app.namespace, lane_id=self.default_options.lane
        )
        return None if found is None else self.own_run(found, created=False)

    async def start_at(self, key: str, call: Call[R], message: MessageArgs | None) -> Run[R]:
        """Create a run under a key and send it a message, or send that to the run that has the key, in one change."""
        from flowfabric.sdk.keys.keyed import ACTOR

        if self.is_batch:
            raise InvalidInput(f"or_start: {self.name} is a batch, which receives nothing but its inputs; use submit")
        arguments = self.signature.bind(call.args, call.kwargs)
        if self.key is not None:
            own = self.key.resolve(self.name, self.signature.with_defaults(arguments), call.options.tags)
            if own != key:
                raise InvalidInput(
                    f"or_start: its arguments have the key {own!r}, not {key!r}; at() and they must agree"
                )
        policy = ACTOR if self.key is None else self.key.policy
        return await self.submit_keyed(replace(call, options=replace(call.options, key=key)), policy, message)

    async def submit_keyed(self, call: Call[R], policy: KeyPolicy, message: MessageArgs | None = None) -> Run[R]:
        """Submit a call whose options have a key, and do what the policy says if that is taken."""
        engine = await self.app.engine()
        arguments = self.signature.bind(call.args, call.kwargs)
        is_batch = policy.mode is KeyMode.BATCH
        if is_batch:
            [(parameter, value)] = self.signature.with_defaults(arguments).items()
            item = self.signature.parameter_codecs[parameter].to_json(value, parameter)
            message = MessageArgs(
                execution_id="",
                mailbox=BATCH_MAILBOX,
                message_id=engine.minter.uuid(),
                payload=item,
                payload_encoding=JSON_ENCODING,
            )
        request = await self.build_create(engine, arguments, options=call.options)
        if is_batch:
            request = replace(request, input_payload=b"{}")
        for _ in range(MAX_MINTS - 1):
            try:
                answer = await engine.start_by_key(request, policy, message=message)
                break
            except KeyElsewhere:
                await engine.refresh_lanes()
                request = with_fresh_id(engine, request)
            except KeyTaken as taken:
                taken.run = self.own_run(taken.execution_id or "", created=False)
                raise
        else:
            answer = await engine.start_by_key(request, policy, message=message)
        if answer.item is not None:
            return BatchedRun(self, answer.execution_id, answer.item, created=answer.is_new)
        return self.own_run(answer.execution_id, created=answer.is_new)

    def run(self, run_id: str) -> Run[R]:
        """Return the handle of a run of this task that was submitted earlier, by its id.

        The result of a batch found so is the whole list.
        """
        return Run(run_id, self.name, self.handler_signature.result_codec, self.app)

    def own_run(self, run_id: str, *, created: bool = True) -> Run[R]:
        """Return the handle of a run in the app's namespace; `result` refuses a run of another namespace."""
        codec, namespace = self.handler_signature.result_codec, self.app.namespace
        return Run(run_id, self.name, codec, self.app, created=created, namespace=namespace)

    async def build_create(
        self,
        engine: EngineAPI,
        arguments: dict[str, Any],
        *,
        options: TaskOptions,
        execution_id: str | None = None,
        results: dict[str, str | list[str]] | None = None,
        is_read: bool = False,
    ) -> CreateExecution:
        """Return the engine's request for a call with these arguments; arguments of the wrong type are refused here.

        `results` maps further parameters to the runs whose results they will get. `is_read` is True if another node
        will read the result of this call.
        """
        if self.is_batch and execution_id is not None:
            raise InvalidInput(
                f"{self.name} is a batch, whose runs collect submits: no child or node of a flow; submit it in a step"
            )
        signature = self.signature
        payload = (
            InputWithResults(signature.dump(arguments), results).to_json() if results else signature.to_json(arguments)
        )
        call_limits = NO_CALL_LIMITS
        if options.depends_on_arguments:
            call_limits = self.resolve_limits(options, arguments, unknown=(results or {}).keys())
            await self.app.declare_limits(engine, call_limits)
        # Keys are unique within a partition, and the id's partition is derived from a lane. With a key it is always the
        # task's default lane, so that changing the lane finds the same key.
        partition_lane = options.lane if options.key is None else self.default_options.lane
        key = None if options.key is None else f"{self.name}|{options.key}"
        return CreateExecution(
            execution_id=execution_id or engine.new_execution_id(partition_lane, key),
            partition=0,
            namespace=self.app.namespace,
            lane_id=options.lane,
            execution_kind=self.name,
            input_payload=payload,
            payload_encoding=JSON_WITH_RESULTS_ENCODING if results else JSON_ENCODING,
            priority=options.priority,
            creator_identity=self.app.identity,
            idempotency_key=key,
            key_lane=None if key is None or partition_lane == options.lane else partition_lane,
            tags=options.tags,
            policy=options.policy(call_limits, is_read=is_read),
            delay_until=None if options.delay_ms is None else engine.estimate.now() + options.delay_ms,
            execution_deadline_at=_epoch_ms(options.deadline),
        )

    def resolve_limits(
        self, options: TaskOptions, arguments: Mapping[str, Any], unknown: Collection[str] = ()
    ) -> CallLimits:
        """Return the budgets and limits of a call with these arguments.

        The `unknown` parameters get results of other runs; a scope that needs one of them is refused.
        """
        tags, namespace = options.tags, self.app.namespace
        known = {name: value for name, value in self.signature.with_defaults(arguments).items() if name not in unknown}

        def scope(per: ScopeSelector | None, subject: str) -> str:
            return resolve_scope(per, subject, known, tags, all_known=not unknown)

        budgets: dict[str, tuple[Budget, str, str]] = {}
        for budget in options.budgets:
            owner = scope(budget.per, f"budget {budget.name}")
            budgets[budget.name] = (budget, budget.id(namespace, owner), owner)
        limits = {
            limit.id(namespace, self.name, scope(limit.per, f"limit of {self.name}")): limit for limit in options.limits
        }
        fair = scope(options.fair, f"fairness of {self.name}") if options.fair else None
        return CallLimits(budgets, limits, fair)

    def __repr__(self) -> str:
        return f"<Task {self.name}>"


class AsyncTask(Task[P, R]):
    """A task whose function is a coroutine function; a plain call is awaited."""

    if TYPE_CHECKING:  # for editors: the result of a plain call

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...


class PlainTask(Task[P, R]):
    """A task whose function is a plain function."""

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def _epoch_ms(instant: datetime | None) -> int | None:
    return None if instant is None else int(instant.timestamp() * 1000)


class BatchTaskDecorator:
    """The decorator that `@app.task(key=Key.batch(…))` returns: submits have one item, and their runs one result."""

    def __init__(self, make: Callable[[Callable[..., Any]], Task[..., Any]]) -> None:
        self._make = make

    @overload
    def __call__(self, handler: Callable[[Context, list[T]], Awaitable[list[R]]]) -> Task[[T], R]: ...
    @overload
    def __call__(self, handler: Callable[[list[T]], Awaitable[list[R]]]) -> Task[[T], R]: ...
    @overload
    def __call__(self, handler: Callable[[Context, list[T]], list[R]]) -> Task[[T], R]: ...
    @overload
    def __call__(self, handler: Callable[[list[T]], list[R]]) -> Task[[T], R]: ...
    def __call__(self, handler: Callable[..., Any]) -> Task[..., Any]:
        return self._make(handler)


class TaskDecorator:
    """The decorator that `@app.task(…)` returns, typed so that editors know the result of a run."""

    def __init__(self, make: Callable[[Callable[..., Any]], Task[..., Any]]) -> None:
        self._make = make

    # The order matters: a coroutine function is also a callable, and the first overload that fits is chosen.
    @overload
    def __call__(self, handler: Callable[Concatenate[Context, P], Awaitable[R]]) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, handler: Callable[P, Awaitable[R]]) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, handler: Callable[Concatenate[Context, P], R]) -> PlainTask[P, R]: ...
    @overload
    def __call__(self, handler: Callable[P, R]) -> PlainTask[P, R]: ...
    def __call__(self, handler: Callable[..., Any]) -> Task[..., Any]:
        return self._make(handler)
