"""The outside world of a program: who sends its messages, votes, waits for its end, and reads the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flowfabric import Run, RunFailed
from flowfabric.errors import FabricError
from tests.sdk.programs.journal import Journal, Wish
from tests.sdk.programs.model import End


async def wait_for_end(run: Run[Any], seconds: float) -> End:
    """Wait for the end of a run, but not for ever."""
    try:
        return End(value=await run.result(timeout=seconds))
    except RunFailed as failed:
        return End(reason=failed.reason)
    except TimeoutError:
        return End(is_stuck=True)


async def grant_wishes(journal: Journal, run: Run[Any]) -> None:
    """Send the messages and votes that a program waits for, until cancelled."""

    async def grant(wish: Wish) -> None:
        await asyncio.sleep(wish.after_s)
        with suppress(FabricError):  # the run may have ended, or given the approval up
            if wish.mailbox is not None:
                await run.signal(wish.mailbox, wish.value)
            elif wish.link is not None:
                await run.vote(wish.link, wish.value, by="ana")

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(grant(await journal.wishes.get()))


class AlarmHandler(logging.Handler):
    """Collects the mismatches that the engine reports."""

    def __init__(self, alarms: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._alarms = alarms

    def emit(self, record: logging.LogRecord) -> None:
        self._alarms.append(record.getMessage())


@contextmanager
def collected_alarms(journal: Journal) -> Iterator[None]:
    """Add the mismatches that the engine reports to the journal."""
    handler = AlarmHandler(journal.alarms)
    logger = logging.getLogger("flowfabric.durable")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
