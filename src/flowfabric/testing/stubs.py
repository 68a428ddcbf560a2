"""What a test puts in the place of the outside: stubs for effects, and people who vote."""

from __future__ import annotations

import typing
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from flowfabric.sdk.run import Run


class Stub:
    """Runs instead of something else, and keeps count."""

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
    """An open approval, answered by one person after another. Each has a link of their own, as in a mail."""

    def __init__(self, run: Run[Any], links: list[str], shape: Any) -> None:
        self._run = run
        self._free = links
        self._links: dict[str, str] = {}
        self._shape = shape

    async def approve_as(self, person: str, **fields: Any) -> None:
        """A yes: true, or every yes-or-no field of the answer true; other fields as given."""
        await self.answer_as(person, _answer(self._shape, True, fields))

    async def reject_as(self, person: str, **fields: Any) -> None:
        """A no."""
        await self.answer_as(person, _answer(self._shape, False, fields))

    async def answer_as(self, person: str, value: Any = True) -> None:
        """One vote of this value; whoever votes again does so with the same link, which counts once."""
        if person not in self._links:
            if not self._free:
                raise AssertionError(f"{person} has no link: all are in other hands; ask for more with approvers=")
            self._links[person] = self._free.pop(0)
        await self._run.vote(self._links[person], value, by=person)


class CompletedChecks:
    """What was checked already; awaiting it is allowed, and does nothing more."""

    def __init__(self, *checks: Coroutine[Any, Any, None]) -> None:
        for check in checks:
            try:
                check.send(None)  # a store in memory answers at once
            except StopIteration:
                continue
            raise RuntimeError("the store was busy: let everything settle before invariants are checked")

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


def _answer(shape: Any, word: bool, fields: dict[str, Any]) -> Any:
    if shape in (bool, Any):
        return word
    hints = typing.get_type_hints(shape)
    return {name: word for name, kind in hints.items() if kind is bool} | fields
