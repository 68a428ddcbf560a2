"""Ends: what a worker's attempts came to, told to the store.

Attempts that succeed at about the same time are told together, without a task for each: while many are on their way
the next ones gather, and behind a few they need not wait. Nobody waits for an end here; who holds a lease hears when
there is nothing more to tell.

Only the store decides about an end. While it is unreachable, or something on the way refuses the request, the end is
sent again until the store has answered or the lease is over.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from flowfabric.engine_api import EngineAPI
from flowfabric.errors import FabricError, SchemaTooNew
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.text import pluralize
from flowfabric.sdk.worker.outcome import (
    LEASE_LOST_KINDS,
    Failed,
    NothingToReport,
    Outcome,
    Succeeded,
    failure_reason,
    is_definitive,
    is_unstorable,
    report_outcome,
)

logger = logging.getLogger("flowfabric.worker")

MAX_BATCH = 500  # successes that are told in one go
MAX_BATCHES_IN_FLIGHT = 2  # how many goes may be under way
SMALL_BATCH = 8  # under way that leave room for another go
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0  # before an end that found nobody is sent again


class OutcomeReporter:
    """The ends of one worker's attempts."""

    def __init__(
        self,
        engine: EngineAPI,
        over: Callable[[list[Claimed]], None],
        *,
        lease_expires_at: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """`over` is called with attempts of which there is nothing more to tell; `until` tells the end of a lease."""
        self._engine = engine
        self._over = over
        self._until = lease_expires_at
        self._surroundings = contextvars.copy_context()  # those of a handler are none of the store's business
        self._untold: dict[str, Claimed] = {}
        self._successes: list[tuple[Claimed, Succeeded]] = []  # that are not on their way yet
        self._lanes = 0
        self._on_their_way = 0
        self._is_starting = False  # a lane that will take whatever is there when its turn comes
        self._tasks: set[asyncio.Task[None]] = set()
        self.succeeded = 0
        self.failed = 0  # attempts, whether or not others follow

    def __len__(self) -> int:
        """How many are not told yet."""
        return len(self._untold)

    def add(self, claimed: Claimed, outcome: Outcome) -> None:
        """Tell how an attempt ended, soon."""
        self._untold[claimed.lease_id] = claimed
        if type(outcome) is Succeeded:
            self._successes.append((claimed, outcome))
            if not self._is_starting and self._lanes < (
                MAX_BATCHES_IN_FLIGHT if self._on_their_way <= SMALL_BATCH else 1
            ):
                self._is_starting = True
                self._lanes += 1
                self._start(self._tell_successes())
        elif type(outcome) is NothingToReport:
            self._forget([claimed])
        else:
            self._start(self._tell(claimed, outcome))

    async def flush(self) -> None:
        """Wait until nothing is left to tell."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def discard(self) -> list[Claimed]:
        """Tell nothing more; what was not told yet."""
        for task in self._tasks:
            task.cancel()
        if self._is_starting:  # cancelled before its turn came, it will never count itself out
            self._is_starting = False
            self._lanes -= 1
        left = list(self._untold.values())
        self._successes.clear()
        self._forget(left)
        return left

    def _start(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(telling, context=self._surroundings.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_successes(self) -> None:
        self._is_starting = False
        try:
            while some := self._successes[:MAX_BATCH]:
                del self._successes[:MAX_BATCH]
                await self._tell_together(some)
        finally:
            self._lanes -= 1

    async def _tell_together(self, successes: list[tuple[Claimed, Succeeded]]) -> None:
        claimed = [one for one, _ in successes]
        on_their_way = len(claimed)
        self._on_their_way += on_their_way

        def answered() -> None:
            """Make room for the next ones, which need not wait until something is made of the answer."""
            nonlocal on_their_way
            self._on_their_way -= on_their_way
            on_their_way = 0

        unheard: list[tuple[Claimed, Succeeded, FabricError]] = []
        try:
            answers = await self._engine.complete_many(
                [(one.handle, done.result) for one, done in successes], encoding="json", answered=answered
            )
            for (one, done), answer in zip(successes, answers, strict=True):
                if not isinstance(answer, FabricError):
                    self.succeeded += 1
                elif is_unstorable(answer):  # a result that cannot be kept will be none next time either
                    await self._tell(one, Failed(failure_reason(answer), "permanent"))
                elif is_definitive(answer):
                    _refused(one, answer)
                else:
                    unheard.append((one, done, answer))
        except Exception:
            logger.exception("%s could not be reported as completed", pluralize(len(claimed), "attempt"))
        finally:
            answered()
            again = {one.lease_id for one, _, _ in unheard}
            self._forget([one for one in claimed if one.lease_id not in again])
        for one, done, away in unheard:
            self._start(self._tell(one, done, away))

    async def _tell(self, claimed: Claimed, outcome: Outcome, away: FabricError | None = None) -> None:
        """Send one end until the store has judged it or the lease is over; `away` is why it was not heard so far."""
        pause_s = FIRST_BACKOFF_S
        try:
            while True:
                if away is not None:
                    if self._engine.estimate.now() > self._until(claimed.lease_id):
                        logger.warning(
                            "%s: its end was not heard, and its lease is over: %s", claimed.execution_id, away
                        )
                        return
                    logger.warning("%s: its end was not heard, and is sent again: %s", claimed.execution_id, away)
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, MAX_BACKOFF_S)
                try:
                    await report_outcome(self._engine, claimed.handle, outcome)
                    self.succeeded += type(outcome) is Succeeded
                    self.failed += type(outcome) is Failed
                    return
                except FabricError as refused:
                    if is_definitive(refused):
                        _refused(claimed, refused)
                        return
                    away = refused
        except Exception:
            logger.exception("%s: its end could not be told", claimed.execution_id)
        finally:
            self._forget([claimed])

    def _forget(self, told: list[Claimed]) -> None:
        for one in told:
            self._untold.pop(one.lease_id, None)
        self._over(told)


def _refused(claimed: Claimed, refusal: FabricError) -> None:
    if refusal.kind in LEASE_LOST_KINDS or isinstance(refusal, SchemaTooNew):
        logger.warning("%s: its end was refused: %s", claimed.execution_id, refusal)
    else:
        logger.error("%s: its end could not be told", claimed.execution_id, exc_info=refusal)
