"""Reports the outcomes of a worker's attempts to the store.

Successes are sent in batches, without a task for each. While a large batch is in flight the next one fills; behind a
small batch, or once as many are queued as are in flight, a second one is sent at once. Handlers do not wait for their
report. The worker is notified when an attempt needs no further report, and then stops renewing its lease.

Only the store decides about an outcome. While it is unavailable, or the request itself is refused, the outcome is sent
again with backoff, until the store has answered or the lease has expired.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from flowfabric.errors import FabricError, SchemaTooNew
from flowfabric.event_loop import start_task
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.text import pluralize
from flowfabric.sdk.exceptions import LEASE_LOST_KINDS
from flowfabric.sdk.worker.outcome import (
    Failed,
    NothingToReport,
    Outcome,
    Succeeded,
    is_definitive,
    is_unstorable,
    report_outcome,
    unstorable_outcome,
    warn_of_unread,
)

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI

logger = logging.getLogger("flowfabric.worker")

MAX_BATCH = 500  # successes in one batch
MAX_BATCHES_IN_FLIGHT = 2
SMALL_BATCH = 8  # successes in flight, up to which a second batch is sent
LARGE_BATCH = 32  # successes from which on a second batch is sent if no more of them are in flight
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0  # before an outcome is sent again


class OutcomeReporter:
    """Reports the outcomes of one worker's attempts."""

    def __init__(
        self,
        engine: EngineAPI,
        on_reported: Callable[[list[Claimed]], None],
        *,
        lease_expires_at: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """Report to this engine; `on_reported` is called with attempts that need no further report."""
        self._engine = engine
        self._on_reported = on_reported
        self._lease_expires_at = lease_expires_at
        self._variables = contextvars.copy_context()  # reports run without the context variables of a handler
        self._unreported: dict[str, Claimed] = {}  # by lease id
        self._successes: list[tuple[Claimed, Succeeded]] = []  # not in flight yet
        self._senders = 0
        self._in_flight = 0
        self._is_sender_starting = False  # it will send everything that is queued when it runs
        self._tasks: set[asyncio.Task[None]] = set()
        self.succeeded = 0
        self.failed = 0  # attempts, including those that are retried

    def __len__(self) -> int:
        """The number of attempts whose outcome is not stored yet."""
        return len(self._unreported)

    def add(self, claimed: Claimed, outcome: Outcome) -> None:
        """Queue the outcome of an attempt."""
        self._unreported[claimed.lease_id] = claimed
        if type(outcome) is Succeeded:
            self._successes.append((claimed, outcome))
            is_as_large = LARGE_BATCH <= len(self._successes) >= self._in_flight
            max_senders = MAX_BATCHES_IN_FLIGHT if is_as_large or self._in_flight <= SMALL_BATCH else 1
            if not self._is_sender_starting and self._senders < max_senders:
                self._is_sender_starting = True
                self._senders += 1
                self._start(self._send_successes())
        elif type(outcome) is NothingToReport:
            self._forget([claimed])
        else:
            self._start(self._send(claimed, outcome))

    async def flush(self) -> None:
        """Wait until all outcomes are stored or given up."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def discard(self) -> list[Claimed]:
        """Report nothing more; return the attempts whose outcome is not stored."""
        for task in self._tasks:
            task.cancel()
        if self._is_sender_starting:  # cancelled before it ran, it does not reach its `finally`
            self._is_sender_starting = False
            self._senders -= 1
        unreported = list(self._unreported.values())
        self._successes.clear()
        self._forget(unreported)
        return unreported

    def _start(self, report: Coroutine[Any, Any, None]) -> None:
        task = start_task(report, context=self._variables.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_successes(self) -> None:
        self._is_sender_starting = False
        try:
            while batch := self._successes[:MAX_BATCH]:
                del self._successes[:MAX_BATCH]
                await self._send_batch(batch)
        finally:
            self._senders -= 1

    async def _send_batch(self, batch: list[tuple[Claimed, Succeeded]]) -> None:
        size = len(batch)
        self._in_flight += size

        def answered() -> None:
            """Allow the next batch to be sent while the answer to this one is still processed."""
            nonlocal size
            self._in_flight -= size
            size = 0

        undecided: list[tuple[Claimed, Succeeded, FabricError]] = []
        try:
            answers = await self._engine.complete_many(
                [(claimed.handle, outcome.result) for claimed, outcome in batch], encoding="json", answered=answered
            )
            for (claimed, outcome), answer in zip(batch, answers, strict=True):
                if not isinstance(answer, FabricError):
                    self.succeeded += 1
                    warn_of_unread(answer)
                elif is_unstorable(answer):
                    await self._send(claimed, unstorable_outcome(answer))
                elif is_definitive(answer):
                    _log_refusal(claimed, answer)
                else:
                    undecided.append((claimed, outcome, answer))
        except Exception:
            logger.exception("%s could not be reported as completed", pluralize(len(batch), "attempt"))
        finally:
            answered()
            resent = {claimed.lease_id for claimed, _, _ in undecided}
            self._forget([claimed for claimed, _ in batch if claimed.lease_id not in resent])
        for claimed, outcome, error in undecided:
            self._start(self._send(claimed, outcome, error))

    async def _send(self, claimed: Claimed, outcome: Outcome, last_error: FabricError | None = None) -> None:
        """Send an outcome until the store has decided about it or the lease has expired."""
        backoff_s = FIRST_BACKOFF_S
        try:
            while True:
                if last_error is not None:
                    if self._engine.estimate.now() > self._lease_expires_at(claimed.lease_id):
                        logger.warning(
                            "%s: its outcome was not stored before its lease expired: %s",
                            claimed.execution_id,
                            last_error,
                        )
                        return
                    logger.warning("%s: its outcome is sent again: %s", claimed.execution_id, last_error)
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
                try:
                    await report_outcome(self._engine, claimed.handle, outcome)
                    self.succeeded += type(outcome) is Succeeded
                    self.failed += type(outcome) is Failed
                    return
                except FabricError as error:
                    if is_definitive(error):
                        _log_refusal(claimed, error)
                        return
                    last_error = error
        except Exception:
            logger.exception("%s: its outcome could not be reported", claimed.execution_id)
        finally:
            self._forget([claimed])

    def _forget(self, attempts: list[Claimed]) -> None:
        for claimed in attempts:
            self._unreported.pop(claimed.lease_id, None)
        self._on_reported(attempts)


def _log_refusal(claimed: Claimed, refusal: FabricError) -> None:
    if refusal.kind in LEASE_LOST_KINDS or isinstance(refusal, SchemaTooNew):
        logger.warning("%s: its outcome was refused: %s", claimed.execution_id, refusal)
    else:
        logger.error("%s: its outcome could not be reported", claimed.execution_id, exc_info=refusal)
