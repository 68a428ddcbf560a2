"""Keys: what a submit does whose key is taken by a run, and how long a run has its key.

The rule judges by the run that has the key, so the end of a run writes nothing and frees its key at once. A submit is
one change on the partition of the key, whether it creates a run, replaces one, or adds to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.answers.execution import Duplicate, Submitted
from flowfabric.model.change import Change, Delete, Guard, Insert, Patch, Upsert, Write, merge_changes, seen
from flowfabric.model.execution import Execution, IdempotencyKey, KeyUntil, Payload
from flowfabric.model.gate import Reply
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import AttemptState, BlockingReason, EligibilityState, LifecyclePhase
from flowfabric.model.suspension import Suspension
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import mailbox
from flowfabric.rules.durable.inbox_schema import Inbox, NeedsInbox, parse_inbox
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.execution import cancel, transitions
from flowfabric.rules.execution.create import NO_DEFAULTS, CreateExecution, PolicyDefaults, create
from flowfabric.rules.execution.transitions import DEFAULT_RETENTION_MS
from flowfabric.rules.scheduling import queue
from flowfabric.rules.scheduling.lane_spread import KeyPlace
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery

BATCH_MAILBOX = "ff.batch"
SUPERSEDED = "a later submit with its key took its place"
RECHECK_MS = DEFAULT_RETENTION_MS


class KeyMode(StrEnum):
    """What a submit does whose key is taken."""

    RETURN = "return"  # answers with the run that has it
    REFUSE = "refuse"
    LATEST = "latest"  # cancels that run and takes its place
    DEBOUNCE = "debounce"  # moves its start, and replaces its input
    BATCH = "batch"  # adds its input


class KeyPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long a run has its key, and what a submit does meanwhile. `ttl_ms` is counted from the submit."""

    mode: KeyMode = KeyMode.RETURN
    until: KeyUntil = KeyUntil.PURGED
    ttl_ms: int | None = None
    wait_ms: int = 0  # a debounced run or a batch starts after it
    latest_ms: int | None = None  # a debounced run starts at most so long after its first submit
    most: int = 0  # inputs of a batch


class KeyRows(msgspec.Struct, frozen=True):
    """The rows that a submit with a key is decided on."""

    existing: Execution | None  # a run that has the id of this submit
    key: IdempotencyKey | None = None
    holder: Execution | None = None
    root: Suspension | None = None  # this and the next two belong to the holder
    payload: Payload | None = None  # loaded if there is a message
    asked: Reply | None = None  # set if the message was sent before and wants a reply


def submit(
    rows: KeyRows,
    ask: CreateExecution,
    policy: KeyPolicy,
    message: MessageArgs | None,
    now: int,
    *,
    defaults: PolicyDefaults = NO_DEFAULTS,
    place: KeyPlace | None = None,
    call: str = "",
) -> Decision[Submitted]:
    """Create a run under its key, or do with the run that has the key what the policy says.

    The message goes to the created or existing run, in the same change. In a batch the message is one input. A submit
    that is repeated finds the run that it created; in a batch it was the first input.
    """
    if policy.until is KeyUntil.STARTED and ask.delay_until is not None:
        return refuse(
            errors.InvalidInput("delay: the key of a debounced run or a batch says when it starts; leave the delay out")
        )
    if rows.existing is not None:
        if rows.existing.namespace != ask.namespace:
            return refuse(errors.IdInOtherNamespace(execution_id=ask.execution_id))
        return Decision(Submitted(ask.execution_id, is_new=False, item=_first_item(policy)))
    holder = rows.holder
    if holder is not None and rows.key is not None and is_taken(rows, policy, now):
        match policy.mode:
            case KeyMode.RETURN:
                return _add_message(rows, holder, message, (), now, call)
            case KeyMode.REFUSE:
                return refuse(errors.KeyTaken(execution_id=holder.execution_id))
            case KeyMode.DEBOUNCE:
                return _add_message(rows, holder, message, _push(holder, rows.key, ask, policy, now), now, call)
            case KeyMode.BATCH:
                return _add_to_batch(rows, holder, policy, message, now, call)
            case KeyMode.LATEST:
                superseded = cancel.cancelled_change(holder, cancel.KEY, SUPERSEDED)
                return _start(rows, ask, policy, message, now, defaults, place, call, superseded)
    if rows.key is not None and holder is None and _is_remembered(rows.key, policy, now):
        if message is not None:
            return refuse(errors.TargetNotSignalable(execution_id=rows.key.execution_id))
        return Decision(Submitted(rows.key.execution_id, is_new=False))
    return _start(rows, ask, policy, message, now, defaults, place, call, None)


def is_taken(rows: KeyRows, policy: KeyPolicy, now: int) -> bool:
    """True if the holder has the key by this policy."""
    key, holder = rows.key, rows.holder
    if key is None or holder is None:
        return False
    if policy.ttl_ms is not None:
        return key.expires_at > now
    match policy.until:
        case KeyUntil.PURGED:
            return True
        case KeyUntil.ENDED:
            return holder.lifecycle_phase is not LifecyclePhase.TERMINAL
        case KeyUntil.STARTED:
            is_open = holder.lifecycle_phase is LifecyclePhase.RUNNABLE and holder.total_attempt_count == 0
            return is_open and not (policy.mode is KeyMode.BATCH and _count(rows.root) >= policy.most)


def find_holder(rows: Sequence[Execution]) -> Execution | None:
    """Return the run that a key addresses, of those that have it: one that has not ended, else the newest."""
    living = [row for row in rows if row.lifecycle_phase is not LifecyclePhase.TERMINAL]
    return max(living or rows, key=lambda row: row.created_at, default=None)


def keep_key(key: IdempotencyKey | None, holder: Execution | None, now: int) -> Decision[bool]:
    """Delete an expired key. While its run is kept, postpone that by a day. True if the key was deleted."""
    if key is None or key.expires_at > now:
        return Decision(False)
    address = (key.partition, key.digest)
    guards = (Guard(IdempotencyKey, address, key.revision),)
    if key.until is not None and holder is not None:
        later = Patch(IdempotencyKey, address, {"expires_at": FromNow(RECHECK_MS)})
        return Decision(False, Change(guards, (later,)))
    return Decision(True, Change(guards, (Delete(IdempotencyKey, address),)))


def _is_remembered(key: IdempotencyKey, policy: KeyPolicy, now: int) -> bool:
    """True if the key of a run that was purged is still taken."""
    return key.expires_at > now and (policy.ttl_ms is not None or policy.until is KeyUntil.PURGED)


def _start(
    rows: KeyRows,
    ask: CreateExecution,
    policy: KeyPolicy,
    message: MessageArgs | None,
    now: int,
    defaults: PolicyDefaults,
    place: KeyPlace | None,
    call: str,
    superseded: Change | None,
) -> Decision[Submitted]:
    """Create the run that has the key from now on."""
    if place is not None and not (place.is_here and now <= place.until):
        return refuse(errors.KeyElsewhere(execution_id=ask.execution_id))
    waits = (
        policy.wait_ms if policy.mode is KeyMode.DEBOUNCE or (policy.mode is KeyMode.BATCH and policy.most > 1) else 0
    )
    plain = replace(ask, idempotency_key=None, delay_until=now + waits if waits else ask.delay_until)
    decision = create(None, None, plain, now, defaults=defaults)
    if isinstance(decision.answer, errors.FabricError) or decision.change is None:
        return (
            refuse(decision.answer)
            if isinstance(decision.answer, errors.FabricError)
            else Decision(_duplicate(decision))
        )
    created, payload, *_ = decision.change.writes
    assert isinstance(created, Insert)
    assert isinstance(created.row, Execution)
    fields: dict[str, Any] = {"idempotency_key": ask.idempotency_key}
    if waits:
        fields |= {"delay_until": FromNow(waits), "blocking_text": _waits_for(policy, 1)}
    sent: Change | None = None
    row = replace(created.row, **fields)
    if message is not None:
        row = replace(row, has_waits=True, has_mail=message.mailbox != BATCH_MAILBOX)
        delivery = _send(row, rows, message, parse_inbox(ask.policy), now, call)
        if isinstance(delivery.answer, errors.FabricError):
            return refuse(delivery.answer)
        assert delivery.change is not None  # nobody has sent a new run anything
        own = tuple(guard for guard in delivery.change.guards if guard.row is not Execution)
        sent = replace(delivery.change, guards=own)
    expires = FromNow(RECHECK_MS if policy.ttl_ms is None else policy.ttl_ms)
    until = policy.until if policy.ttl_ms is None else None
    key = IdempotencyKey(ask.partition, ask.digest, ask.execution_id, expires, until, NOW)
    change = Change(
        guards=(
            *decision.change.guards,
            Guard(IdempotencyKey, (ask.partition, ask.digest), None if rows.key is None else rows.key.revision),
            *(() if rows.holder is None or superseded is not None else (seen(rows.holder),)),
        ),
        writes=(Insert(row), payload, Insert(key) if rows.key is None else Upsert(key)),
        queues=decision.change.queues,
        # A key that had expired when it was loaded must have expired at the commit.
        not_before=rows.key.expires_at if rows.key is not None and policy.ttl_ms is not None else None,
        not_after=None if place is None else place.until,
    )
    cancelled = None if superseded is None or rows.holder is None else rows.holder.execution_id
    answer = Submitted(ask.execution_id, item=_first_item(policy), superseded=cancelled)
    return Decision(answer, merge_changes(change, *(one for one in (superseded, sent) if one is not None)))


def _duplicate(decision: Decision[Any]) -> Submitted:
    answer = decision.answer
    return Submitted(answer.execution_id if isinstance(answer, Duplicate) else "", is_new=False)


def _send(
    row: Execution, rows: KeyRows, message: MessageArgs, inbox: Inbox, now: int, call: str
) -> Decision[Accepted | DuplicateDelivery | NeedsInbox]:
    """Send the message to a run: to the holder of the key, or to a new one, which has no rows yet."""
    root, asked = (rows.root, rows.asked) if row is rows.holder else (None, None)
    addressed = replace(message, execution_id=row.execution_id)
    is_input = message.mailbox == BATCH_MAILBOX
    return mailbox.send_message(
        row, root, None, addressed, now, asked=asked, inbox=inbox, is_internal=is_input, call=call
    )


def _add_message(
    rows: KeyRows,
    holder: Execution,
    message: MessageArgs | None,
    writes: tuple[Write, ...],
    now: int,
    call: str,
    item: int | None = None,
) -> Decision[Submitted]:
    """Send the message to the run that has the key, with further writes to it."""
    answer = Submitted(holder.execution_id, is_new=False, item=item)
    change = Change((seen(holder),), writes) if writes else None
    if message is not None:
        declared = parse_inbox(None if rows.payload is None else rows.payload.policy)
        delivery = _send(holder, rows, message, declared, now, call)
        if isinstance(delivery.answer, errors.FabricError):
            return refuse(delivery.answer)
        if delivery.change is not None:
            change = delivery.change if change is None else merge_changes(change, delivery.change)
    return Decision(answer, change)


def _push(
    holder: Execution, key: IdempotencyKey, ask: CreateExecution, policy: KeyPolicy, now: int
) -> tuple[Write, ...]:
    """Move the start of a debounced run, up to its latest one, and replace its input."""
    first_at = holder.created_at if key.first_at is None else key.first_at
    latest = None if policy.latest_ms is None else first_at + policy.latest_ms
    is_last = latest is not None and latest <= now + policy.wait_ms
    start = latest if is_last else FromNow(policy.wait_ms)
    fields: dict[str, Any] = {
        "eligibility_state": EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
        "blocking_reason": BlockingReason.WAITING_FOR_DELAY,
        "blocking_text": _waits_for(policy, 1),
        "delay_until": start,
        "line": None,
        "blocked_on": None,
        "blocked_at": None,
    }
    if latest is not None and latest <= now:
        fields = queue.enqueue_fields(holder, AttemptState.PENDING_FIRST_ATTEMPT)
    replaced = {"input_payload": ask.input_payload or None, "payload_encoding": ask.payload_encoding}
    return (transitions.transition(holder, fields), Patch(Payload, (holder.execution_id,), replaced))


def _add_to_batch(
    rows: KeyRows, holder: Execution, policy: KeyPolicy, message: MessageArgs | None, now: int, call: str
) -> Decision[Submitted]:
    """Add an input to a batch; the last one starts it."""
    count = _count(rows.root)
    fields: dict[str, Any] = {"blocking_text": _waits_for(policy, count + 1)}
    if count + 1 >= policy.most:
        fields = queue.enqueue_fields(holder, AttemptState.PENDING_FIRST_ATTEMPT)
    return _add_message(rows, holder, message, (transitions.transition(holder, fields),), now, call, item=count)


def _first_item(policy: KeyPolicy) -> int | None:
    return 0 if policy.mode is KeyMode.BATCH else None


def _count(root: Suspension | None) -> int:
    """Return the number of inputs of a batch; none of them is ever received."""
    return mailbox.unread_count(root, BATCH_MAILBOX)


def _waits_for(policy: KeyPolicy, count: int) -> str:
    if policy.mode is KeyMode.BATCH:
        return f"collects a batch, {count} of {policy.most} so far"
    return f"debounced: it starts {policy.wait_ms / 1000:g} s after the last submit with its key"
