"""Waiting for ends: however many callers wait, a few requests wait for all of them.

Runs whose callers come at the same time are asked for together. A request that has heard of an end takes those along
that came meanwhile. When as many requests wait as may, newcomers are looked at now and then until one is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import msgspec

from flowfabric import errors
from flowfabric.api.encoding import MAX_WAIT_MS
from flowfabric.api.executions import MAX_AWAITED, AwaitOutcomesResponse, ExecutionOutcomeResponse
from flowfabric.client.base import ClientBase, execution_path
from flowfabric.client.decoding import decode_as
from flowfabric.client.errors import decode_error
from flowfabric.engine.claiming.poller import ExecutionOutcome
from flowfabric.ids import parse_execution_id
from flowfabric.model.states import TerminalOutcome

MAX_CONCURRENT_POLLS = 8  # requests that wait at a time
OVERFLOW_POLL_S = 1.0


class AwaitedOutcome:
    """An end, and how many callers wait for it."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[ExecutionOutcome] = asyncio.get_running_loop().create_future()
        self.callers = 0


class ClientResults(ClientBase):
    """The ends of executions, for whoever waits for them."""

    _awaited: dict[str, AwaitedOutcome]
    _unpolled: dict[str, None]  # those that no request asks for yet, in order
    _pollers: set[asyncio.Task[None]]
    _asking = 0  # counted by the tasks themselves: one that has just returned sees to nobody any more
    _is_looking = False

    async def await_end(self, execution_id: str, *, max_wait_ms: int = 0) -> ExecutionOutcome | None:
        """How the execution ended; None when it has not within the time."""
        execution = parse_execution_id(execution_id)
        if not max_wait_ms:
            told = await self.transport.request("GET", execution_path(execution, "end"), query={"result": "true"})
            return None if told.status == 204 else _ended(decode_as(told.body, ExecutionOutcomeResponse))
        awaited = self._awaited.get(execution)
        if awaited is None:
            awaited = self._awaited[execution] = AwaitedOutcome()
            self._unpolled[execution] = None
            self._see_to_newcomers()
        awaited.callers += 1
        try:
            done, _ = await asyncio.wait((awaited.outcome,), timeout=max_wait_ms / 1000)
            return awaited.outcome.result() if done else None
        finally:
            awaited.callers -= 1
            if not awaited.callers and self._awaited.get(execution) is awaited:
                self._forget(execution)

    def _see_to_newcomers(self) -> None:
        if self._asking < MAX_CONCURRENT_POLLS:
            self._asking += 1
            work = self._ask_until_all_ended()
        elif not self._is_looking:
            self._is_looking = True
            work = self._look_now_and_then()
        else:
            return
        task = asyncio.create_task(work)
        self._pollers.add(task)
        task.add_done_callback(self._pollers.discard)

    async def _ask_until_all_ended(self) -> None:
        """Ask for those that nobody asks for, and for whoever comes along."""
        asked: set[str] = set()
        try:
            while True:
                while self._unpolled and len(asked) < MAX_AWAITED:
                    asked.add(self._unpolled.popitem()[0])
                if not asked:
                    return
                await self._ask(asked, MAX_WAIT_MS)
                asked &= self._awaited.keys()
        finally:
            self._asking -= 1

    async def _look_now_and_then(self) -> None:
        """Look at newcomers as long as no request takes them along."""
        try:
            await asyncio.sleep(OVERFLOW_POLL_S)
            while self._unpolled:
                await self._ask(tuple(self._unpolled)[:MAX_AWAITED], 0)
                await asyncio.sleep(OVERFLOW_POLL_S)
        finally:
            self._is_looking = False

    async def _ask(self, executions: Collection[str], wait_ms: int) -> None:
        """Ask for the ends of these, and tell their callers what was heard."""
        try:
            body = {"execution_ids": list(executions), "wait_ms": wait_ms}
            told = await self.transport.request("POST", "/v1/executions/ends", body, wait_ms=wait_ms)
            ends = decode_as(told.body, AwaitOutcomesResponse)
        except errors.FabricError as refused:
            for execution in executions:
                self._tell(execution, refused)
            return
        for one in ends.ended:
            self._tell(one.execution_id, _ended(one))
        for execution, refusal in ends.refused.items():
            self._tell(execution, decode_error(refusal))

    def _tell(self, execution: str, heard: ExecutionOutcome | errors.FabricError) -> None:
        awaited = self._forget(execution)
        if awaited is None:
            return
        if isinstance(heard, ExecutionOutcome):
            awaited.outcome.set_result(heard)
        else:
            awaited.outcome.set_exception(heard)

    def _forget(self, execution: str) -> AwaitedOutcome | None:
        self._unpolled.pop(execution, None)
        return self._awaited.pop(execution, None)


def _ended(told: ExecutionOutcomeResponse) -> ExecutionOutcome:
    result = told.result_b64
    return ExecutionOutcome(
        told.execution_id,
        TerminalOutcome(told.outcome),
        None if result is msgspec.UNSET else result,
        told.encoding,
        told.reason,
        told.namespace,
    )
