"""The replay of one durable function: its operations, its branches and its waits.

A durable function runs from the top on every attempt and after every wait. Recorded steps return their results and
closed gates return their outcomes, so the function arrives where it was. `branches` says who performs an operation,
`ledger` what the run remembers of it, and `parker` when the run releases its lease.

A failure that the function catches and moves past has happened, and so has leaving a wait. Both are recorded before the
next durable operation begins, and with a park. A failure that ends the attempt is not recorded: its step runs again.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.batcher import Batcher
from flowfabric.engine.operations.durable import OpenedGate, ParkResult
from flowfabric.engine.types import LeftOperation, MemoArgs
from flowfabric.errors import InvalidInput
from flowfabric.model.gate import GateMemo, StepMemo, StepState
from flowfabric.sdk.durable.branches import (
    Branch,
    BranchTree,
    as_coroutine,
    current_branch,
    find_branch,
    is_branch,
    start_branch,
)
from flowfabric.sdk.durable.children import Spawner
from flowfabric.sdk.durable.code_mismatch import CodeVersion, Holds, Pin
from flowfabric.sdk.durable.ledger import INSIDE, Ledger, NonDeterministic, Pending, Place
from flowfabric.sdk.durable.parker import TURNS, ClosedGates, HandlerUnwound, Parker
from flowfabric.sdk.serialization.failures import decode_failure

if TYPE_CHECKING:
    from flowfabric.engine.types import GateArgs
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.handles import Handle

__all__ = ["DurableAttempt", "HandlerUnwound", "NonDeterministic", "SimulatedCrash", "is_simulated_crash"]

MAX_RAISED = 100  # failures of steps that are recognised when one of them ends the attempt
MAX_CAUSES = 20
MAX_RAISE_S = 1.0  # how long an operation lets a thread raise what its step raised, and end
MAX_TURNS = 500  # turns of the loop during which an operation lets failures unwind while tasks continue to end

current_step: contextvars.ContextVar[str] = contextvars.ContextVar("flowfabric_step", default="")  # "" outside


class SimulatedCrash(BaseException):
    """Simulates the death of the process in tests: nothing is written afterwards, and the lease expires."""


def is_simulated_crash(failure: BaseException) -> bool:
    """True for a simulated crash, and for an exception group that contains one."""
    if isinstance(failure, BaseExceptionGroup):
        return failure.subgroup(SimulatedCrash) is not None
    return isinstance(failure, SimulatedCrash)


class DurableAttempt:
    """The replay state of one attempt."""

    def __init__(
        self,
        engine: EngineAPI,
        handle: Handle,
        branches: BranchTree,
        *,
        flush: Callable[[], Awaitable[None]],
        reach: Callable[[str, str], Awaitable[None]],
        code: CodeVersion,
    ) -> None:
        """Prepare an attempt; nothing is read yet.

        `flush` waits for output in flight. `reach` marks a point at which a test can inject a crash. `code` is the
        function that runs, and what it does when it does not fit what the run remembers.
        """
        self.engine = engine
        self.handle = handle
        self.branches = branches
        self.holds = Holds(self, code)
        self.ledger = Ledger(
            engine,
            handle,
            branches,
            strict=self.holds.is_strict,
            on_skipped=self.holds.on_skipped,
            on_left=self.wait_until_left,
        )
        self._pin = Pin(self, code)
        self.parker = Parker(branches, handle.fields.execution_id, self._park)
        self.parked: ParkResult | None = None
        self.has_continued = False  # the next life has begun
        self._flush = flush
        self.reach = reach
        self._record_lock = asyncio.Lock()
        self._raised: OrderedDict[int, tuple[BaseException, Place | None]] = OrderedDict()
        self._releases: set[asyncio.Future[None]] = set()  # the blocks of `releasing` that have not ended
        self._raising: dict[Branch, asyncio.Future[None]] = {}  # threads whose step failed, until they go on or end
        self._on_parked: list[Callable[[], Awaitable[Any]]] = []
        self._unopened: dict[str, GateArgs] = {}  # gates that the park opens
        self._last_received: dict[Branch, str] = {}  # gates of messages after which the branch did nothing durable
        branches.on_ended = self._on_branch_ended

    @cached_property
    def children(self) -> Spawner:
        """Creates the children of the run; most functions have none."""
        return Spawner(self)

    @cached_property
    def _opener(self) -> Batcher[GateArgs, GateMemo | None]:
        return Batcher(self._open_gates)

    # -- operations -----------------------------------------------------------------------------------------------

    async def begin_operation(self) -> Branch:
        """Begin a durable operation: read what the run remembers, and record what the function has moved past.

        That is at most what was pending when the function came to the operation. What fails or is left in another
        branch while it begins came later: the operation says nothing about it.
        """
        pending = list(self.ledger.pending)
        if self._raising:
            self._end_raising(current_branch(self.branches))
        if not self.ledger.is_loaded:  # a call that does nothing costs each step a microsecond
            await self.ledger.load()
        if not self._pin.is_done:
            await self._pin.ensure()
        branch = current_branch(self.branches)
        self._last_received.pop(branch, None)
        if pending:
            await self._move_past(branch, pending)
        return branch

    def next_occurrence(self, label: str) -> Place:
        """Return the qualified name for a label in this branch, and how often that name occurred before."""
        return self.ledger.next_occurrence(current_branch(self.branches), label)

    def next_place(self, label: str) -> Place:
        """Return the place of the next step, wait or child with this label.

        One inside a step has a prefix: it says nothing about the order of the branch, because a step that has not ended
        is run again from its beginning.
        """
        name, occurrence = self.ledger.next_occurrence(current_branch(self.branches), label)
        return (f"{INSIDE}{name}" if current_step.get() and not self.branches.by_arrival else name), occurrence

    def next_gate_name(self, label: str) -> str:
        """Return the name of the next gate with this label in this branch."""
        name, occurrence = self.next_place(label)
        return f"{name}#{occurrence}"

    def report_mismatch(self, message: str) -> None:
        """Report that the function no longer matches its records: by a warning, or if strict, by an error."""
        self.ledger.report_mismatch(message)

    async def record_step(
        self,
        place: Place,
        result: bytes,
        *,
        digest: str | None = None,
        state: StepState = StepState.DONE,
        started_at: int | None = None,
    ) -> StepMemo:
        """Record the result of a step, or another state of it."""
        name, occurrence = place
        return await self.engine.record_step(
            self.handle,
            name,
            occurrence,
            result,
            encoding="json",
            digest=digest,
            state=state,
            number=self.ledger.next_number(),
            started_at=started_at,
        )

    # -- failures and leavings --------------------------------------------------------------------------------------

    def note_raised(self, failure: BaseException, place: Place | None) -> None:
        """Recognise a failure of a step when it ends the attempt. Without a place it ends the run in any case."""
        self._raised[id(failure)] = (failure, place)
        if len(self._raised) > MAX_RAISED:
            self._raised.popitem(last=False)

    def is_final(self, failure: BaseException) -> bool:
        """True if an attempt that ends with this failure is not retried: it would only reach it again.

        That is so for a remembered failure of a step, for what was raised from one, and for a step that has used up
        retries of its own.
        """
        if isinstance(failure, BaseExceptionGroup):
            return any(self.is_final(member) for member in failure.exceptions)
        cause: BaseException | None = failure
        for _ in range(MAX_CAUSES):
            if cause is None:
                break
            known, place = self._raised.get(id(cause), (None, None))
            if known is cause and (place is None or place in self.ledger.ends):
                return True
            cause = cause.__cause__
        return False

    def decode_remembered(self, place: Place, memo: StepMemo) -> Exception:
        """Return the failure that a step is remembered for."""
        failure = decode_failure(memo.result)
        self.note_raised(failure, place)
        return failure

    def note_left(self, branch: Branch, place: Place, *, is_gate: bool) -> None:
        """Note that the function stopped waiting for an operation."""
        if not self.parker.is_over:
            self.ledger.pending.append(Pending(branch, place, place[0], is_gate=is_gate))

    def _on_branch_ended(self, branch: Branch) -> None:
        """Note the waits that a branch leaves because it ended before this attempt came to them.

        A branch that was cancelled is left itself: it may have been between two operations, and must not come to the
        second one in a replay that is faster.
        """
        for gate in self.ledger.abandon_gates(branch):
            self.note_left(branch, (gate, 0), is_gate=True)
        is_cancelled = branch.task is not None and branch.task.cancelled()
        if is_cancelled and not self.branches.by_arrival and not self.ledger.has_left(branch):
            self.note_left(branch, (branch.name, 0), is_gate=False)

    def lose(self, losers: list[Branch]) -> list[Pending]:
        """End the losers of a race; return what they leave. No replay runs them again.

        That includes messages that they received, unless something durable followed: those go back to their mailbox.
        """

        def is_lost(branch: Branch) -> bool:
            return any(branch is loser or loser.surrounds(branch) for loser in losers)

        for loser in losers:
            loser.finish()
        self._forget([one for one in self.ledger.pending if is_lost(one.branch) and one.place == (one.branch.name, 0)])
        for branch, gate in self._last_received.items():
            if is_lost(branch):
                self.note_left(branch, (gate, 0), is_gate=True)
        return [one for one in self.ledger.pending if one.failure is one.result is None and is_lost(one.branch)]

    def pending_in(self, branch: Branch) -> list[Pending]:
        """Return what failed or was left in a branch and below it, and is not recorded yet."""
        return [one for one in self.ledger.pending if one.branch is branch or branch.surrounds(one.branch)]

    def note_ended(self, branch: Branch, place: Place, result: bytes = b"null") -> None:
        """Note that an operation has ended with a failure of the function; it counts once that is moved past."""
        if not self.parker.is_over:
            self.ledger.pending.append(Pending(branch, place, place[0], result=result))

    async def wait_until_left(self, branch: Branch) -> None:
        """Wait, at an operation that the function left before, until the function leaves it again."""
        await self.parker.wait_until_left(branch)

    async def _move_past(self, branch: Branch, pending: list[Pending]) -> None:
        """Record the failures and leavings that the function has moved past with an operation of this branch."""
        if any(not _is_passed(one, branch) for one in pending):
            await self._wait_for_unwinding()
            if self.parker.is_over:
                raise asyncio.CancelledError("the function is over")
        async with self.parker.without_parking():
            await self.record_pending(pending)

    async def _wait_for_unwinding(self) -> None:
        """Give the tasks that await a failed one their turns: they cancel the caller's branch, or end the function.

        A failure in nested groups ends one task after the other, with few turns of the loop between two of them. Where
        it leaves a reservation, it waits for the store. A thread takes as long as the system lets it.
        """
        quiet, ended = 0, self.branches.tasks_ended
        for _ in range(MAX_TURNS):
            if self._releases:
                await asyncio.wait(self._releases)
                quiet = 0
            if self._raising:
                await self._wait_for_threads()
                quiet = 0
            await asyncio.sleep(0)
            quiet = quiet + 1 if ended == self.branches.tasks_ended else 0
            ended = self.branches.tasks_ended
            if quiet == TURNS:
                break

    @contextmanager
    def releasing(self) -> Iterator[None]:
        """Let operations of other branches wait for the block, which a failure on its way out waits for.

        Nothing in the block may wait for another branch.
        """
        released = asyncio.get_running_loop().create_future()
        self._releases.add(released)
        try:
            yield
        finally:
            self._releases.remove(released)
            released.set_result(None)

    def note_failed(self, failed: Pending) -> None:
        """Keep the failure of a step pending until the function moves past it."""
        self.ledger.pending.append(failed)
        branch, task = failed.branch, failed.branch.task
        if self.branches.in_thread and task is not None:  # a member of a gather or race of a plain handler
            self._raising[branch] = asyncio.get_running_loop().create_future()
            task.add_done_callback(lambda _: self._end_raising(branch))

    def _end_raising(self, branch: Branch) -> None:
        if (raised := self._raising.pop(branch, None)) is not None:
            raised.set_result(None)

    async def _wait_for_threads(self) -> None:
        """Wait until each thread whose step failed has ended, or has caught the failure and begun another operation."""
        waiting = list(self._raising)
        await asyncio.wait([*self._raising.values()], timeout=MAX_RAISE_S)
        for branch in waiting:
            self._end_raising(branch)

    async def record_pending(self, pending: Iterable[Pending], *, memo: MemoArgs | None = None) -> StepMemo | None:
        """Record failures and leavings; with `memo`, the winner of a race, in the change of the leavings."""
        async with self._record_lock:
            chosen = [one for one in pending if one in self.ledger.pending]
            for one in chosen:
                if one.failure is not None:
                    await self._record_failure(one, one.failure)
                elif one.result is not None:
                    self.ledger.ends[one.place] = await self.record_step(one.place, one.result)
                    self._forget([one])
            # While the worker cancels the attempt, what is cancelled was not left by the function.
            left = [] if self.branches.is_ending() else [one for one in chosen if one.failure is one.result is None]
            if not left and memo is None:
                return None
            operations = {
                one.place: LeftOperation(
                    name=one.place[0],
                    occurrence=one.place[1],
                    is_gate=one.is_gate,
                    number=self.ledger.next_number(),
                )
                for one in left
            }
            for one in left:
                await self.reach(f"left:{one.label}", "before_effect")
            answer = await self.engine.leave_gates(self.handle, list(operations.values()), memo=memo)
            self._forget(left)
            for one in left:
                await self.reach(f"left:{one.label}", "after_commit")
            return answer

    async def _record_failure(self, one: Pending, failure: bytes) -> None:
        await self.reach(f"failed:{one.label}", "before_effect")
        memo = await self.record_step(
            one.place, failure, digest=one.digest, state=StepState.FAILED, started_at=one.started_at
        )
        if memo.state is not StepState.FAILED:
            raise RuntimeError(f"step {one.place[0]!r} has been recorded by another attempt meanwhile")
        self.ledger.ends[one.place] = memo
        self._forget([one])
        await self.reach(f"failed:{one.label}", "after_commit")

    def _forget(self, recorded: list[Pending]) -> None:
        self.ledger.pending = [one for one in self.ledger.pending if one not in recorded]

    # -- branches -------------------------------------------------------------------------------------------------

    async def gather(self, awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
        """Run branches concurrently. Each branch numbers its own steps and gates. The first failure cancels all."""
        members = [as_coroutine(member) for member in awaitables]
        try:
            await self.ledger.load()
        except BaseException:
            for member in members:
                member.close()
            raise
        name, occurrence = self.next_occurrence("gather")
        segments = {f"{name}#{occurrence}.{number}/": member for number, member in enumerate(members)}
        branches, tasks = self.start_branches(segments)
        for branch, task in zip(branches, tasks, strict=True):
            task.add_done_callback(partial(self._on_member_done, branch))
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            await self.end_branches(branches, tasks)
            raise
        finally:
            for branch in branches:
                branch.finish()

    def start_branches(
        self, members: dict[str, Coroutine[Any, Any, Any]]
    ) -> tuple[list[Branch], list[asyncio.Task[Any]]]:
        """Run coroutines as branches of the current one, under these names. The caller finishes the branches."""
        maker = current_branch(self.branches)
        # All branches exist before the first task starts: an eager task must not find its siblings missing and park.
        branches = [Branch(self.branches, maker, name.removeprefix(maker.name), is_own=False) for name in members]
        tasks = [start_branch(branch, member) for branch, member in zip(branches, members.values(), strict=True)]
        for task in tasks:
            task.add_done_callback(self._count_ended)
        return branches, tasks

    def _count_ended(self, _: asyncio.Task[Any]) -> None:
        self.branches.tasks_ended += 1

    def leave_branch(self, name: str) -> None:
        """Leave what an earlier attempt left open in a branch that this one does not run."""
        maker = current_branch(self.branches)
        Branch(self.branches, maker, name.removeprefix(maker.name), is_own=False).finish()

    async def end_branches(self, branches: list[Branch], tasks: list[asyncio.Task[Any]]) -> None:
        """Cancel branches, and wait until they have ended; raises a simulated crash in their cleanup."""
        for branch in branches:
            branch.is_cancelled = True
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        self.parker.unwind(branches)
        for end in ends:
            if isinstance(end, BaseException) and is_simulated_crash(end):
                raise end

    def _on_member_done(self, branch: Branch, task: asyncio.Task[Any]) -> None:
        """Finish a branch. One that failed stays active until its `gather` sees that, so nothing parks before."""
        if not task.cancelled() and task.exception() is None:
            branch.finish()
            if self.branches.on_finished is not None:
                self.branches.on_finished()

    def is_in_handler(self) -> bool:
        """True if the caller is the handler or a branch of it, not a step or a task without a name."""
        return not current_step.get() and not self.is_released and (self.branches.in_thread or is_branch(self.branches))

    @property
    def is_released(self) -> bool:
        """True if the run was parked or has continued as new: another attempt continues."""
        return self.parked is not None or self.has_continued

    def close(self) -> None:
        """Note that the function has finished: its own tasks record nothing more, and cannot park the run."""
        self.parker.close()

    # -- waits ----------------------------------------------------------------------------------------------------

    async def open_and_wait(self, args: GateArgs, *, on_parked: Callable[[], Awaitable[Any]] | None = None) -> GateMemo:
        """Open a gate and return its outcome. Parks the execution if everything is blocked, then calls `on_parked`."""
        self.parker.check_task()
        branch = current_branch(self.branches)
        self.ledger.reach_gate(args.name)
        if self.ledger.find_left_gate(branch, args.name):
            await self.wait_until_left(branch)
        memo = self.ledger.gates.get(args.name) or await self._open_and_wait(args, branch, on_parked)
        if memo.mailbox is not None:
            self._last_received[branch] = args.name
        return memo

    async def _open_and_wait(
        self, args: GateArgs, branch: Branch, on_parked: Callable[[], Awaitable[Any]] | None
    ) -> GateMemo:
        try:
            if self.ledger.find_open_gate(args.name) is None:
                numbered = _numbered(args, self.ledger.next_number())
                if self.parker.parks_with(branch):
                    self._unopened[args.name] = numbered
                else:
                    async with self.parker.without_parking():
                        memo = await self._opener.add(numbered)
                    if memo is not None:
                        return memo
            if on_parked is not None:
                self._on_parked.append(on_parked)
            return await self.parker.wait(args.name)
        except (asyncio.CancelledError, HandlerUnwound):
            self.note_left(branch, (args.name, 0), is_gate=True)
            raise
        finally:
            self._unopened.pop(args.name, None)

    async def _open_gates(self, gates: list[GateArgs]) -> list[GateMemo | Exception | None]:
        """Open gates in one change; return the memos of those that have closed."""
        try:
            memos = (await self.engine.open_gates(self.handle, tuple(gates))).memos
        except InvalidInput as invalid:
            if len(gates) == 1:
                return [invalid]
            return [one for gate in gates for one in await self._open_gates([gate])]
        return [memos.get(gate.name) for gate in gates]

    async def open_gate(self, args: GateArgs) -> OpenedGate | GateMemo:
        """Open a gate with links, or return the one that is open, or its outcome."""
        self.ledger.reach_gate(args.name)
        async with self.parker.without_parking():
            return await self.engine.open_gate(self.handle, _numbered(args, self.ledger.next_number()))

    async def wait_for_gate(self, opened: OpenedGate) -> GateMemo:
        """Wait for the outcome of a gate with links. If the function leaves this wait, the gate stays open."""
        branch = await self.begin_operation()
        self.parker.check_task()
        place = self.next_occurrence(f"await:{opened.name.removeprefix(branch.name)}")
        if self.ledger.find_left(place):
            await self.wait_until_left(branch)
        try:
            return await self.parker.wait(opened.name)
        except (asyncio.CancelledError, HandlerUnwound):
            self.note_left(branch, place, is_gate=False)
            raise

    async def _park(self, gates: tuple[str, ...]) -> ClosedGates | None:
        """Park on these gates; return the memos of those that closed meanwhile, or None if the run is parked."""
        await self._flush()
        if self.ledger.pending:
            await self.record_pending(self.ledger.pending)
        new = tuple(self._unopened[name] for name in gates if name in self._unopened)
        known = tuple(name for name in gates if name not in self._unopened)
        answer = await self.engine.open_gates_and_park(self.handle, new, names=known)
        if not isinstance(answer, ParkResult):
            return answer.memos
        self.parked = answer
        for callback in self._on_parked:
            await callback()
        return None


def _is_passed(pending: Pending, branch: Branch) -> bool:
    """True if an operation of this branch shows that the function has moved past a failure or a leaving."""
    return pending.branch is branch or (branch.surrounds(pending.branch) and pending.branch.is_done)


def _numbered(args: GateArgs, number: int) -> GateArgs:
    return args if args.number is not None else msgspec.structs.replace(args, number=number)


def is_in_step() -> bool:
    """True inside a step, which runs again from its beginning unless it has ended."""
    return bool(current_step.get())


def occurrence_scope() -> str:
    """Return the running step, or outside a step the branch: the scope in which occurrences are numbered."""
    if step := current_step.get():
        return step
    branch = find_branch()
    return "" if branch is None else branch.name
