"""Create: how an execution comes into being, once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.answers.execution import Created, Duplicate
from flowfabric.model.change import BulkInsert, Change, Guard, Insert, Upsert, Write, absent, from_now
from flowfabric.model.execution import Execution, IdempotencyKey, Payload, QueueKey
from flowfabric.model.states import (
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution.policy import Terms, encode_terms, parse_policy
from flowfabric.rules.execution.tags import check_created_tags, encode_tags
from flowfabric.rules.scheduling import queue


class CreateExecution(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a caller asks for. The partition is the one in the id."""

    execution_id: str
    partition: int
    namespace: str
    lane_id: str
    execution_kind: str
    input_payload: bytes = b""
    payload_encoding: str | None = None
    priority: int = 0
    creator_identity: str = ""
    idempotency_key: str | None = None
    tags: dict[str, str] = {}
    policy: str | None = None
    delay_until: int | None = None
    execution_deadline_at: int | None = None
    parent_id: str | None = None

    @property
    def digest(self) -> str:
        """What the idempotency key is remembered by; namespaces never share one."""
        scope = f"{len(self.namespace)}:{self.namespace}:{self.idempotency_key}"
        return hashlib.sha256(scope.encode()).hexdigest()


class PolicyDefaults(msgspec.Struct, frozen=True, gc=False):
    """What holds for executions whose policies do not say: how long they are kept, and how those of a lane age."""

    retention_ms: int | None = None
    ageing_ms: dict[str, int] = {}

    def fill(self, terms: Terms, lane_id: str) -> Terms | None:
        """The terms with what they leave open; None when that is nothing."""
        fields: dict[str, int] = {}
        if self.retention_ms is not None and terms.retention_ttl_ms is None:
            fields["retention_ttl_ms"] = self.retention_ms
        if terms.ageing is None and (ageing := self.ageing_ms.get(lane_id)):
            fields["ageing"] = ageing
        return replace(terms, **fields) if fields else None


NO_DEFAULTS = PolicyDefaults()


def create(
    existing: Execution | None,
    remembered: IdempotencyKey | None,
    ask: CreateExecution,
    now: int,
    *,
    defaults: PolicyDefaults = NO_DEFAULTS,
) -> Decision[Created | Duplicate]:
    """A new execution, claimable at once or after its delay; an id or key that is known changes nothing.

    An id that exists in another namespace is refused. Nothing of that execution is revealed.
    """
    if remembered is not None and remembered.expires_at > now:
        return Decision(Duplicate(remembered.execution_id))
    if existing is not None:
        if existing.namespace != ask.namespace:
            return refuse(errors.IdInOtherNamespace(execution_id=ask.execution_id))
        return Decision(Duplicate(existing.execution_id))
    terms, terms_text = parse_policy(ask.policy)
    if isinstance(terms, errors.FabricError):
        return refuse(terms)
    if bad_tag := check_created_tags(ask.tags):
        return refuse(bad_tag)
    if filled := defaults.fill(terms, ask.lane_id):
        terms, terms_text = filled, encode_terms(filled)

    delay_until = terms.delay_until if ask.delay_until is None else ask.delay_until
    delayed = delay_until is not None and delay_until > now
    row = _born(ask, terms, terms_text, delay_until if delayed else None)
    guards: tuple[Guard, ...] = (absent(Execution, ask.execution_id),)
    writes: tuple[Write, ...] = (Insert(row), Insert(_payload(ask)))
    if ask.idempotency_key:
        # Guarded even when it will not be remembered: somebody may have used the key since nobody was looking.
        revision = None if remembered is None else remembered.revision
        guards += (Guard(IdempotencyKey, (ask.partition, ask.digest), revision),)
        if terms.dedup_window_ms > 0:
            key = IdempotencyKey(ask.partition, ask.digest, ask.execution_id, from_now(terms.dedup_window_ms))
            writes += (Insert(key) if remembered is None else Upsert(key),)
    earliest = [remembered.expires_at] if remembered is not None else []
    if delay_until is not None and not delayed:
        earliest.append(delay_until)
    change = Change(
        guards=guards,
        writes=writes,
        queues=() if row.line else (queue.queue_of(row),),  # lists its lane
        not_before=max(earliest, default=None),
        not_after=delay_until - 1 if delay_until is not None and delayed else None,
    )
    return Decision(Created(ask.execution_id, row.public_state), change)


class CreateTemplate(msgspec.Struct, frozen=True):
    """What was decided about a create that meets nothing, for others that differ only in their id and their input."""

    row: Execution
    payload: Payload

    def create(self, execution_id: str, input_payload: bytes) -> Decision[Created | Duplicate]:
        """What `create` says of another id on the same partition."""
        row = replace(self.row, execution_id=execution_id)
        payload = replace(self.payload, execution_id=execution_id, input_payload=input_payload or None)
        change = Change(guards=(absent(Execution, execution_id),), writes=(Insert(row), Insert(payload)))
        return Decision(Created(execution_id, row.public_state), change)

    def create_many(self, execution_ids: Sequence[str], inputs: Sequence[bytes]) -> Change:
        """What `create` writes for all of these, as one change: all of them are new, or none is written."""
        kept = [one or None for one in inputs]
        rows = BulkInsert(self.row, {"execution_id": execution_ids})
        payloads = BulkInsert(self.payload, {"execution_id": execution_ids, "input_payload": kept})
        return Change(guards=(), writes=(rows, payloads))

    def answers(self, execution_ids: Iterable[str]) -> list[Created]:
        """The answers once that is written."""
        state = self.row.public_state
        return [Created(execution_id, state) for execution_id in execution_ids]


def template_of(decision: Decision[Created | Duplicate]) -> CreateTemplate | None:
    """What others can share of this decision; nothing when its key or its time had a part in it."""
    match decision.change:
        case Change(
            guards=(_,),
            writes=(Insert(row=Execution() as row), Insert(row=Payload() as payload)),
            queues=(),
            not_before=None,
            not_after=None,
        ):
            return CreateTemplate(row, payload)
    return None


def create_each(
    asks: Iterable[CreateExecution], now: int, *, defaults: PolicyDefaults = NO_DEFAULTS
) -> Iterator[Decision[Created | Duplicate]]:
    """One after the other what `create` says of each when it meets nothing; most are like the one before."""
    model: CreateExecution | None = None
    shared: CreateTemplate | None = None
    for ask in asks:
        if model is not None and shared is not None and share_template(ask, model) and ask.partition == model.partition:
            yield shared.create(ask.execution_id, ask.input_payload)
            continue
        decision = create(None, None, ask, now, defaults=defaults)
        model, shared = ask, template_of(decision)
        yield decision


def share_template(ask: CreateExecution, other: CreateExecution) -> bool:
    """Whether two asks differ in nothing but their ids and their inputs; True equals 1, and is no number."""
    return type(ask.priority) is int and other == replace(
        ask, execution_id=other.execution_id, partition=other.partition, input_payload=other.input_payload
    )


def _born(ask: CreateExecution, terms: Terms, terms_text: str | None, delay_until: int | None) -> Execution:
    waits = delay_until is not None
    priority = queue.clamp_priority(ask.priority)
    required = terms.required_capabilities or None
    line: QueueKey | None = None if waits else queue.queue_for(ask.lane_id, required, terms)
    deadline: Any = ask.execution_deadline_at
    if not deadline and terms.execution_deadline_ms:
        deadline = from_now(terms.execution_deadline_ms)
    return replace(
        DELAYED if waits else CLAIMABLE,
        execution_id=ask.execution_id,
        partition=ask.partition,
        namespace=ask.namespace,
        lane_id=ask.lane_id,
        priority=priority,
        tags=encode_tags(ask.tags),
        required_capabilities=required,
        terms=terms_text,
        current_lane=ask.lane_id,
        delay_until=delay_until,
        deadline_at=deadline or None,
        line=line,
        rank=from_now(queue.position_offset(priority, terms)),
        next_timeout_ms=terms.attempt_timeout_ms,
        parent_id=ask.parent_id,
    )


CLAIMABLE = Execution(
    execution_id="",
    partition=0,
    namespace="",
    lane_id="",
    priority=0,
    created_at=from_now(0),
    last_transition_at=from_now(0),
    last_mutation_at=from_now(0),
    lifecycle_phase=LifecyclePhase.RUNNABLE,
    ownership_state=OwnershipState.UNOWNED,
    eligibility_state=EligibilityState.ELIGIBLE_NOW,
    blocking_reason=BlockingReason.WAITING_FOR_WORKER,
    terminal_outcome=TerminalOutcome.NONE,
    attempt_state=AttemptState.PENDING_FIRST_ATTEMPT,
    public_state=PublicState.WAITING,
    next_type=AttemptType.INITIAL,
)
DELAYED = replace(
    CLAIMABLE,
    eligibility_state=EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
    blocking_reason=BlockingReason.WAITING_FOR_DELAY,
    public_state=PublicState.DELAYED,
)


def _payload(ask: CreateExecution) -> Payload:
    return Payload(
        execution_id=ask.execution_id,
        execution_kind=ask.execution_kind,
        creator_identity=ask.creator_identity,
        input_payload=ask.input_payload or None,
        payload_encoding=ask.payload_encoding,
        policy=ask.policy,
    )
