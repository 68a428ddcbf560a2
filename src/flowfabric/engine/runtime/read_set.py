"""ReadSet: the rows that a decision reads, each with a typed accessor.

    reads = ReadSet()
    row = reads.one(Execution, execution_id)
    edges = reads.many(Dependency, execution_id)
    await runtime.decide_and_commit(reads, lambda rows, now: rule(row(rows), edges(rows), now))

Rows that `load_more` adds are declared with `more_one`, `more_many` and `more_each`, in the order in which it returns
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.stores.queries import Read

if TYPE_CHECKING:
    from flowfabric.engine.runtime.runtime import Runtime

R = TypeVar("R", bound=msgspec.Struct)


class One(Generic[R]):
    """Finds the row of one read; None if there is none."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __call__(self, rows: Rows) -> R | None:
        return rows[self.place][0] if len(rows) > self.place and rows[self.place] else None


class Many(Generic[R]):
    """Finds the rows of one read, in key order."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __call__(self, rows: Rows) -> list[R]:
        return rows[self.place] if len(rows) > self.place else []


class Each(Generic[R]):
    """Finds the row of each of several reads; None where there is none."""

    def __init__(self, start: int, end: int | None) -> None:
        self.start = start
        self.end = end

    def __call__(self, rows: Rows) -> list[R | None]:
        return [found[0] if found else None for found in rows[self.start : self.end]]


async def load_one(runtime: Runtime, row: type[R], *key: Any) -> R | None:
    """Load the row with this key, if there is one."""
    [found] = (await runtime.load((Read(row, key),))).rows
    return found[0] if found else None


async def load_each(runtime: Runtime, row: type[R], keys: Iterable[tuple[Any, ...]]) -> list[R | None]:
    """Load one row by each of these keys; None where there is none. Without keys there is no round trip."""
    reads = [Read(row, key) for key in keys]
    return [found[0] if found else None for found in (await runtime.load(reads)).rows] if reads else []


class ReadSet(list[Read]):
    """A list of reads that gives out an accessor for the rows of each."""

    def __init__(self) -> None:
        super().__init__()
        self._more = 0  # reads that `load_more` adds

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

    def assume(self, row: One[R], value: R) -> Rows:
        """Return rows to decide on without a load: this one and no other."""
        rows: Rows = [[] for _ in range(len(self) + self._more)]
        rows[row.place] = [value]
        return rows
