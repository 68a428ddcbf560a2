"""Waiting for outcomes: a few long polls serve any number of waiting callers.

Executions that are awaited at the same time share a long poll. When a long poll returns, the next one includes those
that arrived meanwhile. While MAX_CONCURRENT_POLLS are in flight, newcomers are polled every OVERFLOW_POLL_S until a
long poll is free.
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
from flowfabric.engine.operations.pages import ExecutionOutcome
from flowfabric.event_loop import start_background
from flowfabric.ids import parse_execution_id
from flowfabric.model.states import TerminalOutcome

MAX_CONCURRENT_POLLS = 8  # long polls in flight
OVERFLOW_POLL_S = 1.0


class AwaitedOutcome:
    """The outcome of an execution, and how many callers wait for it."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[ExecutionOutcome] = asyncio.get_running_loop().create_future()
        self.callers = 0


class ClientResults(ClientBase):
    """Waits for outcomes of executions."""

    _awaited: dict[str, AwaitedOutcome]
    _unpolled: dict[str, None]  # awaited executions that no long poll includes yet, in order
    _pollers: set[asyncio.Task[None]]
    _long_polls = 0  # counted by the tasks themselves, because one that is about to return serves no further caller
    _is_polling_overflow = False

    async def await_end(self, execution_id: str, *, max_wait_ms: int = 0) -> ExecutionOutcome | None:
        execution = parse_execution_id(execution_id)
        if not max_wait_ms:
            response = await self.transport.request("GET", execution_path(execution, "end"), query={"result": "true"})
            return None if response.status == 204 else _to_outcome(decode_as(response.body, ExecutionOutcomeResponse))
        awaited = self._awaited.get(execution)
        if awaited is None:
            awaited = self._awaited[execution] = AwaitedOutcome()
            self._unpolled[execution] = None
            self._start_poller()
        awaited.callers += 1
        try:
            done, _ = await asyncio.wait((awaited.outcome,), timeout=max_wait_ms / 1000)
            return awaited.outcome.result() if done else None
        finally:
            awaited.callers -= 1
            if not awaited.callers and self._awaited.get(execution) is awaited:
                self._forget(execution)

    def _start_poller(self) -> None:
        if self._long_polls < MAX_CONCURRENT_POLLS:
            self._long_polls += 1
            work = self._poll_until_ended()
        elif not self._is_polling_overflow:
            self._is_polling_overflow = True
            work = self._poll_overflow()
        else:
            return
        start_background(work, self._pollers)

    async def _poll_until_ended(self) -> None:
        """Long-poll for executions that no other poll includes, and for those that arrive meanwhile."""
        polled: set[str] = set()
        try:
            while True:
                while self._unpolled and len(polled) < MAX_AWAITED:
                    polled.add(self._unpolled.popitem()[0])
                if not polled:
                    return
                await self._poll(polled, MAX_WAIT_MS)
                polled &= self._awaited.keys()
        finally:
            self._long_polls -= 1

    async def _poll_overflow(self) -> None:
        """Poll newcomers while all long polls are taken."""
        try:
            await asyncio.sleep(OVERFLOW_POLL_S)
            while self._unpolled:
                await self._poll(tuple(self._unpolled)[:MAX_AWAITED], 0)
                await asyncio.sleep(OVERFLOW_POLL_S)
        finally:
            self._is_polling_overflow = False

    async def _poll(self, executions: Collection[str], wait_ms: int) -> None:
        """Request the outcomes of these executions and resolve their callers."""
        try:
            body = {"execution_ids": list(executions), "wait_ms": wait_ms}
            outcomes = await self.transport.fetch(
                AwaitOutcomesResponse, "POST", "/v1/executions/ends", body, wait_ms=wait_ms
            )
        except errors.FabricError as refused:
            for execution in executions:
                self._resolve(execution, refused)
            return
        for ended in outcomes.ended:
            self._resolve(ended.execution_id, _to_outcome(ended))
        for execution, refusal in outcomes.refused.items():
            self._resolve(execution, decode_error(refusal))

    def _resolve(self, execution: str, outcome: ExecutionOutcome | errors.FabricError) -> None:
        awaited = self._forget(execution)
        if awaited is None:
            return
        if isinstance(outcome, ExecutionOutcome):
            awaited.outcome.set_result(outcome)
        else:
            awaited.outcome.set_exception(outcome)

    def _forget(self, execution: str) -> AwaitedOutcome | None:
        self._unpolled.pop(execution, None)
        return self._awaited.pop(execution, None)


def _to_outcome(response: ExecutionOutcomeResponse) -> ExecutionOutcome:
    result = response.result_b64
    return ExecutionOutcome(
        response.execution_id,
        TerminalOutcome(response.outcome),
        None if result is msgspec.UNSET else result,
        response.encoding,
        response.reason,
        response.namespace,
        response.error,
    )
