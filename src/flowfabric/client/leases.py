"""What workers do: claim, renew, end, and stay in the registry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
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
from flowfabric.handles import Handle
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Payload
from flowfabric.model.states import AttemptType
from flowfabric.model.worker import STOPPED, MarkedDead, NotRegistered, WorkerPage, WorkerRefreshed, WorkerRegistered

MAX_REMEMBERED_CLAIMS = 10  # claims under one key, each of which the server may have heard
SHORT_RETRY_FOR_S = 1.0  # the patience of a heartbeat, whose next one comes soon
NO_FENCE = Fence()


class RemoteLanePoller:
    """One worker's claims from its lanes, one after the other."""

    def __init__(self, engine: ClientLeases, lanes: Sequence[str], **ways: Any) -> None:
        self._engine = engine
        self._lanes = tuple(lanes)
        self._ways = ways

    async def claim(
        self, limit: int, *, max_wait_ms: int = 0, go_on: Callable[[], bool] = lambda: True
    ) -> list[answers.Claimed]:
        """Up to `limit` executions, as soon as there is at least one; ends early when the engine is nudged."""
        return await self._engine.claim_from_lanes(
            self._lanes, limit, max_wait_ms=max_wait_ms, go_on=go_on, **self._ways
        )

    def close(self) -> None:
        """Nothing is held between claims."""


class ClientLeases(ClientBase):
    """The holder's side."""

    _claim_keys: dict[str, tuple[str, list[dict[str, Any]]]]  # by worker instance: the claim whose answer never came
    _waiting_claims: dict[str, tuple[str, frozenset[str]]]  # by worker instance: who waits for work, and in which lanes
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
        """Claims from these lanes, one after the other."""
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
        """Up to `limit` executions from these lanes, as soon as there is one.

        A claim whose answer gets lost is asked again under its old key, here or by the next call: the server tells it
        again. One that forgot it leaves the leases to lapse.
        """
        if not lanes:
            raise errors.InvalidInput("lanes: empty")
        clock = asyncio.get_running_loop().time
        until = clock() + max_wait_ms / 1000
        offered = tuple(capabilities)
        # On a connection that may go silent no claim waits so long that this is noticed only after the lease.
        longest_ms = min(MAX_WAIT_MS, lease_ttl_ms // 2) if self.transport.is_networked else MAX_WAIT_MS
        while True:
            left_ms = max(0, int((until - clock()) * 1000))
            wait_ms = min(left_ms, longest_ms)
            body = {
                "worker_instance_id": worker_instance_id,
                "lanes": list(lanes),
                "limit": limit,
                "capabilities": offered,
                "lease_ttl_ms": lease_ttl_ms,
                "wait_ms": wait_ms,
                "namespaces": None if namespaces is None else list(namespaces),
            }
            self._waiting_claims[worker_instance_id] = (worker_id, frozenset(lanes))
            try:
                answer_s = self.transport.deadlines.limited(lease_ttl_ms / 4000).command_s
                path = f"/v1/workers/{quote_segment(worker_id)}/claims"
                told = await self._claim(path, worker_instance_id, body, answer_s)
            finally:
                del self._waiting_claims[worker_instance_id]
            claimed = [_claimed(one) for one in decode_as(told, ClaimWorkResponse).claimed]
            if claimed or left_ms <= wait_ms or not go_on():
                return claimed

    async def _claim(self, path: str, worker_instance_id: str, body: dict[str, Any], answer_s: float) -> bytes:
        """The answer to a claim, or to an earlier one under the same key, if that was heard and its answer got lost."""
        key, sent = self._claim_keys.setdefault(worker_instance_id, (self.minter.uuid(), []))
        asks = [body, *(earlier for earlier in reversed(sent) if earlier != body)]
        sent[:] = reversed(asks[:MAX_REMEMBERED_CLAIMS])
        for one in asks:
            # The server may know this key with what was asked earlier: then it is asked for that once more.
            with suppress(errors.IdempotencyConflict):
                told = await self.transport.request(
                    "POST",
                    path,
                    one,
                    wait_ms=one["wait_ms"],
                    answer_timeout_s=answer_s,
                    retry_for_s=0,
                    idempotency_key=key,
                )
                del self._claim_keys[worker_instance_id]
                return told.body
        del self._claim_keys[worker_instance_id]
        return await self._claim(path, worker_instance_id, body, answer_s)

    def wake_claims(self, lanes: Sequence[str]) -> None:
        """Let the claims of this process that wait for these lanes come to their end."""
        for instance, (worker_id, waited) in self._waiting_claims.items():
            if waited.isdisjoint(lanes):
                continue
            task = asyncio.get_running_loop().create_task(self._end_claims(worker_id, instance))
            self._ending_claims.add(task)
            task.add_done_callback(self._ending_claims.discard)

    async def _end_claims(self, worker_id: str, instance: str) -> None:
        """Ask for the end of a claim until it has come: the claim itself may still be on its way there."""
        path, pause_s = f"/v1/workers/{quote_segment(worker_id)}/claims/end", 0.01
        with suppress(errors.FabricError):  # the claim ends by itself then, a little later
            while instance in self._waiting_claims:
                await self.transport.request(
                    "POST", path, {"worker_instance_id": instance}, retry_for_s=SHORT_RETRY_FOR_S
                )
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, SHORT_RETRY_FOR_S)

    async def renew_many(
        self, handles: Sequence[Handle], *, lease_ttl_ms: int | None = None
    ) -> list[answers.Renewed | errors.FabricError]:
        """Move the ends of many leases; each answer stands for itself."""
        body = {
            "handles": [handle_to_text(handle, handle.signature) for handle in handles],
            "lease_ttl_ms": lease_ttl_ms,
        }
        told = await self.transport.request("POST", "/v1/leases/renew", body, retry_for_s=SHORT_RETRY_FOR_S)
        results: list[dict[str, Any]] = decode_as(told.body, dict[str, Any])["results"]
        return [error_in_batch(one) or convert_variant(one, answers.Renewed) for one in results]

    # -- ends -----------------------------------------------------------------------------------------------------

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
        """End the execution successfully, as its holder."""
        told = await self._post_as_holder("complete", handle, result_b64=result, encoding=encoding)
        completed: answers.Completed = decode_variant(told, answers.Completed)
        return completed

    async def complete_many(
        self,
        results: Sequence[tuple[Handle, bytes | None]],
        *,
        encoding: str | None = None,
        answered: Callable[[], None] | None = None,
    ) -> list[answers.Completed | errors.FabricError]:
        """Complete each of these with its result; one answer for each, in their order, refusals included.

        Each travels on its own, all of them at once: the server writes together what comes together. `answered` is
        called when all of them have been answered.
        """
        found = await asyncio.gather(
            *(self.complete(handle, result=result, encoding=encoding) for handle, result in results),
            return_exceptions=True,
        )
        if answered is not None:
            answered()
        told: list[answers.Completed | errors.FabricError] = []
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, errors.FabricError):
                raise answer
            told.append(answer)
        return told

    async def fail(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = NO_FENCE,
        source: str | None = None,
        reason: str,
        category: str = "transient",
        retry_policy: str | None = None,
    ) -> answers.RetryScheduled | answers.TerminalFailed:
        """End the attempt as failed, as its holder."""
        told = await self._post_as_holder("fail", handle, reason=reason, category=category, retry_policy=retry_policy)
        failed: answers.RetryScheduled | answers.TerminalFailed = decode_variant(
            told, answers.RetryScheduled, answers.TerminalFailed
        )
        return failed

    async def cancel_children(
        self, handle: Handle, execution_ids: Sequence[str], *, reason: str = ""
    ) -> answers.ChildrenCancelled:
        """Cancel children of the execution that is held."""
        cancelled, ended = list[str](), list[str]()
        for start in range(0, len(execution_ids), MAX_CHILDREN):
            part = list(execution_ids[start : start + MAX_CHILDREN])
            told = await self._post_as_holder("cancel-children", handle, execution_ids=part, reason=reason)
            answer: answers.ChildrenCancelled = decode_variant(told, answers.ChildrenCancelled)
            cancelled += answer.cancelled
            ended += answer.ended
        return answers.ChildrenCancelled(tuple(cancelled), tuple(ended))

    async def delay_for(self, handle: Handle, length_ms: int, *, reason: str = "") -> answers.Delayed:
        """Put the work away for a while; the same attempt goes on afterwards."""
        said = {"reason": reason} if reason else {}
        told = await self._post_as_holder("delay", handle, delay_ms=length_ms, **said)
        delayed: answers.Delayed = decode_variant(told, answers.Delayed)
        return delayed

    async def progress(
        self, handle: Handle, *, pct: int | None = None, message: str | None = None
    ) -> answers.ProgressNoted:
        """Note how far the work is."""
        told = await self._post_as_holder("progress", handle, pct=pct, message=message)
        noted: answers.ProgressNoted = decode_variant(told, answers.ProgressNoted)
        return noted

    async def _post_as_holder(self, verb: str, handle: Handle | None, **given: Any) -> bytes:
        """What the holder of a lease says; the answer's body."""
        if handle is None:
            raise errors.InvalidInput("handle: a server takes this from the holder of the lease only")
        body = {"handle": handle_to_text(handle, handle.signature)} | {
            name: one for name, one in given.items() if one is not None
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
    ) -> WorkerRegistered | WorkerRefreshed:
        """Enter the registry."""
        body = {
            "worker_instance_id": worker_instance_id,
            "lanes": list(lanes),
            "capabilities": list(capabilities),
            "liveness_ttl_ms": liveness_ttl_ms,
            "namespace": namespace,
        }
        told = await self.transport.request("POST", f"/v1/workers/{quote_segment(worker_id)}/register", body)
        entered: WorkerRegistered | WorkerRefreshed = decode_variant(told.body, WorkerRegistered, WorkerRefreshed)
        return entered

    async def heartbeat_worker(
        self, *, namespace: str = "default", worker_instance_id: str
    ) -> WorkerRefreshed | NotRegistered:
        """Stay in it."""
        body = {"worker_instance_id": worker_instance_id, "namespace": namespace}
        path = f"/v1/workers/{quote_segment(worker_instance_id)}/heartbeat"
        told = await self.transport.request("POST", path, body, retry_for_s=SHORT_RETRY_FOR_S)
        heard: WorkerRefreshed | NotRegistered = decode_variant(told.body, WorkerRefreshed, NotRegistered)
        return heard

    async def mark_worker_dead(
        self, *, namespace: str = "default", worker_instance_id: str, reason: str = ""
    ) -> MarkedDead | NotRegistered:
        """Take a worker out of the registry: an operator's business, unless it is the worker itself that stops."""
        body = {"worker_instance_id": worker_instance_id, "namespace": namespace, "reason": reason}
        verb = "leave" if reason == STOPPED else "dead"
        told = await self.transport.request("POST", f"/v1/workers/{quote_segment(worker_instance_id)}/{verb}", body)
        dead: MarkedDead | NotRegistered = decode_variant(told.body, MarkedDead, NotRegistered)
        return dead

    async def list_workers(
        self, namespace: str | None = None, *, after: str | None = None, limit: int = 1000
    ) -> WorkerPage:
        """The live workers of a namespace by instance id."""
        query = {"namespace": namespace, "cursor": after, "limit": limit}
        return decode_as((await self.transport.request("GET", "/v1/workers", query=query)).body, WorkerPage)


def _claimed(work: ClaimedWork) -> answers.Claimed:
    return answers.Claimed(
        execution_id=work.execution_id,
        lease_id=work.lease_id,
        lease_epoch=work.lease_epoch,
        attempt_index=work.attempt_index,
        attempt_id=work.attempt_id,
        attempt_type=AttemptType(work.attempt_type),
        lease_expires_at=work.lease_expires_at,
        handle=handle_from_text(work.handle),
        payload=Payload(
            execution_id=work.execution_id,
            execution_kind=work.execution_kind,
            creator_identity=work.creator_identity,
            input_payload=work.input_payload_b64,
            payload_encoding=work.payload_encoding,
            policy=work.policy,
        ),
        namespace=work.namespace,
    )
