"""What a handler can wait for: time, messages, people, children. Every wait that is not short frees the slot."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import msgspec

from flowfabric.engine.types import Count, CountKind, GateArgs, check_schema, outcome_of_children, schema_tag
from flowfabric.errors import ContentionError, ExecutionNotActive, FabricError, InvalidInput, StateError
from flowfabric.ids import ExecutionId, partition_of
from flowfabric.model.gate import GateKind, GateMemo, GateOutcome, Vote
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.sdk import validation
from flowfabric.sdk.approvals import Approval
from flowfabric.sdk.durations import Duration, to_ms, to_seconds
from flowfabric.sdk.exceptions import RunFailed
from flowfabric.sdk.joins import AllOf, Join, Quorum
from flowfabric.sdk.run import Run
from flowfabric.sdk.serialization.values import ValueCodec, from_json, incoming_codec

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine
    from flowfabric.handles import Handle
    from flowfabric.sdk.context import Context
    from flowfabric.sdk.durable.attempt import DurableAttempt
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.task import Call, Task

T = TypeVar("T")
V = TypeVar("V")
P = ParamSpec("P")

ALL = AllOf()
MAX_INLINE_WAIT_MS = 1000  # a sleep this short is not worth giving the slot back


class ContextWaits(ABC):
    """The waits of a context."""

    app: Fabric
    engine: Engine
    run_id: str

    @property
    @abstractmethod
    def _itself(self) -> Context:
        """The context of which these are the waits."""

    @property
    @abstractmethod
    def handle(self) -> Handle:
        """The lease under which this attempt runs."""

    @property
    @abstractmethod
    def durable(self) -> DurableAttempt:
        """What earlier attempts left behind."""

    @property
    @abstractmethod
    def may_park(self) -> bool:
        """Whether the code that asks is the handler itself or a branch of it, where a wait can put the run away."""

    async def sleep(self, length: Duration) -> None:
        """Let time pass; the slot is free meanwhile, and the time goes on when the process does not."""
        length_ms = to_ms(length, "sleep")
        if length_ms <= MAX_INLINE_WAIT_MS:
            await asyncio.sleep(length_ms / 1000)
            return
        name = self.durable.next_gate_name("sleep")
        await self.durable.open_and_wait(GateArgs(name=name, kind=GateKind.TIMER, expires_in_ms=length_ms))

    @overload
    async def receive(self, name: str, shape: type[T]) -> T: ...
    @overload
    async def receive(self, name: str, shape: type[T], *, timeout: Duration | None) -> T | None: ...
    @overload
    async def receive(self, name: str, shape: Any = Any, *, timeout: Duration | None = None) -> Any: ...
    async def receive(self, name: str, shape: Any = Any, *, timeout: Duration | None = None) -> Any:
        """The next message sent under this name, sent before or after; None when none came in time."""
        asked = incoming_codec(shape, f"receive {name}")
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
        return asked.load(from_json(memo.payload or b"null"), name)

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
        """Ask people: a question with one signed link per approver, so that no link can vote twice.

        The links stay good over crashes and deploys. Await the approval for the votes. `show` is what the page
        behind a link tells of what is decided.
        """
        validation.validate_name(name)
        count = approvers if approvers is not None else max(need, 1)
        if not 1 <= need <= count:
            raise InvalidInput(f"approval: {need} votes cannot come from {count} links")
        asked = incoming_codec(shape, f"approval {name}")
        schema = asked.schema()  # what the page behind a link asks for
        if schema and (refused := check_schema(schema)):
            raise InvalidInput(f"approval {name}: {refused.detail}")
        told = {} if show is None else {"ff.show": ValueCodec(Any).to_json(show, "show").decode()}
        gate = self.durable.next_gate_name(f"approval:{name}")
        points = tuple((str(self._derived(gate, number)), f"{name}.{number + 1}") for number in range(count))
        kind = CountKind.DISTINCT_WAITPOINTS if distinct else CountKind.DISTINCT_SIGNALS
        if self.app.on_approval is not None:
            self.app.on_approval(self._itself, name, shape)
        opened = await self.engine.open_gate(
            self.handle,
            GateArgs(
                name=gate,
                kind=GateKind.SIGNALS,
                condition=Count(n=need, count_kind=kind, waitpoints=tuple(key for _, key in points)),
                waitpoints=points,
                expires_in_ms=None if expires is None else to_ms(expires, "expires"),
            ),
        )
        if schema:
            told[schema_tag(name)] = schema
        if told and not isinstance(opened, GateMemo):
            await self.engine.set_tags(self.handle, told)
        return Approval(
            self.durable,
            asked,
            opened,
            base_url=self.app.public_url,
            run_id=self.run_id,
            points=[point for point, _ in points],
        )

    # -- children -------------------------------------------------------------------------------------------------

    @overload
    async def spawn(self, call: Call[T]) -> Run[T]: ...
    @overload
    async def spawn(self, call: Task[P, T], *args: P.args, **kwargs: P.kwargs) -> Run[T]: ...
    async def spawn(self, call: Any, *args: Any, **kwargs: Any) -> Run[Any]:
        """Submit a child: a task with its arguments, or a call made with `s`.

        Its id is derived from where it stands, so that no crash can make two of it. Awaiting its result frees the slot.
        """
        from flowfabric.sdk.task import as_call

        [run] = await self._spawn([as_call(call, *args, **kwargs)])
        return run

    async def _spawn(self, calls: Sequence[Call[Any]]) -> list[Run[Any]]:
        asks = []
        for call in calls:
            place = self.durable.next_gate_name(f"child:{call.task.name}")
            arguments = call.task.signature.bind(call.args, call.kwargs)
            ask = await call.task.build_create(
                self.engine, arguments, options=call.options, execution_id=self._child_id(place)
            )
            asks.append(msgspec.structs.replace(ask, creator_identity=self.run_id, parent_id=self.run_id))
        runs: list[Run[Any]] = []
        for answer, ask, call in zip(await self.engine.create_executions(asks), asks, calls, strict=True):
            if isinstance(answer, FabricError):
                raise answer
            known = (answer.execution_id, call.task.name, call.task.signature.result_codec)
            # Under a key somebody else's run may stand for this one: it has another parent, to whom its end is told.
            is_ours = answer.execution_id == ask.execution_id
            runs.append(ChildRun(*known, self) if is_ours else call.task.own_run(answer.execution_id, created=False))
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
    async def gather(self, *several: Any, join: Join = ALL) -> list[Any]:
        """Wait for several things at once: children given as calls, or waits and steps of this function.

        A child that the join did not need has None in its place.
        """
        from flowfabric.sdk.task import child_calls

        calls = child_calls(several)
        if calls is not None:
            ended = await self._children(calls, join)
            return [await Run.result(run) if won else None for run, won in ended]  # which has ended: nobody waits
        return await self.durable.gather(several)

    async def race(self, *calls: Call[T]) -> T:
        """The first child that succeeds; the others are cancelled."""
        if not calls:
            raise InvalidInput("race: nobody runs; write ctx.race(first.s(), second.s())")
        ended = await self._children(calls, Quorum(1, cancel_rest=True))
        winner: Run[T] = next(run for run, won in ended if won)
        return await Run.result(winner)

    async def _children(self, calls: Sequence[Call[Any]], join: Join) -> list[tuple[Run[Any], bool]]:
        """Each child, and whether it succeeded before the join was done."""
        from flowfabric.sdk.task import as_call

        if not calls:
            return []
        calls = [as_call(one) for one in calls]
        for call in calls:
            if call.options.key is not None:
                raise InvalidInput(
                    f"key: {call.options.key!r} may be that of a run with another parent; a child that is waited for "
                    "is known by where it stands and needs no key"
                )
        runs = await self._spawn(calls)
        ids = tuple(run.id for run in runs)
        need = join.required_successes(len(ids))
        ended = await self._ends(self.durable.next_gate_name("children"), ids, need)
        if join.cancel_rest:
            rest = [run.id for run in runs if run.id not in ended]
            await self.engine.cancel_children(self.handle, rest, reason="the others were enough")
        if outcome_of_children(ended.values(), len(ids), need) is not GateOutcome.SATISFIED:
            failed = next(run for run in runs if ended.get(run.id, "success") != "success")
            await Run.result(failed)  # raises with its reason
            raise RunFailed(failed.id, failed.task, "too few children succeeded")
        return [(run, ended.get(run.id) == "success") for run in runs]

    async def _ends(self, name: str, ids: tuple[str, ...], need: int) -> dict[str, str]:
        """How the children ended that have when it is decided whether enough of them succeed."""
        ended = _ends_among(ids, await self._gate_of(name, ids, need))
        if outcome_of_children(ended.values(), len(ids), need) is None:
            self.durable.report_mismatch(
                f"{name} is remembered with other children; those of now are waited for. Was a gather added, moved or "
                "changed? Let runs of the old function finish first"
            )
            ended = _ends_among(ids, await self._gate_of(f"{name}:{self._derived(name, *ids)}", ids, need))
        return ended

    async def _gate_of(self, name: str, ids: tuple[str, ...], need: int) -> GateMemo:
        return await self.durable.open_and_wait(GateArgs(name=name, kind=GateKind.CHILDREN, children=ids, need=need))

    def _derived(self, place: str, *parts: object) -> uuid.UUID:
        return uuid.uuid5(uuid.NAMESPACE_OID, "|".join(map(str, (self.run_id, place, *parts))))

    def _child_id(self, place: str) -> str:
        return f"{{fp:{partition_of(ExecutionId(self.run_id))}}}:{self._derived(place, 0)}"


def _ends_among(ids: tuple[str, ...], memo: GateMemo) -> dict[str, str]:
    """The ends of these children that the gate knew of when it closed."""
    votes = [] if memo.votes is None else msgspec.json.decode(memo.votes, type=list[Vote])
    ended = {vote.member: vote.outcome for vote in votes}
    return {child: ended[child] for child in ids if child in ended}


class ChildRun(Run[T]):
    """A run that a handler spawned. While that works, it may cancel the child without being an operator."""

    def __init__(self, run_id: str, task: str, shape: ValueCodec, parent: ContextWaits) -> None:
        super().__init__(run_id, task, shape, parent.app, namespace=parent.app.namespace)
        self._parent = parent

    async def result(self, timeout: Duration | None = None) -> T:
        """What the child returned, as of any run. The parent's slot is free meanwhile, unless the wait is short."""
        longest_s = to_seconds(timeout)
        if (longest_s is not None and longest_s * 1000 <= MAX_INLINE_WAIT_MS) or not self._parent.may_park:
            return await super().result(timeout)
        durable = self._parent.durable
        memo = await durable.open_and_wait(
            GateArgs(
                name=durable.next_gate_name(f"result:{self.id.rpartition(':')[2]}"),
                kind=GateKind.CHILDREN,
                children=(self.id,),
                expires_in_ms=None if longest_s is None else round(longest_s * 1000),
            )
        )
        if memo.ended_as is GateOutcome.TIMED_OUT:
            raise self.timeout_error(longest_s)
        return await super().result()

    async def cancel(self, reason: str = "") -> None:
        """End it, whatever it is doing; again is fine."""
        try:
            done = await self._parent.engine.cancel_children(self._parent.handle, (self.id,), reason=reason)
        except (StateError, ContentionError):  # its parent has no lease any more: it asks like anybody
            await super().cancel(reason)
            return
        if done.ended:
            raise await self._not_active()

    async def _not_active(self) -> ExecutionNotActive:
        ended = await self._parent.engine.await_end(self.id)
        outcome = TerminalOutcome.NONE if ended is None else ended.outcome  # none: it was given another life meanwhile
        return ExecutionNotActive(
            terminal_outcome=outcome,
            lease_epoch=0,
            lifecycle_phase=LifecyclePhase.TERMINAL,
            attempt_id=None,
            execution_id=self.id,
        )
