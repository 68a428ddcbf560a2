"""The result of a program, evaluated with the outcomes of its steps and the winners of its races."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sdk.programs.journal import What
from tests.sdk.programs.program import (
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
)

if TYPE_CHECKING:
    from tests.sdk.programs.model import History


class ModelFailure(Exception):
    """A failure of the program, as the model has it."""

    def __init__(self, described: dict[str, Any]) -> None:
        super().__init__(described["text"])
        self.described = described


class NeverCalled(Exception):
    """A step that must have run has not."""


class Evaluation:
    """Evaluates a program with the outcomes of its steps; `reached` lists branch and path of all operations."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.reached: list[tuple[str, str]] = []

    def run(self, node: Node, path: str, branch: str) -> Any:
        """Return the value of a part of the program, or raise its failure."""
        match node:
            case Step() | Options(step=Step()):
                return self._step(node.step if isinstance(node, Options) else node, path, branch)
            case Pause():
                return None
            case Sleep() | Spend():
                self.reached.append((branch, path))
                return None
            case Receive(after=after):
                self.reached.append((branch, path))
                return None if after is None else f"mail {path}"
            case Ask():
                self.reached.append((branch, path))
                return [True]
            case Child(fails=fails):
                self.reached.append((branch, path))
                if fails:
                    raise ModelFailure({"class": "RunFailed", "text": f"child failed {path}", "fields": {}})
                return path
            case Children(count=count):
                paths = [f"{path}.{number}" for number in range(count)]
                self.reached += [(branch, path), *((branch, child) for child in paths)]
                return paths
            case Reserve(body=body):
                return self.run(body, f"{path}.0", branch)
            case Sequence(items=items):
                return [self.run(item, f"{path}.{number}", branch) for number, item in enumerate(items)]
            case Loop(times=times, body=body):
                return [self.run(body, f"{path}.{number}", branch) for number in range(times)]
            case Catch():
                return self._catch(node, path, branch)
            case Saga():
                return self._saga(node, path, branch)
            case Group():
                return self._group(node, path)
            case WaitFor(step=step, is_late=is_late):
                if not is_late:
                    return self._step(step, f"{path}.0", branch)
                self.reached.append((branch, f"{path}.0"))
                return "timed out"
            case Leave():
                self.reached.append((branch, path))
                return "left"
            case Race(after=after):
                self.reached.append((branch, path))
                return winner_of(path, after)
            case RaceOf(members=members):
                return self._race_of(members, path)
            case _:
                raise TypeError(f"{node!r} is no node")

    def _step(self, step: Step, path: str, branch: str) -> Any:
        self.reached.append((branch, path))
        outcome = self._history.outcome(step, path)
        if outcome is None:
            raise NeverCalled(path)
        if outcome.what is What.FAILED:
            raise ModelFailure(outcome.value)
        return outcome.value

    def _catch(self, node: Catch, path: str, branch: str) -> Any:
        try:
            return self.run(node.body, f"{path}.0", branch)
        except ModelFailure as failure:
            handled = self.run(node.handler, f"{path}.1", branch)
            if node.raises:
                raise
            return ["caught", failure.described, handled]

    def _saga(self, saga: Saga, path: str, branch: str) -> Any:
        done: list[Any] = []
        try:
            for number, step in enumerate(saga.steps):
                done.append(self._step(step, f"{path}.{number}", branch))
        except ModelFailure as failure:
            undone = [
                self._step(Step("undo"), f"{path}.{number}.undo", branch) for number in reversed(range(len(done)))
            ]
            if saga.raises:
                raise
            return ["undone", failure.described, undone]
        return ["done", done]

    def _group(self, group: Group, path: str) -> list[Any]:
        values: list[Any] = []
        failures: list[ModelFailure] = []
        missing: list[NeverCalled] = []
        for number, member in enumerate(group.members):
            try:
                values.append(self.run(member, f"{path}.{number}", f"{path}.{number}"))
            except ModelFailure as failure:
                values.append(["failed", failure.described])
                failures.append(failure)
            except NeverCalled as never:
                missing.append(never)
        if failures and group.how != "return_exceptions":
            raise failures[0]  # members that it cancelled need not have come far
        if missing:
            raise missing[0]
        return values

    def _race_of(self, members: tuple[Node, ...], path: str) -> list[Any]:
        values: dict[str, Any] = {}
        failures: list[ModelFailure] = []
        for number, member in enumerate(members):  # the losers may have come as far as they could
            try:
                values[f"m{number}"] = self.run(member, f"{path}.{number}", f"{path}.{number}")
            except ModelFailure as failure:
                failures.append(failure)
            except NeverCalled:
                pass
        winner = self._history.winner(path)
        if winner is None and failures:
            raise failures[0]
        if winner not in values:
            raise NeverCalled(f"{path} {winner}")
        return [winner, values[winner]]


def winner_of(path: str, after: int | None) -> list[Any]:
    """Return what a race yields: its winner, and what that returned."""
    return ["late", None] if after is None else ["mail", f"mail {path}"]
