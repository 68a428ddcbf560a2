"""Branches: the tasks of a handler, each with a name, so that an operation is identified by who performs it.

A handler is the root branch. Every asyncio task that a branch makes is a branch, too, named after its coroutine and how
many of these its maker made: `task:remind#0/`. The members of `ctx.gather` are branches by their position. Names of
steps and gates count within a branch, so tasks that libraries make between two of the handler's shift nobody.

A task factory on the worker's loop names the tasks. It wraps a factory that was set before. These are no branches:
tasks made inside a step or another call of the context, those of this library, and those of threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import GeneratorType
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

MAX_SEGMENT_CHARS = 100
MAX_PREFIX_BYTES = 600  # of the name of a branch; names of steps and gates have 1024 bytes in all
PACKAGE_PREFIX = f"{Path(__file__).parents[2]}{os.sep}"
SDK_PREFIX = f"{Path(__file__).parents[1]}{os.sep}"

TaskFactory = Callable[..., "asyncio.Future[Any]"]


class Branch:
    """A task of a handler, or the handler itself. It is active unless it waits, has finished, or has living tasks."""

    __slots__ = (
        "_children",
        "_made",
        "_name",
        "_segment",
        "_waits",
        "is_cancelled",
        "is_done",
        "is_own",
        "maker",
        "task",
        "tree",
    )

    def __init__(self, tree: BranchTree, maker: Branch | None, segment: str, *, is_own: bool) -> None:
        """Add a branch to its tree. `is_own`: a task that the function made, not a member of `ctx.gather`."""
        self.tree = tree
        self.maker = maker
        self.is_own = is_own
        self.task: asyncio.Future[Any] | None = None
        self.is_cancelled = False  # by the `gather` or race that it is a member of, which waits until it ends
        self._segment = segment
        self._name: str | None = None
        self._made: Counter[str] | None = None
        self._children = 0  # tasks that it made that live, or have made a task that lives
        self._waits = 0
        self.is_done = False  # True once its task has finished
        tree.add(self)
        if maker is not None:
            maker._add(children=1)

    @property
    def name(self) -> str:
        """The prefix of the names of its operations. In a run of before branches, own tasks share their maker's."""
        if self.maker is None:
            return ""
        if self._name is not None:
            return self._name
        by_arrival = self.tree.by_arrival
        name = self.maker.name if self.is_own and by_arrival else _shortened(f"{self.maker.name}{self._segment}")
        if by_arrival is not None:
            self._name = name
        return name

    @property
    def title(self) -> str:
        """Its own part of the name, for people: the name of its coroutine."""
        return self._segment.removeprefix("task:").rpartition("#")[0]

    @property
    def is_active(self) -> bool:
        """True if it can make progress: it lives, is in no wait, and has made no task that lives."""
        return not (self.is_done or self._waits or self._children)

    @property
    def is_pausing(self) -> bool:
        """True if it has made a task that lives, and sleeps instead of awaiting that task."""
        has_living = self._children and not (self.is_done or self._waits)
        return bool(has_living) and isinstance(self.task, asyncio.Task) and _is_in_sleep(self.task)

    @property
    def may_wait(self) -> bool:
        """False if it was cancelled, or one that it is in."""
        at: Branch | None = self
        while at is not None and not at.is_cancelled:
            at = at.maker
        return at is None

    def surrounds(self, other: Branch) -> bool:
        """True if the other branch was made by this one, or by one that this one made."""
        maker = other.maker
        while maker is not None and maker is not self:
            maker = maker.maker
        return maker is self

    def make_own(self, coroutine: Any) -> Branch:
        """Return the branch of a task that this branch makes."""
        if self._made is None:
            self._made = Counter()
        name = _coroutine_name(coroutine)
        number = self._made[name]
        self._made[name] += 1
        return Branch(self.tree, self, f"task:{name}#{number}/", is_own=True)

    def begin_wait(self) -> None:
        """Count a wait of the context in this branch."""
        self._add(waits=1)

    def end_wait(self) -> None:
        """Count a wait as over."""
        self._add(waits=-1)

    def finish(self) -> None:
        """Count the branch as finished."""
        if self.is_done:
            return
        was_active = self.is_active
        self.is_done = True
        self.tree.remove(self, was_active=was_active)
        self._release_maker()

    def _add(self, *, waits: int = 0, children: int = 0) -> None:
        was_active = self.is_active
        self._waits += waits
        self._children += children
        self.tree.active += self.is_active - was_active
        if children < 0:
            self._release_maker()

    def _release_maker(self) -> None:
        """No longer count this branch as a living task of its maker, once it and all that it made have finished."""
        if self.is_done and not self._children and self.maker is not None:
            self.maker._add(children=-1)


class BranchTree:
    """The branches of one attempt."""

    __slots__ = (
        "active",
        "by_arrival",
        "in_thread",
        "is_ending",
        "living",
        "on_ended",
        "on_finished",
        "own_living",
        "root",
        "tasks_ended",
    )

    def __init__(
        self, task: asyncio.Future[Any] | None = None, *, is_ending: Callable[[], bool] = lambda: False
    ) -> None:
        """Create the tree with its root. `task` runs the handler; None if a thread does.

        `is_ending` returns True once the worker has cancelled the attempt, or its time is over.
        """
        self.is_ending = is_ending
        self.active = 0  # branches that can make progress
        self.own_living = 0  # tasks of the function's own making that live
        self.tasks_ended = 0
        self.living: dict[Branch, None] = {}
        self.by_arrival: bool | None = None  # True for a run of before branches; None until that is known
        self.in_thread = task is None
        self.on_finished: Callable[[], None] | None = None  # called after a branch has finished
        self.on_ended: Callable[[Branch], None] | None = None  # called with each branch that finishes, at once
        self.root = Branch(self, None, "", is_own=False)
        self.root.task = task

    def add(self, branch: Branch) -> None:
        """Count a new branch."""
        self.living[branch] = None
        self.active += 1
        self.own_living += branch.is_own

    def remove(self, branch: Branch, *, was_active: bool) -> None:
        """Count a branch as finished."""
        del self.living[branch]
        self.active -= was_active
        self.own_living -= branch.is_own
        if self.on_ended is not None:
            self.on_ended(branch)

    def active_branches(self) -> Iterator[Branch]:
        """Yield the branches that can make progress."""
        return (branch for branch in self.living if branch.is_active or branch.is_pausing)

    def can_go_on(self) -> bool:
        """True if a branch can make progress."""
        return self.active > 0 or any(branch.is_pausing for branch in self.living)


def _is_in_sleep(task: asyncio.Task[Any]) -> bool:
    """True if a task is suspended in `asyncio.sleep`: the innermost coroutine that it awaits."""
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        inner = getattr(coroutine, "cr_await", None)
        if isinstance(coroutine, GeneratorType):  # that of the worker's eager runner, which drives a coroutine by hand
            inner = None if coroutine.gi_frame is None else coroutine.gi_frame.f_locals.get("coroutine")
        elif inner is None or not (isinstance(inner, GeneratorType) or hasattr(inner, "cr_await")):
            return getattr(coroutine, "cr_code", None) is asyncio.sleep.__code__
        coroutine = inner
    return False


class BranchOwner(Protocol):
    """What runs a handler: its attempt, or its context."""

    @property
    def branches(self) -> BranchTree:
        """The branches of the attempt."""


class Scope:
    """A block whose tasks are no branches: those of threads, and of this library."""

    __slots__ = ("tree",)

    def __init__(self, tree: BranchTree) -> None:
        self.tree = tree


current_owner: contextvars.ContextVar[BranchOwner] = contextvars.ContextVar("flowfabric_context")
current_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("flowfabric_scope", default=None)
_branch: contextvars.ContextVar[Branch | None] = contextvars.ContextVar("flowfabric_branch", default=None)


def current_branch(tree: BranchTree) -> Branch:
    """Return the branch of an attempt in which the caller runs."""
    branch = _branch.get()
    return branch if branch is not None and branch.tree is tree else tree.root


def find_branch() -> Branch | None:
    """Return the branch in which the caller runs; None outside of handlers."""
    owner = current_owner.get(None)
    return None if owner is None else current_branch(owner.branches)


def is_branch(tree: BranchTree) -> bool:
    """True if the running task is a branch of this attempt itself: no step, no thread, and no unnamed task."""
    scope = current_scope.get()
    if scope is not None and scope.tree is tree:
        return False
    branch, running = current_branch(tree), asyncio.current_task()
    if branch.task is None:  # an eager task: it runs before its maker has it
        branch.task = running
    return running is branch.task


@contextmanager
def untracked() -> Iterator[None]:
    """Make no branches of the tasks that the block creates."""
    owner, scope = current_owner.get(None), current_scope.get()
    if owner is None or (scope is not None and scope.tree is owner.branches):
        yield
        return
    token = current_scope.set(Scope(owner.branches))
    try:
        yield
    finally:
        current_scope.reset(token)


def stop_tracking() -> None:
    """Make no branches of the tasks that the running task creates from here on."""
    owner, scope = current_owner.get(None), current_scope.get()
    if owner is not None and (scope is None or scope.tree is not owner.branches):
        current_scope.set(Scope(owner.branches))


def as_coroutine(awaitable: Awaitable[T]) -> Coroutine[Any, Any, T]:
    """Return a coroutine as it is: a task that is cancelled before it begins closes it. Wrap other awaitables."""
    return awaitable if asyncio.iscoroutine(awaitable) else _await(awaitable)


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable


def start_branch(branch: Branch, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run a coroutine in a task that is this branch. The branch has to be finished by the caller."""
    loop = asyncio.get_running_loop()
    factory = loop.get_task_factory()
    inner = factory.inner if isinstance(factory, BranchTaskFactory) else factory
    task: Any = _start(inner, loop, coroutine, branch, {})
    branch.task = task
    return task  # type: ignore[no-any-return]


def ensure_task_factory(loop: asyncio.AbstractEventLoop) -> None:
    """Let every task that a handler makes on this loop be a branch. Wraps a factory that was set before.

    On a loop that takes no factory, own tasks of a handler have no name, and waits in them are refused.
    """
    factory = loop.get_task_factory()
    if not isinstance(factory, BranchTaskFactory):
        with suppress(NotImplementedError):
            loop.set_task_factory(BranchTaskFactory(factory))


class BranchTaskFactory:
    """Creates the tasks of a loop. A task that a handler makes runs with its branch in its context variables."""

    __slots__ = ("inner",)

    def __init__(self, inner: TaskFactory | None) -> None:
        self.inner = inner

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        """Create a task."""
        owner = current_owner.get(None)
        if owner is None or not _is_tracked(tree := owner.branches) or _is_internal(coroutine):
            if self.inner is None:
                return asyncio.Task(coroutine, loop=loop, **options)
            return self.inner(loop, coroutine, **options)
        branch = current_branch(tree).make_own(coroutine)
        try:
            task = _start(self.inner, loop, coroutine, branch, options)
        except BaseException:
            branch.finish()
            raise
        branch.task = task
        # The first callback of the task: its maker is not woken up before.
        task.add_done_callback(lambda _: _finish(branch))
        return task


def _is_tracked(tree: BranchTree) -> bool:
    scope = current_scope.get()
    return not tree.in_thread and (scope is None or scope.tree is not tree)


def _finish(branch: Branch) -> None:
    branch.tree.tasks_ended += 1
    branch.finish()
    if (on_finished := branch.tree.on_finished) is not None:
        on_finished()


def _start(
    inner: TaskFactory | None,
    loop: asyncio.AbstractEventLoop,
    coroutine: Any,
    branch: Branch,
    options: dict[str, Any],
) -> asyncio.Future[Any]:
    # A context that the caller gives is copied: two tasks may share it, but not their branch.
    given: contextvars.Context | None = options.pop("context", None)
    context = contextvars.copy_context() if given is None else given.copy()
    context.run(_branch.set, branch)
    if inner is None:
        return asyncio.Task(coroutine, loop=loop, context=context, **options)
    if given is not None:
        return inner(loop, coroutine, context=context, **options)
    return context.run(lambda: inner(loop, coroutine, **options))  # also for a factory that knows no contexts


_internal_files: dict[str, bool] = {}


def _file_of(coroutine: Any) -> str:
    code = getattr(coroutine, "cr_code", None) or getattr(coroutine, "gi_code", None)
    return getattr(code, "co_filename", "")


def _is_internal(coroutine: Coroutine[Any, Any, Any] | Generator[Any, Any, Any]) -> bool:
    """True for a coroutine of this library that is no operation of a context or a run."""
    file = _file_of(coroutine)
    known = _internal_files.get(file)
    if known is None:
        is_ours, is_sdk = file.startswith(PACKAGE_PREFIX), file.startswith(SDK_PREFIX)
        known = _internal_files[file] = is_ours and (not is_sdk or file.startswith(f"{SDK_PREFIX}worker{os.sep}"))
    return known


def _coroutine_name(coroutine: Any) -> str:
    """Return the name that identifies a coroutine among those of its maker."""
    # The class of one of our own methods is no part of its name: moving the method must not rename the branch.
    field = "__name__" if _file_of(coroutine).startswith(SDK_PREFIX) else "__qualname__"
    name = str(getattr(coroutine, field, type(coroutine).__qualname__)).replace("/", "|")
    return name if len(name) <= MAX_SEGMENT_CHARS else f"{name[: MAX_SEGMENT_CHARS - 13]}~{_digest(name)[:12]}"


def _shortened(name: str) -> str:
    """Return the name of a branch; that of a deeply nested one as a digest."""
    return name if len(name.encode()) <= MAX_PREFIX_BYTES else f"task:~{_digest(name)}#0/"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]
