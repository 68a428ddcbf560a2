"""The waits of a context: sleep, messages, approvals and children. Every wait that is not short frees the slot.

A wait opens a gate, which the engine closes when the time has passed, the message or the votes have arrived, or enough
children have ended. The ids of waitpoints and children are derived from the run's id and the gate's name, so that a
replay finds the same ones.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import abstractmethod
from collections.abc import Awaitable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import msgspec

from flowfabric.engine.types import (
    Count,
    CountKind,
    GateArgs,
    check_schema,
    outcome_of_children,
    results_of,
    schema_tag,
)
from flowfabric.errors import ContentionError, ExecutionNotActive, InvalidInput, StateError
from flowfabric.ids import ExecutionId, partition_of
from flowfabric.model.gate import ChildResult, GateKind, GateMemo, GateOutcome, Vote
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.sdk import validation
from flowfabric.sdk.approvals import Approval
from flowfabric.sdk.durable.branches import as_coroutine
from flowfabric.sdk.durable.child_ends import read_child
from flowfabric.sdk.durable.context_part import ContextPart
from flowfabric.sdk.durable.races import Won, run_race
from flowfabric.sdk.durations import Duration, to_ms, to_seconds
from flowfabric.sdk.exceptions import RunFailed
from flowfabric.sdk.joins import AllOf, Join, Quorum
from flowfabric.sdk.run import Run
from flowfabric.sdk.serialization.values import ValueCodec, from_json, incoming_codec

if TYPE_CHECKING:
    from flowfabric.sdk.call import Call
    from flowfabric.sdk.context import Context
    from flowfabric.sdk.durable.ledger import Place
    from flowfabric.sdk.task import Task

T = TypeVar("T")
V = TypeVar("V")
P = ParamSpec("P")

ALL = AllOf()
MAX_INLINE_WAIT_MS = 1000  # a wait this short keeps its slot, since parking costs more


class ContextWaits(ContextPart):
    """The part of a context that waits."""

    @property
    @abstractmethod
    def _itself(self) -> Context:
        """The context that these waits are part of."""

    @property
    @abstractmethod
    def may_park(self) -> bool:
        """True if the caller is the handler itself or a branch of it, where a wait can park the run."""

    async def sleep(self, length: Duration) -> None:
        """Wait for a length of time. It frees the slot meanwhile, and survives the death of the process."""
        length_ms = to_ms(length, "sleep")
        if length_ms <= MAX_INLINE_WAIT_MS:
            await asyncio.sleep(length_ms / 1000)
            return
        await self.durable.begin_operation()
        name = self.durable.next_gate_name("sleep")
        await self.durable.open_and_wait(GateArgs(name=name, kind=GateKind.TIMER, expires_in_ms=length_ms))

    @overload
    async def receive(self, name: str, shape: type[T]) -> T: ...
    @overload
    async def receive(self, name: str, shape: type[T], *, timeout: Duration | None) -> T | None: ...
    @overload
    async def receive(self, name: str, shape: Any = Any, *, timeout: Duration | None = None) -> Any: ...
    async def receive(self, name: str, shape: Any = Any, *, timeout: Duration | None = None) -> Any:
        """Return the next message of this name, sent before or after this call; None if none arrives in time."""
        codec = incoming_codec(shape, f"receive {name}")
        await self.durable.begin_operation()
        memo = await self.durable.open_and_wait(
            GateArgs(
                name=self.durable.next_gate_name(f"receive:{name}"),
                kind=GateKind.MAILBOX,
                mailbox=name,
                expires_in_ms=None if timeout is None else to_ms(timeout, "timeout"),
            )
        )
        if memo.ended_as is GateOutcome.TIMED_OUT:
            return None
        return codec.load(from_json(memo.payload or b"null"), name)

    async def approval(
        self,
        name: str,
        shape: type[V],
        *,
        need: int = 1,
        approvers: int | None = None,
        distinct: bool = True,
        expires: Duration | None = None,
        show: dict[str, Any] | None = None,
    ) -> Approval[V]:
        """Ask people for a decision, with one signed link per approver.

        Each link can vote once; with `distinct=False` the first `need` votes count, whichever links they come from.
        The links stay valid across crashes and deployments. Await the approval for the votes. `show` is displayed on
        the page behind a link, so that the approver knows what is being decided.
        """
        validation.validate_name(name)
        count = approvers if approvers is not None else max(need, 1)
        if not 1 <= need <= count:
            raise InvalidInput(f"approval: {need} votes cannot come from {count} links")
        codec = incoming_codec(shape, f"approval {name}")
        schema = codec.schema()  # the form on the page behind a link
        if schema and (refused := check_schema(schema)):
            raise InvalidInput(f"approval {name}: {refused.detail}")
        tags = {} if show is None else {"ff.show": ValueCodec(Any).to_json(show, "show").decode()}
        await self.durable.begin_operation()
        gate = self.durable.next_gate_name(f"approval:{name}")
        waitpoints = tuple((str(self._derive_uuid(gate, number)), f"{name}.{number + 1}") for number in range(count))
        kind = CountKind.DISTINCT_WAITPOINTS if distinct else CountKind.DISTINCT_SIGNALS
        if self.app.on_approval is not None:
            self.app.on_approval(self._itself, name, shape)
        opened = await self.durable.open_gate(
            GateArgs(
                name=gate,
                kind=GateKind.SIGNALS,
                condition=Count(n=need, count_kind=kind, waitpoints=tuple(key for _, key in waitpoints)),
                waitpoints=waitpoints,
                expires_in_ms=None if expires is None else to_ms(expires, "expires"),
            )
        )
        if schema:
            tags[schema_tag(name)] = schema
        if tags and not isinstance(opened, GateMemo):
            await self.engine.set_tags(self.handle, tags)
        return Approval(
            self.durable,
            codec,
            opened,
            base_url=self.app.public_url,
            run_id=self.run_id,
            waitpoint_ids=[waitpoint_id for waitpoint_id, _ in waitpoints],
        )

    # -- children -------------------------------------------------------------------------------------------------

    @overload
    async def spawn(self, call: Call[T]) -> Run[T]: ...
    @overload
    async def spawn(self, call: Task[P, T], *args: P.args, **kwargs: P.kwargs) -> Run[T]: ...
    async def spawn(self, call: Any, *args: Any, **kwargs: Any) -> Run[Any]:
        """Submit a child run: a task with its arguments, or a call made with `s`.

        It is recorded with its input in the change that creates it, so no replay creates a second child. Awaiting its
        result frees the slot.
        """
        from flowfabric.sdk.task import as_call

        [run] = await self._spawn([as_call(call, *args, **kwargs)])
        return run

    async def _spawn(self, calls: Sequence[Call[Any]]) -> list[Run[Any]]:
        branch = await self.durable.begin_operation()
        places = [self.durable.next_place(f"child:{call.task.name}") for call in calls]

        def id_at(place: Place) -> str:
            return self._child_id(f"{place[0]}#{place[1]}")

        asks = []
        for call, place in zip(calls, places, strict=True):
            arguments = call.task.signature.bind(call.args, call.kwargs)
            ask = await call.task.build_create(self.engine, arguments, options=call.options, execution_id=id_at(place))
            asks.append((place, msgspec.structs.replace(ask, creator_identity=self.run_id, parent_id=self.run_id)))
        found = await self.durable.children.spawn(branch, asks, id_at)
        runs: list[Run[Any]] = []
        for (child_id, own_id), call in zip(found, calls, strict=True):
            # A call with a key may return the run of an earlier submit, whose end is reported to another parent.
            if child_id == own_id:
                runs.append(ChildRun(child_id, call.task.name, call.task.signature.result_codec, self))
            else:
                runs.append(call.task.own_run(child_id, created=False))
        return runs

    @overload
    async def gather(self, first: Iterable[Call[T]], /, *, join: AllOf = ALL) -> list[T]: ...
    @overload
    async def gather(self, first: Iterable[Call[T]], /, *, join: Join) -> list[T | None]: ...
    @overload
    async def gather(self, first: Call[T], /, *others: Call[T], join: AllOf = ALL) -> list[T]: ...
    @overload
    async def gather(self, first: Call[T], /, *others: Call[T], join: Join) -> list[T | None]: ...
    @overload
    async def gather(self, first: Awaitable[T], /, *others: Awaitable[T]) -> list[T]: ...
    @overload
    async def gather(self, first: Awaitable[Any], /, *others: Awaitable[Any]) -> list[Any]: ...
    async def gather(self, *members: Any, join: Join = ALL) -> list[Any]:
        """Wait for several things concurrently: children given as calls, or waits and steps of this function.

        Returns their results in order. A child that the join did not need has None in its place.
        """
        from flowfabric.sdk.task import child_calls

        calls = child_calls(members)
        if calls is not None:
            return [await self._result_of(*child) for child in await self._run_children(calls, join)]
        return await self.durable.gather(members)

    @overload
    async def race(self, *calls: Call[T]) -> T: ...
    @overload
    async def race(self, **members: Awaitable[T]) -> Won[T]: ...
    @overload
    async def race(self, **members: Awaitable[Any]) -> Won[Any]: ...
    async def race(self, *calls: Call[Any], **members: Awaitable[Any]) -> Any:
        """Return the first of several waits and steps that ends, by name; the others are left, for good.

            won = await ctx.race(paid=ctx.receive("paid", Paid), late=ctx.sleep("1d"))

        With calls, return the result of the first child that succeeds; the others are cancelled.
        """
        if members:
            coroutines = {name: as_coroutine(member) for name, member in members.items()}
            if calls:
                for coroutine in coroutines.values():
                    coroutine.close()
                raise InvalidInput("race: it has calls and named members; it takes one kind of them")
            return await run_race(self.durable, coroutines)
        if not calls:
            raise InvalidInput("race: it has no calls; write ctx.race(first.s(), second.s())")
        children = await self._run_children(calls, Quorum(1, cancel_rest=True))
        winner = next(child for child in children if child[1])
        return await self._result_of(*winner)

    async def _result_of(self, run: Run[Any], succeeded: bool, travelled: ChildResult | None) -> Any:
        """Return the result of a child that has ended, if it succeeded: as it travelled, or read from the child."""
        if not succeeded:
            return None
        if travelled is not None:
            return run.decode(travelled.payload)
        return await Run.result(run)  # not ChildRun.result: no gate is needed

    async def _run_children(
        self, calls: Sequence[Call[Any]], join: Join
    ) -> list[tuple[Run[Any], bool, ChildResult | None]]:
        """Spawn children and wait for the join; return each child, whether it succeeded before, and its result."""
        from flowfabric.sdk.task import as_call

        if not calls:
            return []
        calls = [as_call(call) for call in calls]
        for call in calls:
            if call.options.key is not None:
                raise InvalidInput(
                    f"key: {call.options.key!r} may be that of a run with another parent; a child that is waited for "
                    "is identified by its place in the function and needs no key"
                )
        runs = await self._spawn(calls)
        ids = tuple(run.id for run in runs)
        need = join.required_successes(len(ids))
        await self.durable.begin_operation()
        gate = self.durable.next_gate_name("children")
        memo = await self._wait_for_children(gate, ids, need)
        ended, results = _outcomes_by_child(ids, memo), results_of(memo)
        if join.cancel_rest:
            rest = [run.id for run in runs if run.id not in ended]
            await self.engine.cancel_children(self.handle, rest, reason="the others were enough")
        if outcome_of_children(ended.values(), len(ids), need) is not GateOutcome.SATISFIED:
            failed = next(run for run in runs if ended.get(run.id, "success") != "success")
            await read_child(self.durable, gate, failed)  # raises with its reason
            raise RunFailed(failed.id, failed.task, "too few children succeeded")
        return [(run, ended.get(run.id) == "success", results.get(run.id)) for run in runs]

    async def _wait_for_children(self, name: str, ids: tuple[str, ...], need: int) -> GateMemo:
        """Wait until it is decided whether enough children succeed; return what is known then."""
        memo = await self._children_gate(name, ids, need)
        if outcome_of_children(_outcomes_by_child(ids, memo).values(), len(ids), need) is None:
            self.durable.report_mismatch(
                f"{name} is recorded with other children; the new ones are waited for. Was a gather added, moved or "
                "changed? Let runs of the old function finish first"
            )
            other_name = f"{name}:{self._derive_uuid(name, *ids)}"
            memo = await self._children_gate(other_name, ids, need)
        return memo

    async def _children_gate(self, name: str, ids: tuple[str, ...], need: int) -> GateMemo:
        return await self.durable.open_and_wait(GateArgs(name=name, kind=GateKind.CHILDREN, children=ids, need=need))

    def _derive_uuid(self, name: str, *parts: object) -> uuid.UUID:
        return uuid.uuid5(uuid.NAMESPACE_OID, "|".join(map(str, (self.origin, name, *parts))))

    def _child_id(self, name: str) -> str:
        return f"{{fp:{partition_of(ExecutionId(self.run_id))}}}:{self._derive_uuid(name, 0)}"


def _outcomes_by_child(ids: tuple[str, ...], memo: GateMemo) -> dict[str, str]:
    """Return the outcomes of these children that the gate knew when it closed."""
    votes = [] if memo.votes is None else msgspec.json.decode(memo.votes, type=list[Vote])
    outcomes = {vote.member: vote.outcome for vote in votes}
    return {child: outcomes[child] for child in ids if child in outcomes}


class ChildRun(Run[T]):
    """A run that a handler spawned. While the parent holds its lease, it may cancel the child as its parent."""

    def __init__(self, run_id: str, task: str, codec: ValueCodec, parent: ContextWaits) -> None:
        super().__init__(run_id, task, codec, parent.app, namespace=parent.app.namespace)
        self._parent = parent

    async def result(self, timeout: Duration | None = None) -> T:
        """Return the child's result, as `Run.result` does. Frees the parent's slot, unless the wait is short."""
        timeout_s = to_seconds(timeout)
        if (timeout_s is not None and timeout_s * 1000 <= MAX_INLINE_WAIT_MS) or not self._parent.may_park:
            return await super().result(timeout)
        durable = self._parent.durable
        await durable.begin_operation()
        gate = durable.next_gate_name(f"result:{self.id.rpartition(':')[2]}")
        memo = await durable.open_and_wait(
            GateArgs(
                name=gate,
                kind=GateKind.CHILDREN,
                children=(self.id,),
                expires_in_ms=None if timeout_s is None else round(timeout_s * 1000),
            )
        )
        if memo.ended_as is GateOutcome.TIMED_OUT:
            raise self.timeout_error(timeout_s)
        if (travelled := results_of(memo).get(self.id)) is not None:
            return self.decode(travelled.payload)
        return await read_child(durable, gate, self)

    async def cancel(self, reason: str = "") -> None:
        """Cancel the child, whatever its state. Idempotent."""
        try:
            answer = await self._parent.engine.cancel_children(self._parent.handle, (self.id,), reason=reason)
        except (StateError, ContentionError):  # the parent has lost its lease: cancel with the rights of any client
            await super().cancel(reason)
            return
        if answer.ended:
            raise await self._not_active_error()

    async def _not_active_error(self) -> ExecutionNotActive:
        outcome = await self._parent.engine.await_end(self.id)
        return ExecutionNotActive(
            terminal_outcome=TerminalOutcome.NONE if outcome is None else outcome.outcome,  # None: replayed meanwhile
            lease_epoch=0,
            lifecycle_phase=LifecyclePhase.TERMINAL,
            attempt_id=None,
            execution_id=self.id,
        )
