"""Leases over HTTP: claims, renewals, outcomes and the worker registry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from flowfabric import errors
from flowfabric.api.claims import ClaimedWork, ClaimWorkResponse
from flowfabric.api.encoding import MAX_WAIT_MS, handle_from_text, handle_to_text
from flowfabric.api.leases import MAX_CHILDREN
from flowfabric.client.base import ClientBase
from flowfabric.client.decoding import convert_variant, decode_as, decode_variant
from flowfabric.client.errors import error_in_batch
from flowfabric.client.transport import quote_segment
from flowfabric.engine.types import Fence
from flowfabric.event_loop import start_background
from flowfabric.handles import Handle
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Payload
from flowfabric.model.failure import read_failure
from flowfabric.model.scheduling.worker import (
    STOPPED,
    MarkedDead,
    NotRegistered,
    ServedTask,
    WorkerPage,
    WorkerRefreshed,
    WorkerRegistered,
)
from flowfabric.model.states import AttemptType
from flowfabric.model.view import view_of

MAX_REMEMBERED_CLAIMS = 10  # request bodies sent under one idempotency key, any of which may have reached the server
SHORT_RETRY_FOR_S = 1.0  # heartbeats are repeated soon anyway
NO_FENCE = Fence()


class RemoteLanePoller:
    """Claims of one worker from its lanes."""

    def __init__(self, engine: ClientLeases, lanes: Sequence[str], **claim_options: Any) -> None:
        self._engine = engine
        self._lanes = tuple(lanes)
        self._claim_options = claim_options

    def max_claim(self, slots: int) -> int:
        """Return all slots, because each claim is a request."""
        return slots

    async def claim(
        self, limit: int, *, max_wait_ms: int = 0, go_on: Callable[[], bool] = lambda: True
    ) -> list[answers.Claimed]:
        """Claim up to `limit` executions, as soon as there is one; return early after `wake_claims`."""
        return await self._engine.claim_from_lanes(
            self._lanes, limit, max_wait_ms=max_wait_ms, go_on=go_on, **self._claim_options
        )

    def close(self) -> None:
        """Nothing is held between claims."""


class ClientLeases(ClientBase):
    """Operations of workers and holders of leases."""

    _claim_keys: dict[str, tuple[str, list[dict[str, Any]]]]  # by worker instance: the claim whose response was lost
    # The worker id and the lanes of the waiting claim of each worker instance.
    _waiting_claims: dict[str, tuple[str, frozenset[str]]]
    _ending_claims: set[asyncio.Task[Any]]

    def pulling(
        self,
        lanes: Sequence[str],
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        namespaces: Collection[str] | None = None,
    ) -> RemoteLanePoller:
        return RemoteLanePoller(
            self,
            lanes,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=tuple(capabilities),
            lease_ttl_ms=lease_ttl_ms,
            namespaces=namespaces,
        )

    async def claim_from_lanes(
        self,
        lanes: Sequence[str],
        limit: int,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        max_wait_ms: int = 0,
        go_on: Callable[[], bool] = lambda: True,
        namespaces: Collection[str] | None = None,
    ) -> list[answers.Claimed]:
        """Claim up to `limit` executions from these lanes, as soon as there is one.

        A claim whose response is lost is repeated under its idempotency key, here or by the next call, and the server
        returns the same response. If the server has lost it too, the leases expire.
        """
        if not lanes:
            raise errors.InvalidInput("lanes: empty")
        clock = asyncio.get_running_loop().time
        until = clock() + max_wait_ms / 1000
        offered_capabilities = tuple(capabilities)
        # On a network a connection may go silent: no poll is so long that this is noticed only after lease expiry.
        max_poll_ms = min(MAX_WAIT_MS, lease_ttl_ms // 2) if self.transport.is_networked else MAX_WAIT_MS
        while True:
            left_ms = max(0, int((until - clock()) * 1000))
            wait_ms = min(left_ms, max_poll_ms)
            body = {
                "worker_instance_id": worker_instance_id,
                "lanes": list(lanes),
                "limit": limit,
                "capabilities": offered_capabilities,
                "lease_ttl_ms": lease_ttl_ms,
                "wait_ms": wait_ms,
                "namespaces": None if namespaces is None else list(namespaces),
            }
            self._waiting_claims[worker_instance_id] = (worker_id, frozenset(lanes))
            try:
                answer_timeout_s = self.transport.deadlines.limited(lease_ttl_ms / 4000).command_s
                path = f"/v1/workers/{quote_segment(worker_id)}/claims"
                response = await self._claim(path, worker_instance_id, body, answer_timeout_s)
            finally:
                del self._waiting_claims[worker_instance_id]
            claimed = [_claimed(item) for item in decode_as(response, ClaimWorkResponse).claimed]
            if claimed or left_ms <= wait_ms or not go_on():
                return claimed

    async def _claim(self, path: str, worker_instance_id: str, body: dict[str, Any], answer_timeout_s: float) -> bytes:
        """Return the response to a claim, or to an earlier one under the same key whose response was lost."""
        key, sent = self._claim_keys.setdefault(worker_instance_id, (self.minter.uuid(), []))
        attempts = [body, *(earlier for earlier in reversed(sent) if earlier != body)]
        sent[:] = reversed(attempts[:MAX_REMEMBERED_CLAIMS])
        for item in attempts:
            # The server may know this key with an earlier body: then that request is repeated.
            with suppress(errors.IdempotencyConflict):
                response = await self.transport.request(
                    "POST",
                    path,
                    item,
                    wait_ms=item["wait_ms"],
                    answer_timeout_s=answer_timeout_s,
                    retry_for_s=0,
                    idempotency_key=key,
                )
                del self._claim_keys[worker_instance_id]
                return response.body
        del self._claim_keys[worker_instance_id]
        return await self._claim(path, worker_instance_id, body, answer_timeout_s)

    def wake_claims(self, lanes: Sequence[str]) -> None:
        for instance, (worker_id, claimed_lanes) in self._waiting_claims.items():
            if claimed_lanes.isdisjoint(lanes):
                continue
            start_background(self._end_claims(worker_id, instance), self._ending_claims)

    async def _end_claims(self, worker_id: str, instance: str) -> None:
        """End a waiting claim; repeat until it has returned, because the claim may reach the server later than this."""
        path, backoff_s = f"/v1/workers/{quote_segment(worker_id)}/claims/end", 0.01
        with suppress(errors.FabricError):  # the claim then ends by its own timeout
            while instance in self._waiting_claims:
                await self.transport.request(
                    "POST", path, {"worker_instance_id": instance}, retry_for_s=SHORT_RETRY_FOR_S
                )
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, SHORT_RETRY_FOR_S)

    async def renew_many(
        self, handles: Sequence[Handle], *, lease_ttl_ms: int | None = None
    ) -> list[answers.Renewed | errors.FabricError]:
        body = {
            "handles": [handle_to_text(handle, handle.signature) for handle in handles],
            "lease_ttl_ms": lease_ttl_ms,
        }
        response = await self.transport.request("POST", "/v1/leases/renew", body, retry_for_s=SHORT_RETRY_FOR_S)
        results: list[dict[str, Any]] = decode_as(response.body, dict[str, Any])["results"]
        return [error_in_batch(item) or convert_variant(item, answers.Renewed) for item in results]

    # -- outcomes -----------------------------------------------------------------------------------------------------

    async def complete(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = NO_FENCE,
        source: str | None = None,
        result: bytes | None = None,
        encoding: str | None = None,
    ) -> answers.Completed:
        response = await self._post_as_holder("complete", handle, result_b64=result, encoding=encoding)
        return decode_variant(response, answers.Completed)

    async def complete_many(
        self,
        results: Sequence[tuple[Handle, bytes | None]],
        *,
        encoding: str | None = None,
        answered: Callable[[], None] | None = None,
    ) -> list[answers.Completed | errors.FabricError]:
        """Complete many executions; return one result or error each, in order.

        Each is a request of its own, all sent at once; the server batches its writes. `answered` runs after the last
        response.
        """
        results_or_errors = await asyncio.gather(
            *(self.complete(handle, result=result, encoding=encoding) for handle, result in results),
            return_exceptions=True,
        )
        if answered is not None:
            answered()
        response: list[answers.Completed | errors.FabricError] = []
        for answer in results_or_errors:
            if isinstance(answer, BaseException) and not isinstance(answer, errors.FabricError):
                raise answer
            response.append(answer)
        return response

    async def fail(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = NO_FENCE,
        source: str | None = None,
        reason: str,
        category: str = "transient",
        failure: bytes | None = None,
        retry_policy: str | None = None,
    ) -> answers.RetryScheduled | answers.TerminalFailed:
        response = await self._post_as_holder(
            "fail",
            handle,
            reason=reason,
            category=category,
            error=None if failure is None else read_failure(failure),
            retry_policy=retry_policy,
        )
        return decode_variant(response, answers.RetryScheduled, answers.TerminalFailed)

    async def cancel_children(
        self, handle: Handle, execution_ids: Sequence[str], *, reason: str = ""
    ) -> answers.ChildrenCancelled:
        cancelled, ended = list[str](), list[str]()
        for start in range(0, len(execution_ids), MAX_CHILDREN):
            batch = list(execution_ids[start : start + MAX_CHILDREN])
            response = await self._post_as_holder("cancel-children", handle, execution_ids=batch, reason=reason)
            answer: answers.ChildrenCancelled = decode_variant(response, answers.ChildrenCancelled)
            cancelled += answer.cancelled
            ended += answer.ended
        return answers.ChildrenCancelled(tuple(cancelled), tuple(ended))

    async def delay_for(self, handle: Handle, length_ms: int, *, reason: str = "") -> answers.Delayed:
        options = {"reason": reason} if reason else {}
        response = await self._post_as_holder("delay", handle, delay_ms=length_ms, **options)
        return decode_variant(response, answers.Delayed)

    async def progress(
        self,
        handle: Handle,
        *,
        pct: int | None = None,
        message: str | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> answers.ProgressNoted:
        written = None if counts is None else dict(counts)
        response = await self._post_as_holder("progress", handle, pct=pct, message=message, counts=written)
        return decode_variant(response, answers.ProgressNoted)

    async def _post_as_holder(self, verb: str, handle: Handle | None, **fields: Any) -> bytes:
        """Post a request of the holder of a lease; return the response body."""
        if handle is None:
            raise errors.InvalidInput("handle: a server takes this from the holder of the lease only")
        body = {"handle": handle_to_text(handle, handle.signature)} | {
            name: item for name, item in fields.items() if item is not None
        }
        return (await self.transport.request("POST", f"/v1/leases/{verb}", body)).body

    # -- the registry ---------------------------------------------------------------------------------------------

    async def register_worker(
        self,
        *,
        namespace: str = "default",
        worker_instance_id: str,
        worker_id: str,
        lanes: Collection[str],
        capabilities: Iterable[str] = (),
        liveness_ttl_ms: int,
        tasks: Sequence[ServedTask] = (),
    ) -> WorkerRegistered | WorkerRefreshed:
        body = {
            "worker_instance_id": worker_instance_id,
            "lanes": list(lanes),
            "capabilities": list(capabilities),
            "liveness_ttl_ms": liveness_ttl_ms,
            "namespace": namespace,
            "tasks": list(tasks),
        }
        response = await self.transport.request("POST", f"/v1/workers/{quote_segment(worker_id)}/register", body)
        return decode_variant(response.body, WorkerRegistered, WorkerRefreshed)

    async def heartbeat_worker(
        self, *, namespace: str = "default", worker_instance_id: str
    ) -> WorkerRefreshed | NotRegistered:
        body = {"worker_instance_id": worker_instance_id, "namespace": namespace}
        path = f"/v1/workers/{quote_segment(worker_instance_id)}/heartbeat"
        response = await self.transport.request("POST", path, body, retry_for_s=SHORT_RETRY_FOR_S)
        return decode_variant(response.body, WorkerRefreshed, NotRegistered)

    async def mark_worker_dead(
        self, *, namespace: str = "default", worker_instance_id: str, reason: str = ""
    ) -> MarkedDead | NotRegistered:
        """Remove a worker from the registry; this needs an operator, unless a worker removes itself."""
        body = {"worker_instance_id": worker_instance_id, "namespace": namespace, "reason": reason}
        verb = "leave" if reason == STOPPED else "dead"
        response = await self.transport.request("POST", f"/v1/workers/{quote_segment(worker_instance_id)}/{verb}", body)
        return decode_variant(response.body, MarkedDead, NotRegistered)

    async def list_workers(
        self,
        namespace: str | None = None,
        *,
        after: str | None = None,
        limit: int = 1000,
        all_namespaces: bool = False,
    ) -> WorkerPage:
        if namespace is None and not all_namespaces:
            raise errors.Unavailable("list_workers", "of all namespaces")
        query = {"namespace": namespace, "cursor": after, "limit": limit}
        return await self.transport.fetch(WorkerPage, "GET", "/v1/workers", query=query)


def _claimed(work: ClaimedWork) -> answers.Claimed:
    return view_of(
        answers.Claimed,
        work,
        attempt_type=AttemptType(work.attempt_type),
        handle=handle_from_text(work.handle),
        payload=view_of(Payload, work, input_payload=work.input_payload_b64),
    )
