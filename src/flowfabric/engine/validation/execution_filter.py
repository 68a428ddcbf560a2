"""Validation of the filter of lists and bulk operations."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric import errors
from flowfabric.engine.validation import execution as validate
from flowfabric.ids import parse_worker_instance_id
from flowfabric.model.execution_filter import ExecutionFilter
from flowfabric.model.states import PublicState
from flowfabric.rules import validation

MAX_ERROR_BYTES = 1024


def validate_filter(
    *,
    namespace: object = None,
    namespaces: Sequence[str] | None = None,
    kind: object = None,
    public_state: object = None,
    lane_id: object = None,
    tag: object = None,
    flow_id: object = None,
    parent_id: object = None,
    worker_instance_id: object = None,
    error: object = None,
    created_from: object = None,
    created_before: object = None,
) -> ExecutionFilter:
    """Return the filter, or raise `InvalidInput` for the first argument that no execution can have."""
    return ExecutionFilter(
        namespaces=validate_namespaces(namespace, namespaces),
        kind=validation.optional_text("kind", kind),
        states=_states(public_state),
        lane_id=None if lane_id is None else validate.validate_lane_id(lane_id),
        tag=None if tag is None else _tag(tag),
        flow_id=validate.optional_uuid("flow_id", flow_id),
        parent_id=None if parent_id is None else validate.validate_execution_id(parent_id),
        worker_instance_id=None
        if worker_instance_id is None
        else parse_worker_instance_id(validation.text("worker_instance_id", worker_instance_id)),
        error=validation.optional_text("error", error, limit=MAX_ERROR_BYTES) or None,
        created_from=None if created_from is None else validation.instant_ms("created_from", created_from),
        created_before=None if created_before is None else validation.instant_ms("created_before", created_before),
    )


def validate_namespaces(namespace: object, namespaces: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the namespaces to search: one, some, one of some, or (None) all."""
    limit = validation.MAX_NAME_BYTES
    one = None if namespace is None else validation.text("namespace", namespace, limit=limit)
    if namespaces is None:
        return None if one is None else (one,)
    names = validate.validate_iterable("namespaces", namespaces)
    some = tuple(validation.text("namespaces", name, limit=limit) for name in names)
    return some if one is None else tuple(name for name in some if name == one)


def _states(value: object) -> tuple[PublicState, ...]:
    if value is None:
        return ()
    values = (value,) if isinstance(value, str) or not isinstance(value, list | tuple) else tuple(value)
    if not values:
        raise errors.InvalidInput("public_state: no state is given")
    return tuple(dict.fromkeys(_state(each) for each in values))


def _state(value: object) -> PublicState:
    try:
        return PublicState(value)  # type: ignore[arg-type]  # any value is refused that is none
    except ValueError:
        raise errors.InvalidInput(f"public_state: {validation.preview(value)} is no state") from None


def _tag(pair: object) -> tuple[str, str]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise errors.InvalidInput("tag: not a pair of key and value")
    return validation.text("tag", pair[0]), validation.text("tag", pair[1])
