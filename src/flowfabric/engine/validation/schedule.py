"""Validation of schedules: their names, and the run that one creates again and again."""

from __future__ import annotations

from flowfabric import errors
from flowfabric.engine.validation import execution as validate
from flowfabric.model.scheduling.schedule import ScheduleSpec
from flowfabric.rules import validation
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.schedules import recurrence

MAX_NAME_BYTES = 256


def validate_schedule_name(value: object) -> str:
    """Return the name of a schedule; it is part of addresses, so it has no slash."""
    name = validation.text("schedule", value, limit=MAX_NAME_BYTES)
    if not name.strip() or "/" in name or name in (".", ".."):
        raise errors.InvalidInput(f"schedule: {validation.preview(name)} is no name; write one like nightly-report")
    return name


def validate_spec(spec: object) -> ScheduleSpec:
    """Return a spec that can be parsed, or raise `InvalidInput`, which names the fix."""
    return recurrence.parse_spec(validate.check_type("spec", spec, ScheduleSpec)).spec


def validate_scheduled_run(run: object) -> CreateExecution:
    """Check the run that a schedule creates again and again."""
    checked = validate.validate_create(run)
    if checked.idempotency_key is not None:
        raise errors.InvalidInput("key: the runs of a schedule get their ids from their instants; leave the key out")
    if checked.delay_until is not None or checked.execution_deadline_at is not None:
        raise errors.InvalidInput("delay, deadline: such an instant belongs to one run, not to each; leave it out")
    if checked.parent_id is not None:
        raise errors.InvalidInput("parent_id: the runs of a schedule have no other parent")
    return checked
