"""Ready queues and their ids in the file's queue table."""

from __future__ import annotations

import apsw
from msgspec.structs import astuple

from flowfabric.model.execution import MISSING_QUEUE, QueueKey
from flowfabric.stores.sqlite import statements
from flowfabric.stores.verdicts import Unstorable

UNKNOWN_ID = 0  # the id of no queue


class SQLiteQueueIds:
    """A cache of the queue table. Rows are only ever added to the table, so cached entries stay valid."""

    def __init__(self) -> None:
        self._ids: dict[QueueKey, int] = {}
        self._keys: dict[int, QueueKey] = {}

    def id_of(self, db: apsw.Connection, queue: QueueKey) -> int:
        """Return the id of a queue; `UNKNOWN_ID` if nothing was ever written to it."""
        id_ = self._ids.get(queue)
        if id_ is None:
            id_ = next(
                (found for (found,) in db.execute(statements.statement("find_queue_id"), astuple(queue))), UNKNOWN_ID
            )
            if id_ != UNKNOWN_ID:
                self.remember(queue, id_)
        return id_

    def key_of(self, db: apsw.Connection, id_: int) -> QueueKey:
        """Return the queue with this id; `MISSING_QUEUE` if the table has no such row."""
        queue = self._keys.get(id_)
        if queue is None:
            found = next(iter(db.execute(statements.statement("queue_by_id"), (id_,))), None)
            if found is None:
                return MISSING_QUEUE
            lane_id, required, key, weight, guarded = found
            queue = QueueKey(lane_id, required, key, weight, bool(guarded))
            self.remember(queue, id_)
        return queue

    def remember(self, queue: QueueKey, id_: int) -> None:
        """Cache the id of a queue."""
        self._keys[id_] = queue
        self._ids[queue] = id_


class WriterQueueIds(SQLiteQueueIds):
    """The cache of the writer's transaction; its new entries are shared with readers after the commit."""

    def __init__(self, shared: SQLiteQueueIds) -> None:
        super().__init__()
        self._shared = shared
        self._new: list[tuple[QueueKey, int]] = []

    def ensure_id(self, db: apsw.Connection, queue: QueueKey) -> int:
        """Return the id of a queue; insert its row if there is none."""
        if queue == MISSING_QUEUE:
            raise Unstorable("an execution cannot be put into a missing ready queue")
        id_ = self.id_of(db, queue)
        if id_ == UNKNOWN_ID:
            db.execute(statements.statement("add_queue"), astuple(queue))
            id_ = self.id_of(db, queue)
        return id_

    def remember(self, queue: QueueKey, id_: int) -> None:
        super().remember(queue, id_)
        self._new.append((queue, id_))

    def on_commit(self) -> None:
        """Share the new entries after the transaction was committed."""
        for queue, id_ in self._new:
            self._shared.remember(queue, id_)
        self._new.clear()

    def on_rollback(self) -> None:
        """Discard the new entries, because a part of the transaction was rolled back."""
        for queue, id_ in self._new:
            self._ids.pop(queue, None)
            self._keys.pop(id_, None)
        self._new.clear()
