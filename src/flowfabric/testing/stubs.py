"""Stubs for the outside world in tests: for effects, and for people who vote."""

from __future__ import annotations

import typing
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from flowfabric.sdk.run import Run

T = TypeVar("T")


class Stub:
    """A replacement for a function, which records its calls."""

    def __init__(self, instead: Callable[..., Any] | None, returns: Any, raises: BaseException | None) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._instead = instead
        self._returns = returns
        self._raises = raises

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        if self._raises is not None:
            raise self._raises
        return self._returns if self._instead is None else self._instead(*args, **kwargs)


class Ballots:
    """An open approval, to be answered by test persons. Each of them gets one link."""

    def __init__(self, run: Run[Any], links: list[str], shape: Any) -> None:
        self._run = run
        self._unused = links
        self._links: dict[str, str] = {}
        self._shape = shape

    async def approve_as(self, person: str, **fields: Any) -> None:
        """Vote yes: True, or an answer with every bool field True and the other fields as given."""
        await self.answer_as(person, _answer(self._shape, True, fields))

    async def reject_as(self, person: str, **fields: Any) -> None:
        """Vote no: False, or an answer with every bool field False and the other fields as given."""
        await self.answer_as(person, _answer(self._shape, False, fields))

    async def answer_as(self, person: str, value: Any = True) -> None:
        """Vote with this value. A person who votes again uses the same link, which counts once."""
        if person not in self._links:
            if not self._unused:
                raise AssertionError(f"{person} has no link: all are used by others; create more with approvers=")
            self._links[person] = self._unused.pop(0)
        await self._run.vote(self._links[person], value, by=person)


def complete_now(call: Coroutine[Any, Any, T]) -> T:
    """Return what a call of a store in memory returns: it answers at once."""
    try:
        call.send(None)
    except StopIteration as stop:
        answer: T = stop.value
        return answer
    raise RuntimeError("the store was busy: let everything settle before invariants are checked")


class CompletedChecks:
    """Checks that have already run; awaiting this does nothing."""

    def __init__(self, *checks: Coroutine[Any, Any, None]) -> None:
        for check in checks:
            complete_now(check)

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


def _answer(shape: Any, vote: bool, fields: dict[str, Any]) -> Any:
    if shape in (bool, Any):
        return vote
    hints = typing.get_type_hints(shape)
    return {name: vote for name, kind in hints.items() if kind is bool} | fields
