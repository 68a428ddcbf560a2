"""Parking: when a durable function releases its lease, and what happens to its tasks then.

A run parks once every branch is blocked: it waits, has finished, or has made a task that lives. Until then a wait keeps
the lease, so that a step in another branch finishes and is recorded first. A call of the context that is in flight
prevents parking, unless a wait is inside it. While a function has tasks of its own making, parking first lets the loop
turn, so that a task that is ready makes its next call.

A task of the function's own that runs on without a call, such as the keeper of a connection pool, delays parking by
`STALL_S` at most.

Parking does not raise through user code: the waits never return, the lease is released, and the handler is cancelled.
Code in a `finally` block sees that cancellation, and the context refuses to record anything more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from flowfabric.errors import InvalidInput
from flowfabric.event_loop import start_task
from flowfabric.model.gate import GateMemo
from flowfabric.sdk.durable.branches import (
    Branch,
    BranchTree,
    Scope,
    current_branch,
    current_scope,
    is_branch,
    untracked,
)

logger = logging.getLogger("flowfabric.durable")

TURNS = 5  # iterations of the loop, after which a task that is ready has made its next call
STALL_S = 10.0

ClosedGates = Mapping[str, GateMemo]


class HandlerUnwound(BaseException):
    """Unwinds a plain function that has to wait. Not an `Exception`, so that `except Exception` does not catch it."""


class ContextCall(Scope):
    """A call of the context. It is in flight, and prevents parking, unless a wait is inside it."""

    __slots__ = ("is_expired", "outer", "waits")

    def __init__(self, tree: BranchTree, outer: ContextCall | None) -> None:
        self.tree = tree
        self.outer = outer
        self.waits = 0
        self.is_expired = False  # its time is over, although a thread still runs in it


class Wait:
    """A branch that waits for a gate."""

    __slots__ = ("branch", "call", "closed", "gate", "in_thread")

    def __init__(self, gate: str, branch: Branch, call: ContextCall | None, *, in_thread: bool) -> None:
        self.gate = gate
        self.branch = branch
        self.call = call
        self.in_thread = in_thread
        self.closed: asyncio.Future[GateMemo] = asyncio.get_running_loop().create_future()

    def unwind(self, reason: str) -> None:
        """End the wait without an outcome: a task is cancelled, a thread gets `HandlerUnwound`."""
        if self.closed.done():
            return
        if self.in_thread:
            self.closed.set_exception(HandlerUnwound(reason))
        else:
            self.closed.cancel(reason)


class Parker:
    """The calls in flight and the waits of one attempt."""

    def __init__(
        self, tree: BranchTree, run_id: str, park: Callable[[tuple[str, ...]], Awaitable[ClosedGates | None]]
    ) -> None:
        """Prepare an attempt. `park` parks the run on gates; it returns None, or the memos of gates that closed."""
        self.is_parked = False
        self._is_closed = False
        self._tree = tree
        self._run_id = run_id
        self._park = park
        self._waits: dict[Wait, None] = {}
        self._left: dict[Wait, None] = {}  # waits that an earlier attempt left, and that this one has to leave again
        self._calls_in_flight = 0  # calls in flight, without those that contain a wait
        self._changes = 0  # counts calls and waits that began or ended, and branches that finished
        self._task: asyncio.Task[None] | None = None  # the task that decides whether to park, and parks
        self._committing: asyncio.Future[None] | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._is_cut_off = False  # True once the tasks that still run have had their time
        tree.on_finished = self._on_finished

    @property
    def is_over(self) -> bool:
        """True if the function has finished, or the run was parked."""
        return self.is_parked or self._is_closed

    def _is_over_for_caller(self) -> bool:
        """True also for a thread whose branch has lost a race or was cancelled."""
        return self.is_parked or self._is_closed or current_branch(self._tree).is_done

    # -- calls ----------------------------------------------------------------------------------------------------

    async def begin_call(self) -> ContextCall:
        """Prevent parking until `end_call`, except for a wait inside; raises if the function is over."""
        while self._committing is not None:
            await asyncio.shield(self._committing)
        outer = self._current_call()
        if self._is_over_for_caller() or (outer is not None and any(call.is_expired for call in _calls(outer))):
            raise asyncio.CancelledError("the function is over")
        self._calls_in_flight += 1
        self._note_operation()
        return ContextCall(self._tree, outer)

    def end_call(self, call: ContextCall) -> None:
        """Allow parking again."""
        if not call.waits:
            self._calls_in_flight -= 1
        self._note_operation()
        if self._waits:
            self._check()

    @asynccontextmanager
    async def without_parking(self) -> AsyncIterator[ContextCall]:
        """Prevent parking during the block, except for a wait inside it."""
        call = await self.begin_call()
        token = current_scope.set(call)
        try:
            yield call
        finally:
            current_scope.reset(token)
            self.end_call(call)

    def _current_call(self) -> ContextCall | None:
        scope = current_scope.get()
        return scope if isinstance(scope, ContextCall) and scope.tree is self._tree else None

    def _is_in_thread(self) -> bool:
        scope = current_scope.get()
        return self._tree.in_thread or (
            scope is not None and scope.tree is self._tree and not isinstance(scope, ContextCall)
        )

    # -- waits ----------------------------------------------------------------------------------------------------

    def check_task(self) -> None:
        """Refuse a wait in a task that has no branch of its own: it would be taken for its maker."""
        if self._tree.in_thread or is_branch(self._tree):
            return
        scope = current_scope.get()
        if scope is None or scope.tree is not self._tree:
            raise InvalidInput(
                "a wait in a task that the function made itself: this event loop has a task factory of its own, so the "
                "task has no name that a later attempt could find; use ctx.gather here"
            )

    def parks_with(self, branch: Branch) -> bool:
        """True if the run parks as soon as this branch waits, which is the only active one."""
        return not self._tree.in_thread and self._tree.active == 1 and not self._calls_in_flight and branch.is_active

    async def wait(self, gate: str) -> GateMemo:
        """Wait until a gate closes; the run parks if everything is blocked."""
        wait = Wait(gate, current_branch(self._tree), self._current_call(), in_thread=self._is_in_thread())
        if self._is_over_for_caller():
            raise asyncio.CancelledError("the function is over")
        if not wait.branch.may_wait:  # `asyncio.wait_for` before Python 3.12 can swallow the cancellation
            raise asyncio.CancelledError("the branch was cancelled")
        self._waits[wait] = None
        wait.branch.begin_wait()
        for call in _calls(wait.call):
            call.waits += 1
            self._calls_in_flight -= call.waits == 1
        self._note_operation()
        self._check()
        try:
            return await wait.closed
        finally:
            self._end(wait)

    async def wait_until_left(self, branch: Branch) -> None:
        """Wait until the function cancels the caller. This is no wait for a gate, and does not let the run park."""
        wait = Wait("", branch, None, in_thread=self._is_in_thread())
        if self.is_over:
            raise asyncio.CancelledError("the function is over")
        self._left[wait] = None
        try:
            await wait.closed
        finally:
            del self._left[wait]

    def unwind(self, members: list[Branch]) -> None:
        """End the waits of threads in these branches: cancelling a task does not reach its thread."""
        for wait in [*self._waits, *self._left]:
            if wait.in_thread and any(wait.branch is member or member.surrounds(wait.branch) for member in members):
                wait.unwind("another branch failed")
                self._end(wait)

    def _end(self, wait: Wait) -> None:
        """Count the waiter as active again, from the moment at which its outcome is known."""
        if wait not in self._waits:
            return
        del self._waits[wait]
        wait.branch.end_wait()
        for call in _calls(wait.call):
            call.waits -= 1
            self._calls_in_flight += call.waits == 0
        self._note_operation()

    # -- parking --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Note that the function has finished: its own tasks record nothing more, and cannot park the run."""
        self._is_closed = True
        if self._stall is not None:
            self._stall.cancel()
        if self._task is not None and not self.is_parked:
            self._task.cancel()
        for wait in (*self._waits, *self._left):
            if wait.in_thread or _is_own(wait.branch):
                wait.unwind("the function is over")

    def waiting_gates(self) -> tuple[str, ...]:
        """Return the gates that branches wait for."""
        return tuple(dict.fromkeys(wait.gate for wait in self._waits))

    def end(self) -> None:
        """End the handler wherever it is: its lease was released."""
        self.is_parked = True
        self._discard()

    def _note_operation(self) -> None:
        self._changes += 1
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _on_finished(self) -> None:
        self._changes += 1
        if self._waits:
            self._check()

    def _is_blocked(self) -> bool:
        if self.is_over or not self._waits or self._calls_in_flight:
            return False
        return self._is_cut_off or not self._tree.can_go_on()

    def _check(self) -> None:
        """Start to park if nothing can make progress; start the clock if only tasks of the function's own can."""
        if not self._waits or self._calls_in_flight or self._task is not None or self.is_over:
            return
        loop = asyncio.get_running_loop()
        if not self._tree.can_go_on():
            with untracked():
                self._task = start_task(self._park_while_blocked())
        elif self._stall is None and self._tree.own_living:
            self._stall = loop.call_later(STALL_S, self._on_stall)

    def _on_stall(self) -> None:
        """Park although tasks of the function's own run on; the handler and members of `ctx.gather` are waited for."""
        self._stall = None
        active = list(self._tree.active_branches())
        if self._task is not None or self.is_over or not self._waits or self._calls_in_flight:
            return
        leaving = {wait.branch for wait in self._left}
        if not all(branch.is_own and branch not in leaving for branch in active):
            return  # the clock starts again with the next operation
        for branch in active:
            logger.warning(
                "stall: task %r of run %s went on for %g s beside waits; it was cut off",
                branch.title,
                self._run_id,
                STALL_S,
            )
        self._is_cut_off = True
        with untracked():
            self._task = start_task(self._park_while_blocked())

    async def _park_while_blocked(self) -> None:
        try:
            while self._is_blocked():
                # A task that was ready may have begun a pause meanwhile.
                if self._tree.own_living and not (await self._is_settled() and self._is_blocked()):
                    continue
                await self._try_to_park()
        except asyncio.CancelledError:  # the function is over
            raise
        except BaseException as error:
            for wait in list(self._waits):  # cancel all waits: nothing else would wake them up
                if not wait.closed.done():
                    wait.closed.set_exception(error)
                self._end(wait)
        finally:
            self._is_cut_off = False
            self._task = None
        self._check()

    async def _is_settled(self) -> bool:
        """Let the loop turn; return True if nothing happened in the function meanwhile."""
        changes = self._changes
        for _ in range(TURNS):
            await asyncio.sleep(0)
        return changes == self._changes

    async def _try_to_park(self) -> None:
        self._committing = asyncio.get_running_loop().create_future()
        try:
            memos = await self._park(tuple(dict.fromkeys(wait.gate for wait in self._waits)))
            if memos is None:
                self.is_parked = True
        finally:
            self._committing.set_result(None)
            self._committing = None
        if memos is None:
            self._discard()
            return
        for wait in list(self._waits):
            if wait.gate in memos:
                if not wait.closed.done():
                    wait.closed.set_result(memos[wait.gate])
                self._end(wait)

    def _discard(self) -> None:
        """End the handler where it waits, since its lease is released."""
        root: Any = self._tree.root.task
        if root is not None:
            root.cancel("parked")
            self.close()
            return
        for wait in (*self._waits, *self._left):
            wait.unwind("parked")


def _calls(call: ContextCall | None) -> Iterator[ContextCall]:
    while call is not None:
        yield call
        call = call.outer


def _is_own(branch: Branch) -> bool:
    """True for a task of the function's own making, and for branches below it."""
    at: Branch | None = branch
    while at is not None and not at.is_own:
        at = at.maker
    return at is not None
