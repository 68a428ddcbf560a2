"""Lines and the small numbers that stand for them."""

from __future__ import annotations

import apsw
from msgspec.structs import astuple

from flowfabric.model.execution import MISSING_QUEUE, LineKey
from flowfabric.stores.port import Unstorable
from flowfabric.stores.sqlite import statements

UNKNOWN = 0  # stands for no line


class Lines:
    """What this process knows of the line table: it only ever grows, so what was read stays true."""

    def __init__(self) -> None:
        self._numbers: dict[LineKey, int] = {}
        self._lines: dict[int, LineKey] = {}

    def number(self, db: apsw.Connection, line: LineKey) -> int:
        """The number of a line; unknown when nothing was ever written to it."""
        number = self._numbers.get(line)
        if number is None:
            number = next((found for (found,) in db.execute(statements.plain("find_line"), astuple(line))), UNKNOWN)
            if number != UNKNOWN:
                self.keep(line, number)
        return number

    def line(self, db: apsw.Connection, number: int) -> LineKey:
        """The line with this number; `MISSING_QUEUE` if the file has lost its row."""
        line = self._lines.get(number)
        if line is None:
            found = next(iter(db.execute(statements.plain("line_at"), (number,))), None)
            if found is None:
                return MISSING_QUEUE
            lane_id, required, key, weight, decided = found
            line = LineKey(lane_id, required, key, weight, bool(decided))
            self.keep(line, number)
        return line

    def keep(self, line: LineKey, number: int) -> None:
        """Remember."""
        self._lines[number] = line
        self._numbers[line] = number


class LinesOfWriter(Lines):
    """The same as the writer's transaction sees it; what it learns is common knowledge once that is committed."""

    def __init__(self, common: Lines) -> None:
        super().__init__()
        self._common = common
        self._fresh: list[tuple[LineKey, int]] = []

    def number_to_write(self, db: apsw.Connection, line: LineKey) -> int:
        """The number of a line, given to it now if it has none."""
        if line == MISSING_QUEUE:
            raise Unstorable("an execution cannot be put into a missing ready queue")
        number = self.number(db, line)
        if number == UNKNOWN:
            db.execute(statements.plain("add_line"), astuple(line))
            number = self.number(db, line)
        return number

    def keep(self, line: LineKey, number: int) -> None:
        super().keep(line, number)
        self._fresh.append((line, number))

    def written(self) -> None:
        """The transaction was committed."""
        for line, number in self._fresh:
            self._common.keep(line, number)
        self._fresh.clear()

    def undone(self) -> None:
        """Something of the transaction was taken back: what was learnt in it may be untrue."""
        for line, number in self._fresh:
            self._numbers.pop(line, None)
            self._lines.pop(number, None)
        self._fresh.clear()
