"""Validation of the tasks that a worker reports when it registers."""

from __future__ import annotations

import msgspec

from flowfabric import errors, json_limits
from flowfabric.engine.validation import execution as validate
from flowfabric.model.scheduling.worker import ServedTask
from flowfabric.rules import validation

MAX_TASKS = 1000
MAX_SCHEMAS_BYTES = 256 * 1024  # the schemas of all tasks of a worker count together


def validate_tasks(tasks: object) -> tuple[ServedTask, ...]:
    """Check tasks: each name once, schemas that are JSON objects, and not too many of them."""
    checked = tuple(_validate_task(task) for task in validate.validate_iterable("tasks", tasks))
    if len(checked) > MAX_TASKS:
        raise errors.InvalidInput(f"tasks: more than {MAX_TASKS}")
    if len({task.name for task in checked}) < len(checked):
        raise errors.InvalidInput("tasks: two have the same name")
    size = sum(len((task.input_schema or "") + (task.result_schema or "")) for task in checked)
    if size > MAX_SCHEMAS_BYTES:
        raise errors.InvalidInput(f"tasks: schemas of more than {MAX_SCHEMAS_BYTES} bytes")
    return checked


def _validate_task(task: object) -> ServedTask:
    task = validate.check_type("tasks", task, ServedTask)
    return ServedTask(
        name=validation.name("name", task.name),
        lane=validate.validate_lane_id(task.lane),
        input_schema=_validate_schema("input_schema", task.input_schema),
        result_schema=_validate_schema("result_schema", task.result_schema),
    )


def _validate_schema(name: str, text: object) -> str | None:
    checked = validation.optional_text(name, text, limit=MAX_SCHEMAS_BYTES)
    if checked is None:
        return None
    try:
        document = json_limits.decode(checked)
    except (msgspec.DecodeError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise errors.InvalidInput(f"{name}: not a JSON object")
    return checked
