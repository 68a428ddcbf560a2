"""Runs a program as a durable function through the public SDK, and notes what it does and sees in a journal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from flowfabric import Budget, Context, Fabric, Fatal, Retry
from flowfabric.sdk.task import AsyncTask
from tests.sdk.programs.journal import Journal, MortalProcess, What, Wish
from tests.sdk.programs.program import (
    FAILURES,
    Ask,
    Catch,
    Child,
    Children,
    Group,
    Leave,
    Loop,
    Node,
    Options,
    Pause,
    Program,
    Race,
    RaceOf,
    Receive,
    Reserve,
    Saga,
    Sequence,
    Sleep,
    Spend,
    Step,
    WaitFor,
    describe_failure,
)

ROOT = "r"
LATE_MS = 30 * 60_000  # a step that is waited for in vain takes this long
IN_TIME_S = 30 * 60.0
TOO_SHORT_S = 1.0
PACES = (1, 0, 5)  # of pauses, by invocation: a replay may be faster or slower than the attempt before it
BACKOFF = "1s"

PURSE = "purse"


def make_purse() -> Budget:
    """Return the budget that programs spend."""
    return Budget(PURSE, {"tokens": 1_000_000})


def make_app(journal: Journal, process: Callable[[], MortalProcess], program: Program) -> Fabric:
    """Return an app with the program; `process` returns the process in which a handler is called."""
    app = Fabric("memory://")
    purse = make_purse()

    @app.task(name="child", retry=Retry(max=20, base=BACKOFF, jitter=False))
    async def child(ctx: Context, path: str, fails: bool) -> str:
        invocation = journal.begin(process())
        step, place = Step("child"), f"{path}!"

        async def effect() -> list[Any]:
            return await journal.perform(invocation, step, place, place, ms=0)

        value = await ctx.options(name="child").step(effect)
        journal.note(invocation, What.DONE, place, place, value)
        if fails:
            raise Fatal(f"child failed {path}")
        return path

    @app.task(name="program")
    async def handler(ctx: Context) -> Any:
        invocation = journal.begin(process())
        interpreter = Interpreter(ctx, journal, invocation, purse, child)
        try:
            value = await interpreter.run(program.body, ROOT, ROOT)
        except asyncio.CancelledError:
            if ctx.is_parked:
                journal.note(invocation, What.PARKED)
            raise
        except Exception as failure:
            journal.note(invocation, What.RAISED, value=describe_failure(failure))
            raise
        journal.note(invocation, What.RETURNED)
        return value

    return app


class Interpreter:
    """One invocation of a program."""

    def __init__(
        self, ctx: Context, journal: Journal, invocation: int, purse: Budget, child: AsyncTask[[str, bool], str]
    ) -> None:
        self._ctx = ctx
        self._journal = journal
        self._invocation = invocation
        self._purse = purse
        self._child = child

    async def run(self, node: Node, path: str, branch: str) -> Any:
        """Run a part of the program; return everything it saw as a JSON value."""
        ctx = self._ctx
        match node:
            case Step():
                return await self._step(node, path, branch)
            case Pause(ms=ms):
                return await self._pause(ms, path, branch)
            case Sleep(minutes=minutes):
                return await self._observe(path, branch, ctx.sleep(f"{minutes}m"))
            case Receive(after=after):
                return await self._receive(after, path, branch)
            case Ask(after=after):
                return await self._observe(path, branch, self._ask(path, after))
            case Child(fails=fails):
                return await self._observe(path, branch, self._spawn(path, fails))
            case Children(count=count):
                calls = [self._child.s(f"{path}.{number}", False) for number in range(count)]
                return await self._observe(path, branch, ctx.gather(calls))
            case Spend(amount=amount):
                return await self._observe(path, branch, ctx.spend(self._purse, tokens=amount))
            case Reserve(amount=amount, body=body):
                return await self._reserve(amount, body, path, branch)
            case Sequence(items=items):
                return [await self.run(item, f"{path}.{number}", branch) for number, item in enumerate(items)]
            case Loop(times=times, body=body):
                return [await self.run(body, f"{path}.{number}", branch) for number in range(times)]
            case Catch():
                return await self._catch(node, path, branch)
            case Saga():
                return await self._saga(node, path, branch)
            case Group():
                return await self._group(node, path)
            case WaitFor(step=step, is_late=is_late):
                return await self._wait_for(step, is_late, path, branch)
            case Leave(minutes=minutes):
                return await self._leave(minutes, path, branch)
            case Options(step=step, retries=retries):
                options = ctx.options(retry=Retry(max=retries, base=BACKOFF, jitter=False), name=step.name)
                return await self._observe(path, branch, options.step(self._effect(step, path, branch, step.ms)))
            case Race(minutes=minutes, after=after):
                return await self._observe(path, branch, self._race(minutes, after, path))
            case RaceOf(members=members):
                return await self._race_of(members, path, branch)
            case _:
                raise TypeError(f"{node!r} is no node")

    async def _observe(self, path: str, branch: str, operation: Awaitable[Any]) -> Any:
        note, invocation = self._journal.note, self._invocation
        note(invocation, What.ENTER, path, branch)
        try:
            value = await operation
        except FAILURES as failure:
            note(invocation, What.FAILED, path, branch, describe_failure(failure))
            raise
        except asyncio.CancelledError:
            if not self._ctx.is_parked:
                note(invocation, What.CANCELLED, path, branch)
            raise
        note(invocation, What.DONE, path, branch, value)
        return value

    def _effect(self, step: Step, path: str, branch: str, ms: int) -> Callable[..., Awaitable[list[Any]]]:
        async def effect(*_: str) -> list[Any]:
            return await self._journal.perform(self._invocation, step, path, branch, ms=ms)

        return effect

    async def _step(self, step: Step, path: str, branch: str, *, ms: int | None = None) -> Any:
        effect = self._effect(step, path, branch, step.ms if ms is None else ms)
        arguments = (path,) if step.argument else ()
        return await self._observe(path, branch, self._ctx.options(name=step.name).step(effect, *arguments))

    async def _pause(self, ms: int, path: str, branch: str) -> None:
        try:
            await asyncio.sleep(ms / 1000 * PACES[self._invocation % len(PACES)])
        except asyncio.CancelledError:
            if self._ctx.is_parked:
                self._journal.note(self._invocation, What.TORN, path, branch)
            raise

    async def _receive(self, after: int | None, path: str, branch: str) -> Any:
        mailbox = _mailbox(branch)
        if after is None:
            return await self._observe(path, branch, self._ctx.receive(f"{mailbox}-empty", str, timeout="5m"))
        self._journal.wish(self._invocation, path, Wish(f"mail {path}", after * 60.0, mailbox=mailbox))
        return await self._observe(path, branch, self._ctx.receive(mailbox, str))

    async def _ask(self, path: str, after: int) -> list[bool]:
        approval = await self._ctx.approval("ask", bool)
        self._journal.wish(self._invocation, path, Wish(True, after * 60.0, link=approval.links[0]))
        return [vote.value for vote in await approval]

    async def _race(self, minutes: int, after: int | None, path: str) -> list[Any]:
        mailbox = f"race-{path}"  # of its own: a message that lost would be received later
        if after is not None:
            self._journal.wish(self._invocation, path, Wish(f"mail {path}", after * 60.0, mailbox=mailbox))
        waits = {"late": self._ctx.sleep(f"{minutes}m"), "mail": self._ctx.receive(mailbox, str)}
        won = await self._ctx.race(**waits)
        return [won.name, won.value]

    async def _race_of(self, members: tuple[Node, ...], path: str, branch: str) -> list[Any]:
        self._journal.note(self._invocation, What.ENTER, path, branch)
        parts = {f"m{number}": self._member(node, f"{path}.{number}") for number, node in enumerate(members)}
        try:
            won = await self._ctx.race(**parts)
        except FAILURES as failure:
            self._journal.note(self._invocation, What.RACE_FAILED, path, branch, describe_failure(failure))
            raise
        value = [won.name, won.value]
        self._journal.note(self._invocation, What.DONE, path, branch, value)
        return value

    async def _spawn(self, path: str, fails: bool) -> str:
        run = await self._ctx.spawn(self._child, path, fails)
        return await run.result()

    async def _reserve(self, amount: int, body: Node, path: str, branch: str) -> Any:
        async with self._ctx.reserve(self._purse, tokens=amount) as room:
            await self._observe(path, branch, room.spend(tokens=amount))
            return await self.run(body, f"{path}.0", branch)

    async def _catch(self, node: Catch, path: str, branch: str) -> Any:
        try:
            return await self.run(node.body, f"{path}.0", branch)
        except FAILURES as failure:
            handled = await self.run(node.handler, f"{path}.1", branch)
            if node.raises:
                raise
            return ["caught", describe_failure(failure), handled]

    async def _saga(self, saga: Saga, path: str, branch: str) -> Any:
        done: list[Any] = []
        try:
            for number, step in enumerate(saga.steps):
                done.append(await self._step(step, f"{path}.{number}", branch))
        except FAILURES as failure:
            undone = [
                await self._step(Step("undo"), f"{path}.{number}.undo", branch) for number in reversed(range(len(done)))
            ]
            if saga.raises:
                raise
            return ["undone", describe_failure(failure), undone]
        return ["done", done]

    async def _group(self, group: Group, path: str) -> list[Any]:
        members = [self._member(node, f"{path}.{number}") for number, node in enumerate(group.members)]
        match group.how:
            case "ctx.gather":
                try:
                    return await self._ctx.gather(*members)
                finally:
                    for member in members:  # one that was cancelled before it began
                        member.close()
            case "asyncio.gather":
                return list(await asyncio.gather(*members))
            case "return_exceptions":
                return [_told(value) for value in await asyncio.gather(*members, return_exceptions=True)]
            case "TaskGroup":
                try:
                    async with asyncio.TaskGroup() as tasks:
                        made = [tasks.create_task(member) for member in members]
                except BaseExceptionGroup as failures:
                    raise _first(failures) from None
                return [task.result() for task in made]

    async def _member(self, node: Node, path: str) -> Any:
        try:
            return await self.run(node, path, path)
        except asyncio.CancelledError:
            if not self._ctx.is_parked:
                self._journal.note(self._invocation, What.BRANCH_CANCELLED, path, path)
            raise
        finally:
            self._journal.note(self._invocation, What.BRANCH_END, path, path)

    async def _wait_for(self, step: Step, is_late: bool, path: str, branch: str) -> Any:
        if not is_late:
            return await asyncio.wait_for(self._step(step, f"{path}.0", branch), IN_TIME_S)
        try:
            return await asyncio.wait_for(self._step(step, f"{path}.0", branch, ms=LATE_MS), TOO_SHORT_S)
        except TimeoutError:
            return "timed out"

    async def _leave(self, minutes: int, path: str, branch: str) -> Any:
        self._journal.note(self._invocation, What.ENTER, path, branch)
        sleep = asyncio.ensure_future(self._ctx.sleep(f"{minutes}m"))
        mail = asyncio.ensure_future(self._ctx.receive(_mailbox(branch), str))
        try:
            await asyncio.wait({sleep, mail}, return_when=asyncio.FIRST_COMPLETED)
            value = "left" if not mail.done() else f"not left: {mail.result()}"
        finally:
            for task in (sleep, mail):
                task.cancel()
        await asyncio.gather(sleep, mail, return_exceptions=True)
        self._journal.note(self._invocation, What.LEFT, path, branch, value)
        return value


def _mailbox(branch: str) -> str:
    return f"mail-{branch}"


def _told(value: Any) -> Any:
    """Return the result of a task, or a description of its failure; other errors are raised."""
    if isinstance(value, FAILURES):
        return ["failed", describe_failure(value)]
    if isinstance(value, BaseException):
        raise value
    return value


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first failure of a group that is not one of the engine's errors."""
    leaves = [_first(one) if isinstance(one, BaseExceptionGroup) else one for one in failures.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, FAILURES)), leaves[0])
