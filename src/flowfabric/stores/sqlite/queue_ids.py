"""Lines and the small numbers that stand for them."""

from __future__ import annotations

import apsw
from msgspec.structs import astuple

from flowfabric.model.execution import MISSING_QUEUE, QueueKey
from flowfabric.stores.port import Unstorable
from flowfabric.stores.sqlite import statements

UNKNOWN_ID = 0  # stands for no line


class SQLiteQueueIds:
    """What this process knows of the line table: it only ever grows, so what was read stays true."""

    def __init__(self) -> None:
        self._numbers: dict[QueueKey, int] = {}
        self._lines: dict[int, QueueKey] = {}

    def id_of(self, db: apsw.Connection, line: QueueKey) -> int:
        """The number of a line; unknown when nothing was ever written to it."""
        number = self._numbers.get(line)
        if number is None:
            number = next(
                (found for (found,) in db.execute(statements.statement("find_line"), astuple(line))), UNKNOWN_ID
            )
            if number != UNKNOWN_ID:
                self.remember(line, number)
        return number

    def key_of(self, db: apsw.Connection, number: int) -> QueueKey:
        """The line with this number; `MISSING_QUEUE` if the file has lost its row."""
        line = self._lines.get(number)
        if line is None:
            found = next(iter(db.execute(statements.statement("line_at"), (number,))), None)
            if found is None:
                return MISSING_QUEUE
            lane_id, required, key, weight, decided = found
            line = QueueKey(lane_id, required, key, weight, bool(decided))
            self.remember(line, number)
        return line

    def remember(self, line: QueueKey, number: int) -> None:
        """Remember."""
        self._lines[number] = line
        self._numbers[line] = number


class WriterQueueIds(SQLiteQueueIds):
    """The same as the writer's transaction sees it; what it learns is common knowledge once that is committed."""

    def __init__(self, common: SQLiteQueueIds) -> None:
        super().__init__()
        self._common = common
        self._fresh: list[tuple[QueueKey, int]] = []

    def ensure_id(self, db: apsw.Connection, line: QueueKey) -> int:
        """The number of a line, given to it now if it has none."""
        if line == MISSING_QUEUE:
            raise Unstorable("an execution cannot be put into a missing ready queue")
        number = self.id_of(db, line)
        if number == UNKNOWN_ID:
            db.execute(statements.statement("add_line"), astuple(line))
            number = self.id_of(db, line)
        return number

    def remember(self, line: QueueKey, number: int) -> None:
        super().remember(line, number)
        self._fresh.append((line, number))

    def on_commit(self) -> None:
        """The transaction was committed."""
        for line, number in self._fresh:
            self._common.remember(line, number)
        self._fresh.clear()

    def on_rollback(self) -> None:
        """Something of the transaction was taken back: what was learnt in it may be untrue."""
        for line, number in self._fresh:
            self._numbers.pop(line, None)
            self._lines.pop(number, None)
        self._fresh.clear()
