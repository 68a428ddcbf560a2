"""Create: insert an execution exactly once.

A create with an id or an idempotency key that is already known answers `Duplicate` and changes nothing. Creates that
differ only in id and input share a template (`CreateTemplate`), so that a bulk create decides once and writes columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.answers.execution import Created, Duplicate
from flowfabric.model.change import BulkInsert, Change, Guard, Insert, Upsert, Write, absent
from flowfabric.model.execution import Execution, IdempotencyKey, Payload, QueueKey
from flowfabric.model.instant import NOW, Draft, FromNow
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
from flowfabric.rules.scheduling.lane_spread import KeyPlace


class CreateExecution(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The request to create an execution. The partition is the one encoded in the id."""

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
    key_lane: str | None = None  # the lane whose spread places the key, if not `lane_id`

    @property
    def digest(self) -> str:
        """The hash under which the idempotency key is stored; keys of different namespaces never collide."""
        scope = f"{len(self.namespace)}:{self.namespace}:{self.idempotency_key}"
        return hashlib.sha256(scope.encode()).hexdigest()


class PolicyDefaults(msgspec.Struct, frozen=True, gc=False):
    """Defaults for policies that leave retention or the ageing of a lane unset."""

    retention_ms: int | None = None
    ageing_ms: dict[str, int] = {}

    def fill(self, terms: Terms, lane_id: str) -> Terms | None:
        """Return the terms with the defaults filled in; None if nothing was unset."""
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
    request: CreateExecution,
    now: int,
    *,
    defaults: PolicyDefaults = NO_DEFAULTS,
    place: KeyPlace | None = None,
) -> Decision[Created | Duplicate]:
    """Create an execution that is claimable at once or after its delay; a known id or key changes nothing.

    An id that exists in another namespace is refused, and nothing about that execution is revealed. `place` is where
    the spread of the lane puts the key; an id elsewhere is refused.
    """
    if remembered is not None and remembered.expires_at > now:
        return Decision(Duplicate(remembered.execution_id))
    if existing is not None:
        if existing.namespace != request.namespace:
            return refuse(errors.IdInOtherNamespace(execution_id=request.execution_id))
        return Decision(Duplicate(existing.execution_id))
    if place is not None and not (place.is_here and now <= place.until):
        return refuse(errors.KeyElsewhere(execution_id=request.execution_id))
    terms, terms_text = parse_policy(request.policy)
    if isinstance(terms, errors.FabricError):
        return refuse(terms)
    if bad_tag := check_created_tags(request.tags):
        return refuse(bad_tag)
    if filled := defaults.fill(terms, request.lane_id):
        terms, terms_text = filled, encode_terms(filled)

    delay_until = terms.delay_until if request.delay_until is None else request.delay_until
    delayed = delay_until is not None and delay_until > now
    row = _new_row(request, terms, terms_text, delay_until if delayed else None)
    guards: tuple[Guard, ...] = (absent(Execution, request.execution_id),)
    writes: tuple[Write, ...] = (Insert(row), Insert(_payload(request)))
    if request.idempotency_key:
        # Guarded even if the key is not stored: another create may have used it since the load.
        revision = None if remembered is None else remembered.revision
        guards += (Guard(IdempotencyKey, (request.partition, request.digest), revision),)
        if terms.dedup_window_ms > 0:
            key = IdempotencyKey(
                request.partition, request.digest, request.execution_id, FromNow(terms.dedup_window_ms)
            )
            writes += (Insert(key) if remembered is None else Upsert(key),)
    earliest = [remembered.expires_at] if remembered is not None else []
    if delay_until is not None and not delayed:
        earliest.append(delay_until)
    latest = [] if place is None else [place.until]
    if delay_until is not None and delayed:
        latest.append(delay_until - 1)
    change = Change(
        guards=guards,
        writes=writes,
        queues=() if row.line else (queue.queue_of(row),),  # registers the lane, so that it is listed
        not_before=max(earliest, default=None),
        not_after=min(latest, default=None),
    )
    return Decision(Created(request.execution_id, row.public_state), change)


class CreateTemplate(msgspec.Struct, frozen=True):
    """A decided create that other creates with the same settings on the same partition can reuse."""

    row: Execution[Draft]
    payload: Payload

    def create(self, execution_id: str, input_payload: bytes) -> Decision[Created | Duplicate]:
        """Return what `create` decides for this id if neither the id nor a key exists yet."""
        row = replace(self.row, execution_id=execution_id)
        payload = replace(self.payload, execution_id=execution_id, input_payload=input_payload or None)
        change = Change(guards=(absent(Execution, execution_id),), writes=(Insert(row), Insert(payload)))
        return Decision(Created(execution_id, row.public_state), change)

    def create_many(self, execution_ids: Sequence[str], inputs: Sequence[bytes]) -> Change:
        """Return one change that creates all ids, or none if any of them exists."""
        payload_bytes = [data or None for data in inputs]
        rows = BulkInsert(self.row, {"execution_id": execution_ids})
        payloads = BulkInsert(self.payload, {"execution_id": execution_ids, "input_payload": payload_bytes})
        return Change(guards=(), writes=(rows, payloads))

    def answers(self, execution_ids: Iterable[str]) -> list[Created]:
        """Return the answers for ids that were created."""
        state = self.row.public_state
        return [Created(execution_id, state) for execution_id in execution_ids]


def template_of(decision: Decision[Created | Duplicate]) -> CreateTemplate | None:
    """Return the reusable part of a decision; None if an idempotency key or a delay took part in it."""
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
    requests: Iterable[CreateExecution], now: int, *, defaults: PolicyDefaults = NO_DEFAULTS
) -> Iterator[Decision[Created | Duplicate]]:
    """Yield for each request what `create` decides if nothing exists yet, reusing the previous template if it fits."""
    previous: CreateExecution | None = None
    template: CreateTemplate | None = None
    for request in requests:
        if (
            previous is not None
            and template is not None
            and share_template(request, previous)
            and request.partition == previous.partition
        ):
            yield template.create(request.execution_id, request.input_payload)
            continue
        decision = create(None, None, request, now, defaults=defaults)
        previous, template = request, template_of(decision)
        yield decision


def share_template(request: CreateExecution, other: CreateExecution) -> bool:
    """True if two requests differ only in id and input. The type check is needed because `True == 1`."""
    return type(request.priority) is int and other == replace(
        request, execution_id=other.execution_id, partition=other.partition, input_payload=other.input_payload
    )


def _new_row(
    request: CreateExecution, terms: Terms, terms_text: str | None, delay_until: int | None
) -> Execution[Draft]:
    """Return the row of a new execution; `delay_until` is None if it is claimable at once."""
    is_delayed = delay_until is not None
    priority = queue.clamp_priority(request.priority)
    required = terms.required_capabilities or None
    line: QueueKey | None = None if is_delayed else queue.queue_for(request.lane_id, required, terms)
    deadline: int | FromNow | None = request.execution_deadline_at
    if not deadline and terms.execution_deadline_ms:
        deadline = FromNow(terms.execution_deadline_ms)
    return replace(
        DELAYED if is_delayed else CLAIMABLE,
        execution_id=request.execution_id,
        partition=request.partition,
        namespace=request.namespace,
        lane_id=request.lane_id,
        priority=priority,
        tags=encode_tags(request.tags),
        required_capabilities=required,
        terms=terms_text,
        current_lane=request.lane_id,
        delay_until=delay_until,
        deadline_at=deadline or None,
        line=line,
        rank=FromNow(queue.position_offset(priority, terms)),
        next_timeout_ms=terms.attempt_timeout_ms,
        parent_id=request.parent_id,
        idempotency_key=request.idempotency_key or None,
    )


CLAIMABLE: Execution[Draft] = Execution(
    execution_id="",
    partition=0,
    namespace="",
    lane_id="",
    priority=0,
    created_at=NOW,
    last_transition_at=NOW,
    last_mutation_at=NOW,
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


def _payload(request: CreateExecution) -> Payload:
    """Return the payload row of a new execution."""
    return Payload(
        execution_id=request.execution_id,
        execution_kind=request.execution_kind,
        creator_identity=request.creator_identity,
        input_payload=request.input_payload or None,
        payload_encoding=request.payload_encoding,
        policy=request.policy,
    )
