"""The verbs of an execution's life: create, renew, note, finish, delay, cancel, replay, expire, operate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine import arguments
from flowfabric.engine.core import Core, Rows
from flowfabric.handles import Handle, HandleFields
from flowfabric.model import answers
from flowfabric.model.execution import Execution, IdempotencyKey
from flowfabric.model.flow import Dependency, EdgeGroup
from flowfabric.rules import (
    cancel,
    delay,
    dependents,
    expiry,
    finish,
    lease,
    limits,
    notes,
    operate,
    replay,
    retention,
    tags,
)
from flowfabric.rules.change import Decision
from flowfabric.rules.create import CreateExecution, create
from flowfabric.rules.lease import Fence
from flowfabric.stores.base import Held, Want

HANDLE = Fence()


class Executions(Core):
    """What can be done to an execution, by the names of the specification."""

    # -- create -------------------------------------------------------------------------------------------------

    async def create_execution(
        self,
        *,
        execution_id: str,
        namespace: str = "default",
        lane_id: str = "default",
        execution_kind: str = "task",
        input_payload: bytes = b"",
        payload_encoding: str | None = None,
        priority: int = 0,
        creator_identity: str = "",
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
        policy: str | Mapping[str, Any] | None = None,
        delay_until: int | None = None,
        execution_deadline_at: int | None = None,
    ) -> answers.Created | answers.Duplicate:
        """Create an execution, or learn which earlier one stands for the same id or idempotency key."""
        ask = checked_ask(
            CreateExecution(
                execution_id=execution_id,
                partition=0,
                namespace=namespace,
                lane_id=lane_id,
                execution_kind=execution_kind,
                input_payload=input_payload,
                payload_encoding=payload_encoding,
                priority=priority,
                creator_identity=creator_identity,
                idempotency_key=idempotency_key,
                tags=dict(tags or {}),
                policy=_policy_text(policy),
                delay_until=delay_until,
                execution_deadline_at=execution_deadline_at,
            )
        )
        wants, nothing = _create_wants(ask)
        return await self.settle(wants, lambda rows, now: _create(rows, ask, now), trusting=nothing)

    async def create_executions(
        self, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate | errors.FabricError]:
        """Create many in as few round trips as there are batches; each answer stands for itself, refusals included."""
        results: list[Any] = []
        changes, places = [], []
        checked: list[CreateExecution | None] = []
        now = self.estimate.now()
        taken: set[Any] = set()
        for ask in asks:
            place = len(results)
            results.append(None)
            try:
                ask = checked_ask(ask)
            except errors.FabricError as refused:
                checked.append(None)
                results[place] = refused
                continue
            checked.append(ask)
            wants, nothing = _create_wants(ask)
            decision = _create(nothing, ask, now)
            roots = {(want.row, want.key) for want in wants}
            if decision.change is not None and taken.isdisjoint(roots):
                taken |= roots
                places.append((place, decision))
                changes.append(msgspec.structs.replace(decision.change, id=self.minter.change_id()))
        verdicts = await self.commits.add_all(changes)
        for (place, decision), change, verdict in zip(places, changes, verdicts, strict=True):
            if isinstance(verdict, int):
                self.note(change, [], verdict)
                results[place] = decision.unwrap(verdict)
        for place, asked in enumerate(checked):  # duplicates, refusals and lost answers: one by one, on a fresh look
            if results[place] is None and asked is not None:
                results[place] = await self._create_carefully(asked)
        return results

    async def _create_carefully(self, ask: CreateExecution) -> answers.Created | answers.Duplicate | errors.FabricError:
        wants, _ = _create_wants(ask)
        try:
            return await self.settle(wants, lambda rows, now: _create(rows, ask, now))
        except errors.FabricError as refused:
            return refused

    # -- the holder's verbs -------------------------------------------------------------------------------------

    async def renew(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        attempt_index: int | None = None,
        fence: Fence = HANDLE,
        lease_ttl_ms: int | None = None,
    ) -> answers.Renewed:
        """Move the end of a live lease to now + ttl, which may also be earlier than it was."""
        if handle is None:
            held = self._named_lease(execution_id, attempt_index, fence, lease_ttl_ms)
        else:
            held = self._held(self.opened(handle), lease_ttl_ms)
        [answer] = await self._renew([held])
        if isinstance(answer, errors.FabricError):
            raise answer
        return answer

    async def renew_many(
        self, handles: Sequence[Handle], *, lease_ttl_ms: int | None = None
    ) -> list[answers.Renewed | errors.FabricError]:
        """Renew many leases in one round trip; each answer stands for itself."""
        return await self._renew([self._held(self.opened(handle), lease_ttl_ms) for handle in handles])

    async def _renew(self, held: Sequence[Held | errors.FabricError]) -> list[answers.Renewed | errors.FabricError]:
        leases = [lease for lease in held if isinstance(lease, Held)]
        ends = dict(zip(leases, await self.store.renew(leases), strict=True)) if leases else {}
        results: list[answers.Renewed | errors.FabricError] = []
        for asked in held:
            end = ends[asked] if isinstance(asked, Held) else None
            if isinstance(asked, errors.FabricError):
                results.append(asked)
            elif end is not None:
                if (seen := self._seen.get(asked.execution_id)) is not None:
                    self._seen[asked.execution_id] = msgspec.structs.replace(seen, lease_expires_at=end)
                results.append(answers.Renewed(end, asked.lease_epoch))
            else:
                results.append(await self._why_not_renewed(asked))
        return results

    async def _why_not_renewed(self, held: Held) -> answers.Renewed | errors.FabricError:
        fence = Fence(held.lease_id, held.lease_epoch, held.attempt_id)
        try:
            await self.settle_execution(
                held.execution_id, lambda row, now: lease.renewable(row, held.attempt_index, fence, now)
            )
        except errors.FabricError as refused:
            return refused
        return (await self._renew([held]))[0]  # it was live after all: the first try met a passing fault

    def _held(self, fields: HandleFields, lease_ttl_ms: int | None) -> Held:
        ttl = fields.lease_ttl_ms if lease_ttl_ms is None else limits.duration("lease_ttl_ms", lease_ttl_ms)
        return Held(
            fields.execution_id, fields.attempt_index, fields.attempt_id, fields.lease_id, fields.lease_epoch, ttl
        )

    def _named_lease(
        self, execution_id: str | None, attempt_index: int | None, fence: Fence, lease_ttl_ms: int | None
    ) -> Held | errors.FabricError:
        execution = ids.parse_execution_id(limits.text("execution_id", execution_id))
        ttl = limits.duration("lease_ttl_ms", lease_ttl_ms)
        index = limits.integer("attempt_index", attempt_index, least=0)
        parts = [part for part in (fence.lease_id, fence.lease_epoch, fence.attempt_id) if part is not None]
        if len(parts) < 3:
            return errors.InvalidInput("partial_fence_triple" if parts else "fence_required")
        return Held(execution, index, fence.attempt_id or "", fence.lease_id or "", fence.lease_epoch or 0, ttl)

    async def progress(
        self, handle: Handle, *, pct: int | None = None, message: str | None = None
    ) -> answers.ProgressNoted:
        """Note how far the work is; what is not given stays as it was."""
        fields = self.opened(handle)
        return await self.update_progress(
            fields.execution_id, fence=_fence(fields), pct=pct, message=message, _trust=True
        )

    async def update_progress(
        self,
        execution_id: str,
        *,
        fence: Fence,
        pct: int | None = None,
        message: str | None = None,
        _trust: bool = False,
    ) -> answers.ProgressNoted:
        """Note progress for a caller that names its lease."""
        execution = ids.parse_execution_id(limits.text("execution_id", execution_id))
        if pct is not None:
            limits.integer("progress_pct", pct, least=0, most=100)
        limits.optional_text("progress_message", message)
        return await self.settle_execution(
            execution, lambda row, now: notes.progress(row, fence, pct, message, now), trust=_trust
        )

    async def complete(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = HANDLE,
        source: str | None = None,
        result: bytes | None = None,
        encoding: str | None = None,
    ) -> answers.Completed:
        """End the execution successfully, as the holder of a handle, of a fence, or as an operator."""
        execution, fence = self._who(handle, execution_id, fence)
        payload = None if result is None else limits.payload("result_payload", result)
        limits.optional_text("result_encoding", encoding, limit=limits.MAX_NAME_BYTES)
        return await self.settle_execution(
            execution,
            lambda row, now: finish.complete(row, fence, source, payload, encoding, now),
            trust=handle is not None,
        )

    async def fail(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = HANDLE,
        source: str | None = None,
        reason: str,
        category: str = "transient",
        retry_policy: str | None = None,
    ) -> answers.RetryScheduled | answers.TerminalFailed:
        """End the attempt as failed; the retry policy decides whether another one follows."""
        execution, fence = self._who(handle, execution_id, fence)
        limits.text("failure_reason", reason)
        limits.text("failure_category", category, limit=limits.MAX_NAME_BYTES)
        limits.optional_text("retry_policy_json", retry_policy)
        chance = self.chance()
        return await self.settle_execution(
            execution,
            lambda row, now: finish.fail(
                row,
                fence,
                source,
                reason=reason,
                category=category,
                retry_policy=retry_policy,
                chance=chance,
                now=now,
            ),
            trust=handle is not None,
        )

    async def delay(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = HANDLE,
        source: str | None = None,
        delay_until: int,
    ) -> answers.Delayed:
        """Put the work away until an instant; the same attempt goes on afterwards."""
        execution, fence = self._who(handle, execution_id, fence)
        until = limits.instant("delay_until", delay_until)
        return await self.settle_execution(
            execution, lambda row, now: delay.delay(row, fence, source, until, now), trust=self._untimed(execution)
        )

    async def wait_children(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = HANDLE,
        source: str | None = None,
    ) -> answers.Moved:
        """Put the work away until its dependencies are resolved."""
        execution, fence = self._who(handle, execution_id, fence)
        seen = self._seen.get(execution) if self._untimed(execution) else None
        return await self.settle(
            (Want(Execution, (execution,)),),
            lambda rows, now: dependents.wait_children(
                arguments.first(rows[0]), arguments.first(rows[1]), fence, source, now
            ),
            trusting=[[seen], []] if seen is not None and seen.flow_id is None else None,
            further=self.group_of,
        )

    async def group_of(self, rows: Rows) -> Rows:
        """The join of a loaded execution, to be decided together with it."""
        row = arguments.first(rows[0])
        if row is None or row.flow_id is None:
            return [[]]
        return (await self.load((Want(EdgeGroup, (row.flow_id, row.execution_id)),))).rows

    def _untimed(self, execution_id: str) -> bool:
        """Whether a remembered sheet will do: the time left of an attempt is reckoned from a fresh look only."""
        seen = self._seen.get(execution_id)
        return seen is not None and seen.attempt_timeout_at is None

    def _who(self, handle: Handle | None, execution_id: str | None, fence: Fence) -> tuple[str, Fence]:
        if handle is not None:
            fields = self.opened(handle)
            return fields.execution_id, _fence(fields)
        return ids.parse_execution_id(limits.text("execution_id", execution_id)), fence

    # -- cancel, expire, replay ---------------------------------------------------------------------------------

    async def cancel(self, handle: Handle, *, reason: str = "") -> answers.Cancelled:
        """Cancel as the holder; again is success."""
        fields = self.opened(handle)
        limits.text("reason", reason)
        return await self.settle_execution(
            fields.execution_id, lambda row, _: cancel.cancel_by_handle(row, _fence(fields), reason)
        )

    async def cancel_execution(
        self,
        execution_id: str,
        *,
        reason: str = "",
        source: str = lease.OPERATOR_OVERRIDE,
        fence: Fence = HANDLE,
    ) -> answers.Cancelled:
        """Cancel whatever it is doing; again is success."""
        execution = ids.parse_execution_id(limits.text("execution_id", execution_id))
        limits.text("reason", reason)
        limits.text("source", source, limit=limits.MAX_NAME_BYTES)
        return await self.settle_execution(execution, lambda row, _: cancel.cancel(row, fence, source, reason))

    async def replay_execution(self, execution_id: str) -> answers.Replayed:
        """Give a finished execution another life."""
        execution = ids.parse_execution_id(limits.text("execution_id", execution_id))

        async def join(rows: Rows) -> Rows:
            return (
                await self._join_to_reset(rows[0][0]) if dependents.is_skipped_member(arguments.first(rows[0])) else []
            )

        def decide(rows: Rows, _: int) -> Decision[answers.Replayed]:
            row = arguments.first(rows[0])
            if row is None or len(rows) == 1:
                return replay.replay(row)
            upstreams = {each[0].execution_id: each[0] for each in rows[3:] if each}
            return dependents.replay_member(row, arguments.first(rows[1]), rows[2], upstreams)

        return await self.settle((Want(Execution, (execution,)),), decide, further=join)

    async def _join_to_reset(self, row: Execution) -> Rows:
        """The group of a skipped member, its dependencies, and each of its upstreams."""
        wants = (Want(EdgeGroup, (row.flow_id, row.execution_id)), Want(Dependency, (row.execution_id,)))
        group, inbound = (await self.load(wants)).rows
        names = sorted({one.upstream_execution_id for one in inbound})
        upstreams = (await self.load([Want(Execution, (name,)) for name in names])).rows
        return [group, inbound, *upstreams]

    async def expire_execution(
        self, execution_id: str, reason: str = expiry.ATTEMPT_TIMEOUT
    ) -> answers.Expired | answers.AlreadyTerminal:
        """End the execution as expired, due or not."""
        execution = ids.parse_execution_id(limits.text("execution_id", execution_id))
        if reason not in (expiry.ATTEMPT_TIMEOUT, expiry.EXECUTION_DEADLINE):
            raise errors.InvalidInput(f"reason: {reason!r} is neither attempt_timeout nor execution_deadline")
        return await self.settle_execution(execution, lambda row, _: expiry.expire(row, execution, reason))

    async def expire_if_due(
        self, execution_id: str, reason: str
    ) -> answers.Expired | answers.AlreadyTerminal | answers.NotDue:
        """The sweep's form: only when the timer is armed and its time has come."""
        return await self.settle_execution(
            execution_id, lambda row, now: expiry.expire_if_due(row, execution_id, reason, now)
        )

    async def promote_delayed(self, execution_id: str) -> answers.Promotion:
        """Make a delayed execution claimable, if its time has come."""
        execution = ids.parse_execution_id(limits.text("execution_id", execution_id))
        return await self.settle_execution(execution, delay.promote_delayed)

    async def mark_lease_expired_if_due(self, execution_id: str) -> answers.MarkedExpired | answers.AlreadySatisfied:
        """Mark a lapsed lease, so that the work can be taken over."""
        execution = ids.parse_execution_id(limits.text("execution_id", execution_id))
        return await self.settle_execution(execution, expiry.mark_lease_expired_if_due)

    async def purge_execution(self, execution_id: str) -> bool:
        """Remove a finished execution whose retention is over, with everything it owns."""
        return await self.settle_execution(execution_id, retention.purge)

    # -- operators and schedulers -------------------------------------------------------------------------------

    async def revoke_lease(
        self,
        execution_id: str,
        *,
        expected_lease_id: str = "",
        worker_instance_id: str = "",
        reason: str = "operator_revoke",
    ) -> answers.Revoked | answers.AlreadySatisfied:
        """Take a lease away at once."""
        execution = ids.parse_execution_id(limits.text("execution_id", execution_id))
        limits.text("reason", reason)
        return await self.settle_execution(
            execution, lambda row, _: operate.revoke_lease(row, expected_lease_id, worker_instance_id, reason)
        )

    async def change_priority(self, execution_id: str, new_priority: int, *, lane_id: str = "") -> answers.Changed:
        """Re-order a claimable execution. The lane is a hint; its own lane decides."""
        execution = ids.parse_execution_id(limits.text("execution_id", execution_id))
        priority = limits.integer("new_priority", new_priority)
        return await self.settle_execution(execution, lambda row, _: operate.change_priority(row, priority))

    async def block_execution_for_admission(
        self, execution_id: str, *, reason: str, detail: str = ""
    ) -> answers.Blocked | answers.Rejected:
        """Take a claimable execution out of reach; a refusal is an answer, not an error."""
        execution = ids.parse_execution_id(limits.text("execution_id", execution_id))
        limits.text("detail", detail)
        try:
            return await self.settle_execution(execution, lambda row, _: operate.block(row, reason, detail))
        except errors.StoreUnavailable:
            raise
        except errors.InvalidBlockingReason:
            raise
        except errors.FabricError as refused:
            return answers.Rejected(str(refused))

    async def block_route(
        self, execution_id: str, *, detail: str = "no connected worker satisfies required_capabilities"
    ) -> answers.Blocked | answers.Rejected:
        """Note that no connected worker can run it; a worker that can still takes it at once."""
        return await self.block_execution_for_admission(
            execution_id, reason="waiting_for_capable_worker", detail=detail
        )

    async def unblock_execution(self, execution_id: str, *, expected_reason: str | None = None) -> answers.Unblocked:
        """Make a blocked execution claimable again."""
        execution = ids.parse_execution_id(limits.text("execution_id", execution_id))
        return await self.settle_execution(execution, lambda row, _: operate.unblock(row, expected_reason))

    async def set_execution_tag(self, execution_id: str, key: str, value: str) -> None:
        """Set one tag."""
        execution = ids.parse_execution_id(limits.text("execution_id", execution_id))
        if refused := tags.check_tag_key(limits.text("key", key)):
            raise refused
        limits.text("value", value)
        await self.settle_execution(execution, lambda row, _: notes.set_tags(row, {key: value}))

    async def set_execution_tags(self, execution_id: str, pairs: Mapping[str, str]) -> int:
        """Set several tags, all or none; how many were given."""
        execution = ids.parse_execution_id(limits.text("execution_id", execution_id))
        if refused := tags.check_not_empty(pairs):
            raise refused
        for value in pairs.values():
            limits.text("value", value)

        def decide(row: Execution | None, _: int) -> Decision[int]:
            if row is not None and (bad := tags.check_tags(pairs)):
                return Decision(bad)
            return notes.set_tags(row, pairs)

        return await self.settle_execution(execution, decide)


def _fence(fields: HandleFields) -> Fence:
    return Fence(fields.lease_id, fields.lease_epoch, fields.attempt_id)


def _create_wants(ask: CreateExecution) -> tuple[tuple[Want, ...], list[list[Any]]]:
    wants: tuple[Want, ...] = (Want(Execution, (ask.execution_id,)),)
    if ask.idempotency_key:
        wants += (Want(IdempotencyKey, (ask.partition, ask.digest)),)
    return wants, [[] for _ in wants]


def _create(rows: list[list[Any]], ask: CreateExecution, now: int) -> Decision[answers.Created | answers.Duplicate]:
    existing = rows[0][0] if rows[0] else None
    remembered = rows[1][0] if len(rows) > 1 and rows[1] else None
    return create(existing, remembered, ask, now)


def _policy_text(policy: object) -> str | None:
    if policy is None or isinstance(policy, str):
        return limits.optional_text("policy", policy) or None
    if not isinstance(policy, Mapping):
        raise errors.InvalidInput("policy: neither JSON text nor a mapping")
    try:
        return limits.text("policy", msgspec.json.encode(policy).decode())
    except (TypeError, ValueError, UnicodeEncodeError, OverflowError) as fault:
        raise errors.InvalidPolicyJson("malformed") from fault


def checked_ask(ask: CreateExecution) -> CreateExecution:
    """The request with its free texts and numbers looked at, and its partition read from the id."""
    execution_id = ids.parse_execution_id(limits.text("execution_id", ask.execution_id))
    ids.parse_lane_id(limits.text("lane_id", ask.lane_id))
    limits.text("namespace", ask.namespace, limit=limits.MAX_NAME_BYTES)
    limits.text("execution_kind", ask.execution_kind, limit=limits.MAX_NAME_BYTES)
    limits.text("creator_identity", ask.creator_identity, limit=limits.MAX_NAME_BYTES)
    limits.optional_text("payload_encoding", ask.payload_encoding, limit=limits.MAX_NAME_BYTES)
    limits.optional_text("idempotency_key", ask.idempotency_key)
    limits.optional_text("policy", ask.policy)
    if len(ask.tags) > limits.MAX_TAGS:
        raise errors.InvalidInput(f"tags: {len(ask.tags)} of them, the limit is {limits.MAX_TAGS}")
    for key, value in ask.tags.items():
        limits.text("tags", key)
        limits.text(f"tags[{key}]", value)
    limits.integer("priority", ask.priority)
    instants = {
        name: limits.instant(name, value)
        for name in ("delay_until", "execution_deadline_at")
        if (value := getattr(ask, name)) is not None
    }
    return msgspec.structs.replace(
        ask,
        execution_id=execution_id,
        partition=ids.partition_of(execution_id),
        input_payload=limits.payload("input_payload", ask.input_payload),
        **instants,
    )
