"""ReadSet: the rows that a decision reads, each with a typed accessor.

    reads = ReadSet()
    row = reads.one(Execution, execution_id)
    edges = reads.many(Dependency, execution_id)
    await runtime.decide_and_commit(reads, lambda rows, now: rule(row(rows), edges(rows), now))

Rows that `load_more` adds are declared with `more_one`, `more_many`, `more_each` and `more_rows`, in the order in which
it returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.rules.decision import Decision
from flowfabric.stores.queries import Read

if TYPE_CHECKING:
    from flowfabric.engine.runtime.runtime import Runtime

A = TypeVar("A")
R = TypeVar("R", bound=msgspec.Struct)


class One(msgspec.Struct, Generic[R], frozen=True, gc=False):
    """Finds the row of one read; None if there is none."""

    place: int

    def __call__(self, rows: Rows) -> R | None:
        return rows[self.place][0] if len(rows) > self.place and rows[self.place] else None


class Many(msgspec.Struct, Generic[R], frozen=True, gc=False):
    """Finds the rows of one read, in key order."""

    place: int

    def __call__(self, rows: Rows) -> list[R]:
        return rows[self.place] if len(rows) > self.place else []


class Each(msgspec.Struct, Generic[R], frozen=True, gc=False):
    """Finds the row of each of several reads; None where there is none."""

    start: int
    end: int | None

    def __call__(self, rows: Rows) -> list[R | None]:
        return [found[0] if found else None for found in rows[self.start : self.end]]


class Rest(msgspec.Struct, Generic[R], frozen=True, gc=False):
    """Finds the rows of all reads from one on."""

    start: int

    def __call__(self, rows: Rows) -> list[R]:
        return [row for found in rows[self.start :] for row in found]


async def load_one(runtime: Runtime, row: type[R], *key: Any) -> R | None:
    """Load the row with this key, if there is one."""
    [found] = (await runtime.load((Read(row, key),))).rows
    return found[0] if found else None


async def load_many(runtime: Runtime, row: type[R], *prefix: Any) -> list[R]:
    """Load the rows whose key begins like this, in key order."""
    [found] = (await runtime.load((Read(row, prefix),))).rows
    return found


async def load_each(runtime: Runtime, row: type[R], keys: Iterable[tuple[Any, ...]]) -> list[R | None]:
    """Load one row by each of these keys; None where there is none. Without keys there is no round trip."""
    reads = [Read(row, key) for key in keys]
    return [found[0] if found else None for found in (await runtime.load(reads)).rows] if reads else []


async def decide_row(
    runtime: Runtime, row: type[R], key: tuple[Any, ...], decide: Callable[[R | None, int], Decision[A]]
) -> A:
    """Decide on the row with this key, or on its absence, and commit."""
    reads = ReadSet()
    found = reads.one(row, *key)
    return await runtime.decide_and_commit(reads, lambda rows, now: decide(found(rows), now))


class ReadSet(list[Read]):
    """A list of reads that gives out an accessor for the rows of each."""

    _more = 0  # reads that `load_more` adds

    def one(self, row: type[R], *key: Any) -> One[R]:
        """Read the row with this key, if there is one."""
        self.append(Read(row, key))
        return One(len(self) - 1)

    def many(self, row: type[R], *key: Any) -> Many[R]:
        """Read all rows whose key begins with this."""
        self.append(Read(row, key))
        return Many(len(self) - 1)

    def each(self, row: type[R], keys: Iterable[tuple[Any, ...]]) -> Each[R]:
        """Read one row by each of these keys."""
        start = len(self)
        self.extend(Read(row, key) for key in keys)
        return Each(start, len(self))

    def more_one(self, row: type[R]) -> One[R]:
        """Declare a row that `load_more` adds."""
        self._more += 1
        return One(len(self) + self._more - 1)

    def more_many(self, row: type[R]) -> Many[R]:
        """Declare rows that `load_more` adds."""
        self._more += 1
        return Many(len(self) + self._more - 1)

    def more_each(self, row: type[R]) -> Each[R]:
        """Declare that everything else that `load_more` adds are single rows."""
        return Each(len(self) + self._more, None)

    def more_rows(self, row: type[R]) -> Rest[R]:
        """Declare that everything else that `load_more` adds are rows of this type."""
        return Rest(len(self) + self._more)

    def assume(self, row: One[R], value: R) -> Rows:
        """Return rows to decide on without a load: this one and no other."""
        rows: Rows = [[] for _ in range(len(self) + self._more)]
        rows[row.place] = [value]
        return rows
