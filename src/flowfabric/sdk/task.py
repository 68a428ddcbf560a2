"""`Task`: a function that can be submitted, together with the options of its runs.

`Submitter` is a task with changed options. `Call` is a task with its arguments, to be submitted later. All of them end
in `Task.build_create`, which turns a call into the engine's `CreateExecution`.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import msgspec

from flowfabric.engine.types import CreateExecution
from flowfabric.engine.validation import execution as validate
from flowfabric.errors import FabricError, InvalidInput
from flowfabric.model.answers.execution import Duplicate
from flowfabric.sdk import validation
from flowfabric.sdk.context import Context, run_with_context, set_current
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.limits import Budget, CallLimits, Limit, ScopeSelector, resolve_scope
from flowfabric.sdk.retry import Retry
from flowfabric.sdk.run import Run
from flowfabric.sdk.serialization.inputs import (
    BUDGET_IDS_KEY,
    JSON_ENCODING,
    JSON_WITH_RESULTS_ENCODING,
    InputWithResults,
)
from flowfabric.sdk.serialization.values import Signature

if TYPE_CHECKING:
    from flowfabric.engine_api import EngineAPI
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.sync import SyncSubmitter

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class TaskOptions(msgspec.Struct, frozen=True):
    """The options of a submit: those of the task, with the changes made by `Task.options`."""

    lane: str = "default"
    priority: int = 0
    retry: Retry | None = None
    needs: frozenset[str] = frozenset()
    timeout_ms: int | None = None
    delay_ms: int | None = None
    deadline: datetime | None = None
    key: str | None = None
    tags: dict[str, str] = {}
    budgets: tuple[Budget, ...] = ()
    limits: tuple[Limit, ...] = ()
    fair: ScopeSelector | None = None
    weight: int = 1

    @property
    def depends_on_arguments(self) -> bool:
        """True if the policy of a call depends on its arguments."""
        return bool(self.budgets or self.limits or self.fair is not None)

    def policy(self, call_limits: CallLimits, *, is_read: bool = False) -> str | None:
        """Encode the execution policy; None if it is empty. `is_read` keeps the result for a downstream node."""
        policy: dict[str, Any] = {"kept_for_successors": True} if is_read else {}
        if self.retry is not None:
            policy["retry_policy"] = self.retry.policy()
        if self.needs:
            policy["routing_requirements"] = {"required_capabilities": sorted(self.needs)}
        if call_limits.budgets:
            policy["budget_ids"] = [budget_id for _, budget_id, _ in call_limits.budgets.values()]
            policy[BUDGET_IDS_KEY] = {name: budget_id for name, (_, budget_id, _) in call_limits.budgets.items()}
        if call_limits.limits:
            policy["quota_policy_ids"] = list(call_limits.limits)
        if call_limits.fairness_key is not None:
            policy |= {"fairness_key": call_limits.fairness_key, "fairness_weight": self.weight}
        return msgspec.json.encode(policy).decode() if policy else None


def validate_submit_options(**options: Any) -> dict[str, Any]:
    """Check options that a submit may change, and return them."""
    checks: dict[str, Callable[[Any], Any]] = {
        "lane": validate.validate_lane_id,
        "priority": lambda value: validation.validate_int("priority", value),
        "weight": lambda value: validation.validate_int("weight", value, minimum=1),
        "tags": validation.validate_tags,
        "retry": _validate_retry,
        "fair": _validate_scope,
        "deadline": _validate_deadline,
        "key": _validate_key,
    }
    return {name: checks[name](value) for name, value in options.items()}


def _validate_retry(value: object) -> Retry | None:
    if value is not None and not isinstance(value, Retry):
        raise InvalidInput(f"retry: {value!r} is no Retry; write retry=Retry(max=3)")
    return value


def _validate_scope(value: object) -> ScopeSelector | None:
    if value is not None and not isinstance(value, str) and not callable(value):
        raise InvalidInput(f"fair: {value!r} is neither the name of a parameter nor a function of the arguments")
    return value


def _validate_key(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput(f'key: {value!r} is no text that tells one piece of work from another, as "order-7" does')
    return value


def _validate_deadline(value: object) -> datetime:
    if not isinstance(value, datetime):
        raise InvalidInput(f"deadline: {value!r} is no datetime; write datetime.now(timezone.utc) + timedelta(hours=1)")
    if value.tzinfo is None:
        raise InvalidInput("deadline: it needs a time zone (datetime.now(timezone.utc) + …)")
    return value


NO_CALL_LIMITS = CallLimits()


class Call(msgspec.Struct, Generic[R_co], frozen=True):
    """A task with its arguments, to be submitted later, alone or together with others."""

    task: Task[Any, R_co]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: TaskOptions


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
        options: TaskOptions,
    ) -> None:
        if isolation == "process" and "<locals>" in handler.__qualname__:
            raise InvalidInput(f'{name}: isolation="process" needs a function at the top level of a module')
        self.app = app
        self.name = name
        self.handler = handler
        self.module = handler.__module__
        self.isolation = isolation
        self.on_mismatch = on_mismatch
        self.default_options = options
        validation.validate_keyword_parameters(handler)
        self.signature = Signature(handler, Context)
        self.is_async = inspect.iscoroutinefunction(handler)
        self.timeout_s = None if options.timeout_ms is None else options.timeout_ms / 1000
        self.__doc__ = handler.__doc__
        self.__name__ = getattr(handler, "__name__", name)
        self.__wrapped__ = handler

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the function directly, as in a unit test: no engine is involved, and the context is a `LocalContext`."""
        name = self.signature.context_name
        if name is None or any(isinstance(value, Context) for value in (*args, *kwargs.values())):
            return self.handler(*args, **kwargs)
        from flowfabric.sdk.local_context import LocalContext

        context = LocalContext(self)
        arguments = self.with_context(self.signature.bind(args, kwargs), lambda: context)
        if self.is_async:
            return run_with_context(context, self.handler(**arguments))
        surroundings = contextvars.copy_context()
        surroundings.run(set_current, context)
        return surroundings.run(lambda: self.handler(**arguments))

    def with_context(self, arguments: dict[str, Any], context: Callable[[], Context]) -> dict[str, Any]:
        """Add the context to the arguments of the handler, if it has a parameter for it."""
        name = self.signature.context_name
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
        using: object | None = None,
    ) -> Submitter[P, R]:
        """Return the task with changed options for the submits made through it. `key` makes a submit idempotent.

        A key is valid for 24 hours after the submit that first used it. Until then a submit with the same key returns
        the same run, whether it has ended or not; afterwards it creates a new run. Keys belong to the task: another
        task may use the same key, and changing the lane does not change the key's meaning.
        `using` is a connection to the store's own Postgres database: the run is created by that connection's
        transaction, and exists when it commits.
        """
        changes: dict[str, Any] = {"delay_ms": None if delay is None else to_ms(delay, "delay")}
        values: dict[str, Any] = {"key": key, "tags": tags, "priority": priority, "lane": lane, "deadline": deadline}
        values |= {"retry": retry, "fair": fair, "weight": weight}
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

    def run(self, run_id: str) -> Run[R]:
        """Return the handle of a run of this task that was submitted earlier, by its id."""
        return Run(run_id, self.name, self.signature.result_codec, self.app)

    def own_run(self, run_id: str, *, created: bool = True) -> Run[R]:
        """Return the handle of a run in the app's namespace; `result` refuses a run of another namespace."""
        namespace = self.app.namespace
        return Run(run_id, self.name, self.signature.result_codec, self.app, created=created, namespace=namespace)

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
        return CreateExecution(
            execution_id=execution_id or engine.new_execution_id(partition_lane),
            partition=0,
            namespace=self.app.namespace,
            lane_id=options.lane,
            execution_kind=self.name,
            input_payload=payload,
            payload_encoding=JSON_WITH_RESULTS_ENCODING if results else JSON_ENCODING,
            priority=options.priority,
            creator_identity=self.app.identity,
            idempotency_key=None if options.key is None else f"{self.name}|{options.key}",
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

    if TYPE_CHECKING:  # tells editors the result of a plain call

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...


class PlainTask(Task[P, R]):
    """A task whose function is a plain function."""

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


class Submitter(Generic[P, R]):
    """A task with the options of the submits made through it."""

    def __init__(self, task: Task[P, R], options: TaskOptions, using: object | None = None) -> None:
        self.task = task
        self._options = options
        self._using = using

    @property
    def sync(self) -> SyncSubmitter[P, R]:
        """The blocking twin of this object, for code that cannot await."""
        from flowfabric.sdk.sync import SyncSubmitter

        return SyncSubmitter(self, self.task.app.portal)

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Return a call with these arguments, to be submitted later."""
        return Call(self.task, args, kwargs, self._options)

    @overload
    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    async def submit(self, *args: Any, using: object, **kwargs: Any) -> Run[R]: ...
    async def submit(self, *args: Any, **kwargs: Any) -> Run[R]:
        """Submit a call. The run is stored when this returns, or with `using`, when that transaction commits."""
        using = self._using
        if "using" in kwargs and "using" not in self.task.signature.parameter_codecs:
            using = kwargs.pop("using")
        [run] = await self._submit([Call(self.task, args, kwargs, self._options)], using)
        return run

    async def submit_many(self, inputs: Iterable[Any]) -> list[Run[R]]:
        """Submit many calls in one round trip. Each input is the only argument of a call, or a call made with `s`."""
        if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Iterable):
            raise InvalidInput(f"inputs: {inputs!r} is not a list of inputs")
        calls = [value if isinstance(value, Call) else Call(self.task, (value,), {}, self._options) for value in inputs]
        for call in calls:
            if call.task is not self.task:
                raise InvalidInput(f"inputs: a call of {call.task.name} is not one of {self.task.name}")
        keys = [call.options.key for call in calls if call.options.key]
        if len(set(keys)) < len(keys):
            raise InvalidInput("key: one key is one run; give each call its own with task.options(key=…).s(…)")
        return await self._submit(calls, self._using)

    async def _submit(self, calls: list[Call[Any]], using: object | None) -> list[Run[R]]:
        task = self.task
        engine = await task.app.engine()
        requests = [
            await task.build_create(engine, task.signature.bind(call.args, call.kwargs), options=call.options)
            for call in calls
        ]
        answers: Sequence[Any]
        if using is not None:
            answers = await engine.create_within(using, requests)
        elif len(requests) == 1:
            answers = [await engine.create(requests[0])]
        else:
            answers = await engine.create_executions(requests)
        runs = []
        for answer in answers:
            if isinstance(answer, FabricError):
                raise answer
            created = not isinstance(answer, Duplicate)
            runs.append(task.own_run(answer.execution_id, created=created))
        return runs


def _epoch_ms(instant: datetime | None) -> int | None:
    return None if instant is None else int(instant.timestamp() * 1000)


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
