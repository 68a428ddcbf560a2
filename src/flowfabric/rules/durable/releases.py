"""Holds and patches: runs under way while the code of their function changes.

A function that no longer fits what its run remembers is parked on a gate of the mailbox `ff.hold`. Releasing it closes
every such gate with a message that says whether the new way is accepted. A patch is a question that a run answers once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.model.change import Change, Insert, Upsert, live, merge_changes, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import Gate, GateKind, GateMemo, GateOutcome, MailboxMessage, StepMemo
from flowfabric.model.instant import NOW, Draft
from flowfabric.model.suspension import Suspension
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.durable.steps import mark_has_steps
from flowfabric.rules.execution import fences
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.suspension import state as wait_state

HOLD_MAILBOX = "ff.hold"
HELD_PREFIX = "held:"  # the name of the memo about a version that held the run begins so
PATCH_PREFIX = "patch:"
PATCH_TAG_PREFIX = "ff.patch."


class Release(msgspec.Struct, frozen=True):
    """What a release says to the function that is held."""

    accept: bool = False


def release_held(
    row: Execution | None,
    suspension: Suspension | None,
    held_before: StepMemo | None,
    *,
    accept: bool,
    message_id: str,
    sender: str,
    now: int,
) -> Decision[bool]:
    """Resume a held run; False if it is not held, or if `held_before` says that this version has held it."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    held = {name: gate for name, gate in wait_state.open_gates(suspension).items() if is_hold(gate)}
    if suspension is None or not held or held_before is not None:
        return Decision(False)
    message: MailboxMessage[Draft] = MailboxMessage(
        execution_id=row.execution_id,
        mailbox=HOLD_MAILBOX,
        seq=0,
        message_id=message_id,
        sent_at=NOW,
        sender=sender,
        payload=msgspec.json.encode(Release(accept)),
        payload_encoding="json",
    )
    closed = {name: (gate, GateOutcome.SATISFIED, message) for name, gate in held.items()}
    fields, writes = gate_rules.update_gates(row, suspension, {}, closed)
    guards = (seen(row), wait_state.seen_suspension(suspension, row.execution_id))
    return Decision(True, Change(guards, (Upsert(msgspec.structs.replace(suspension, **fields)), *writes)))


def is_hold(gate: Gate) -> bool:
    """True if the function waits for other code."""
    return gate.kind is GateKind.MAILBOX and gate.mailbox == HOLD_MAILBOX


def is_accepted(memo: GateMemo) -> bool:
    """True if a person accepted the new way, so that the function may pass the place at which it was held."""
    return memo.payload is not None and msgspec.json.decode(memo.payload, type=Release).accept


def patch_tag(patch: str) -> str:
    """Return the tag of runs that go the old way of a patch; its value is the patch's name."""
    return f"{PATCH_TAG_PREFIX}{ids.digest8(patch)}"


def old_ways(row: Execution) -> list[str]:
    """Return the patches whose old way a run goes."""
    if row.tags is None or PATCH_TAG_PREFIX not in row.tags:
        return []
    tags = tag_rules.decode_tags(row.tags)
    return [patch for key, patch in tags.items() if key.startswith(PATCH_TAG_PREFIX)]


def record_patch(
    row: Execution | None, known: StepMemo | None, memo: StepMemo, *, is_new: bool, fence: Fence, now: int
) -> Decision[StepMemo]:
    """Record a run's answer to a patch, once. One that goes the old way gets a tag, by which it is found."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_lease(row, fence, now):
        return refused
    if known is not None:
        return Decision(known)
    insert = Insert(msgspec.structs.replace(memo, recorded_at=NOW))
    change = Change(guards=(seen(row, live(row)),), writes=(insert, *mark_has_steps(row)))
    if not is_new:
        patch = memo.name.removeprefix(PATCH_PREFIX)
        tagged: Decision[Any] = tag_rules.set_tags_as_holder(row, fence, {patch_tag(patch): patch}, now)
        if tagged.change is None:
            return tagged
        change = merge_changes(change, tagged.change)
    return Decision(lambda now: msgspec.structs.replace(memo, recorded_at=now), change)
