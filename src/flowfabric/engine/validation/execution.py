"""What callers hand in: looked at once, before anything is asked of the store, and put into its one form.

Whatever is wrong with it, the answer is a `ValidationError`; what comes out can be kept by every store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from flowfabric import errors, ids
from flowfabric.rules import validation
from flowfabric.rules.execution import expire as expire_rules
from flowfabric.rules.execution.create import CreateExecution, share_template
from flowfabric.rules.execution.grant import GrantRequest
from flowfabric.rules.execution.lease import Fence, LeaseHolder
from flowfabric.rules.feed import Filter
from flowfabric.rules.scheduling import capabilities

T = TypeVar("T")

MAX_ATTEMPT_INDEX = 2**32 - 1
MAX_EPOCH = 2**64 - 1
MAX_REVISION = 2**64 - 1


class ClaimOrder(msgspec.Struct, frozen=True, gc=False):
    """Who wants work, from which lane, for how long at a time, and whether budgets and quotas are asked.

    `namespaces` are those whose work is wanted; None is all.
    """

    lane_id: str
    worker_id: str
    worker_instance_id: str
    capabilities: frozenset[str]
    lease_ttl_ms: int
    admission: bool = False
    namespaces: frozenset[str] | None = None


def value_or_raise(value: T | errors.FabricError) -> T:
    """What a rule made of a part of a request; its refusal is raised."""
    if isinstance(value, errors.FabricError):
        raise value
    return value


# ---------------------------------------------------------------------------------------------------------------
# Names


def validate_execution_id(execution_id: object) -> ids.ExecutionId:
    """An execution id."""
    if type(execution_id) is str and ids.is_canonical_execution_id(execution_id):
        return ids.ExecutionId(execution_id)
    return ids.parse_execution_id(validation.text("execution_id", execution_id))


def validate_member_id(name: str, execution_id: object) -> ids.ExecutionId:
    """The id of an execution that plays a part, named as that part."""
    return ids.parse_execution_id(validation.text(name, execution_id))


def validate_flow_id(flow_id: object) -> ids.FlowId:
    """A flow's id."""
    return ids.FlowId(ids.parse_uuid(validation.text("flow_id", flow_id), "flow_id"))


def validate_edge_id(edge_id: object) -> str:
    """An edge's id."""
    return ids.parse_uuid(validation.text("edge_id", edge_id), "edge_id")


def validate_flow_partition(partition: object, counts: ids.PartitionCounts) -> int:
    """Read a partition of flows and executions, by its number or its key; one that does not exist is refused."""
    if isinstance(partition, str):
        parsed = ids.parse_partition_key(partition)
        if parsed.family is not ids.PartitionFamily.FLOW:
            raise errors.InvalidInput(f"partition: {validation.preview(partition)} holds no flows and no executions")
        partition = parsed.index
    return validation.integer("partition", partition, least=0, most=counts.flow - 1)


def validate_lane_id(lane_id: object) -> ids.LaneId:
    """A lane; which characters it may have is its own rule."""
    if not isinstance(lane_id, str):
        return ids.parse_lane_id(validation.text("lane_id", lane_id))
    return ids.parse_lane_id(lane_id if type(lane_id) is str else str.__str__(lane_id))


def validate_worker_id(worker_id: object) -> ids.WorkerId:
    """A worker."""
    return ids.parse_worker_id(validation.text("worker_id", worker_id))


def validate_instance_id(worker_instance_id: object) -> ids.WorkerInstanceId:
    """One incarnation of a worker."""
    return ids.parse_worker_instance_id(validation.text("worker_instance_id", worker_instance_id))


def optional_uuid(name: str, value: object) -> str | None:
    """A UUID or nothing."""
    return None if value is None else ids.parse_uuid(validation.text(name, value), name)


def validate_source(value: object) -> str | None:
    """Who does something, when that is not the holder."""
    return validation.optional_text("source", value, limit=validation.MAX_NAME_BYTES)


# ---------------------------------------------------------------------------------------------------------------
# Numbers and lists


def optional_instant(name: str, value: object) -> int | None:
    """An instant or nothing."""
    return None if value is None else validation.instant_ms(name, value)


def optional_duration(name: str, value: object) -> int | None:
    """A length of time, zero included, or nothing."""
    return None if value is None else validation.duration_ms(name, value, least=0)


def validate_revision(name: str, value: object) -> int | None:
    """A revision of a graph that a caller has seen or believes in, or nothing; there may be none that high."""
    return None if value is None else validation.integer(name, value, least=0, most=MAX_REVISION)


def validate_filter(given: object) -> Filter:
    """Which executions, or events of them, are wanted; all of them when nothing is said."""
    if given is None:
        return Filter()
    if not isinstance(given, Filter):
        raise errors.InvalidInput("filter: not a filter")
    namespace = validation.optional_text("namespace", given.namespace)
    tag: object = given.instance_tag
    if tag is None:
        return Filter(namespace)
    if not isinstance(tag, tuple | list) or len(tag) != 2:
        raise errors.InvalidInput("instance_tag: not a pair of key and value")
    return Filter(namespace, (validation.text("instance_tag", tag[0]), validation.text("instance_tag", tag[1])))


def validate_iterable(name: str, values: object) -> Iterable[Any]:
    """Something to go through; a text is not a list of its letters."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise errors.InvalidInput(f"{name}: not a list")
    return values


def validate_pairs(name: str, values: object) -> list[tuple[Any, Any]]:
    """A list of pairs."""
    given = list(validate_iterable(name, values))
    if not all(isinstance(one, tuple | list) and len(one) == 2 for one in given):
        raise errors.InvalidInput(f"{name}: not a list of pairs")
    return given


# ---------------------------------------------------------------------------------------------------------------
# Whole requests


def validate_create(ask: object) -> CreateExecution:
    """A create, its partition read from the id."""
    if not isinstance(ask, CreateExecution):
        raise errors.InvalidInput("ask: not a CreateExecution")
    name = validation.MAX_NAME_BYTES
    execution_id = validate_execution_id(ask.execution_id)
    return CreateExecution(
        execution_id=execution_id,
        partition=ids.partition_of(execution_id),
        lane_id=validate_lane_id(ask.lane_id),
        namespace=validation.text("namespace", ask.namespace, limit=name),
        execution_kind=validation.text("execution_kind", ask.execution_kind, limit=name),
        input_payload=validation.payload("input_payload", ask.input_payload),
        payload_encoding=validation.optional_text("payload_encoding", ask.payload_encoding, limit=name),
        priority=validation.integer("priority", ask.priority),
        creator_identity=validation.text("creator_identity", ask.creator_identity, limit=name),
        idempotency_key=validation.optional_text("idempotency_key", ask.idempotency_key),
        tags=validate_tags(ask.tags),
        policy=policy_text(ask.policy),
        delay_until=optional_instant("delay_until", ask.delay_until),
        execution_deadline_at=optional_instant("execution_deadline_at", ask.execution_deadline_at),
        parent_id=_parent(ask.parent_id, execution_id),
    )


class CreateValidator:
    """Accepts creates one after the other: what one shares with the one before it was looked at there."""

    __slots__ = ("_model",)

    def __init__(self) -> None:
        self._model: CreateExecution | None = None  # the last one, in its one form and without its input

    def __call__(self, ask: object) -> CreateExecution:
        """A create, its partition read from the id."""
        model = self._model
        if not isinstance(ask, CreateExecution) or model is None or not share_template(ask, model):
            return self._remembered(validate_create(ask))
        execution_id = validate_execution_id(ask.execution_id)
        return msgspec.structs.replace(
            model,
            execution_id=execution_id,
            partition=ids.partition_of(execution_id),
            input_payload=validation.payload("input_payload", ask.input_payload),
        )

    def _remembered(self, accepted: CreateExecution) -> CreateExecution:
        timed = accepted.delay_until is not None or accepted.execution_deadline_at is not None
        if not timed and accepted.parent_id is None:
            self._model = msgspec.structs.replace(accepted, input_payload=b"")
        return accepted


def validate_creates(asks: object) -> list[CreateExecution]:
    """Creates that come together."""
    return list(map(CreateValidator(), validate_iterable("nodes", asks)))


def _parent(parent_id: object, child_id: ids.ExecutionId) -> ids.ExecutionId | None:
    """A parent is told of the end in the change that makes it, so it has to live on the same partition."""
    if parent_id is None:
        return None
    parent = ids.parse_execution_id(validation.text("parent_id", parent_id))
    if ids.partition_of(parent) != ids.partition_of(child_id):
        raise errors.InvalidInput("parent_id: on another partition than its child")
    return parent


# Not msgspec's writer, which makes a text of bytes, and null of what is no number.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _written(policy: Mapping[Any, Any]) -> str:
    try:
        return _encode(policy)
    except TypeError:  # records, enums and the like; bytes stay bytes, which is no JSON
        return _encode(msgspec.to_builtins(policy, builtin_types=(bytes, bytearray, memoryview), str_keys=True))


def policy_text(policy: object) -> str | None:
    """A policy as the text to keep, from its text or its document; what it says is for the rules."""
    if policy is None:
        return None
    if isinstance(policy, str):
        if "\x00" in policy or not _is_unicode(policy):
            return str.__str__(policy)  # no JSON, and no text that a store could keep: the rules refuse it in its turn
        return validation.text("policy", policy) or None
    if not isinstance(policy, Mapping):
        raise errors.InvalidInput("policy: neither JSON text nor a mapping")
    try:
        return policy_text(_written(policy))
    except (TypeError, ValueError, OverflowError, RecursionError) as fault:
        raise errors.InvalidPolicyJson("malformed") from fault


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def validate_tags(pairs: object) -> dict[str, str]:
    """Tags as texts; whether the keys are keys is for the rules."""
    if type(pairs) is not dict and not isinstance(pairs, Mapping):
        raise errors.InvalidInput("tags: not a mapping")
    if len(pairs) > validation.MAX_TAGS:
        raise errors.InvalidInput(f"tags: {len(pairs)} of them, the limit is {validation.MAX_TAGS}")
    return {_tag_key(key): validation.text(f"tags[{key}]", value) for key, value in pairs.items()}


def _tag_key(key: object) -> str:
    """A text; one with a NUL cannot be kept, and is left to the rules, which refuse it by its name."""
    if isinstance(key, str) and "\0" in key:
        validation.text("tags", key.replace("\0", " "))
        return str.__str__(key)
    return validation.text("tags", key)


def validate_fence(given: object) -> Fence:
    """A fence, each part that was given in its one form; a blank part was not given."""
    if not isinstance(given, Fence):
        raise errors.InvalidInput("fence: not a fence")
    epoch = given.lease_epoch
    return Fence(
        lease_id=uuid_unless_blank("lease_id", given.lease_id),
        lease_epoch=None if epoch is None else validation.integer("lease_epoch", epoch, least=0, most=MAX_EPOCH),
        attempt_id=uuid_unless_blank("attempt_id", given.attempt_id),
    )


def uuid_unless_blank(name: str, value: object) -> str | None:
    """A UUID or nothing, for which a blank stands as well."""
    return None if value == "" else optional_uuid(name, value)


def validate_expiry_reason(reason: object) -> str:
    """Which timer ends an execution."""
    why = validation.text("reason", reason)
    if why not in (expire_rules.ATTEMPT_TIMEOUT, expire_rules.EXECUTION_DEADLINE):
        raise errors.InvalidInput(f"reason: {why!r} is neither attempt_timeout nor execution_deadline")
    return why


def validate_capabilities(tokens: object) -> frozenset[str]:
    """The capabilities that a worker asks for work with."""
    offer = frozenset(validation.text("capabilities", token) for token in validate_iterable("capabilities", tokens))
    if refused := capabilities.check_offer(offer):
        raise refused
    return offer


def build_claim_order(
    lane_id: object,
    worker_id: object,
    worker_instance_id: object,
    tokens: object,
    lease_ttl_ms: object,
    *,
    admission: bool = False,
    namespaces: object = None,
) -> ClaimOrder:
    """A worker's wish for work."""
    return ClaimOrder(
        validate_lane_id(lane_id),
        validate_worker_id(worker_id),
        validate_instance_id(worker_instance_id),
        validate_capabilities(tokens),
        validation.duration_ms("lease_ttl_ms", lease_ttl_ms),
        admission,
        validate_namespaces(namespaces),
    )


def validate_namespaces(names: object) -> frozenset[str] | None:
    """The namespaces whose work is wanted; None is all."""
    return (
        None
        if names is None
        else frozenset(validation.text("namespaces", name) for name in validate_iterable("namespaces", names))
    )


def build_grant_request(
    lane_id: object,
    worker_id: object,
    worker_instance_id: object,
    tokens: object,
    grant_ttl_ms: object,
    capability_hash: object = None,
    route_snapshot_json: object = None,
    admission_summary: object = None,
) -> GrantRequest:
    """A worker's wish for a grant; its capabilities may be joined by commas, as in the list that it presents."""
    presented = [
        validation.text(
            "worker_capabilities", token, limit=validation.MAX_INTEGER
        )  # how long they may be is for the rule
        for token in validate_iterable("worker_capabilities", tokens)
    ]
    return GrantRequest(
        lane_id=validate_lane_id(lane_id),
        worker_id=validate_worker_id(worker_id),
        worker_instance_id=validate_instance_id(worker_instance_id),
        capabilities=frozenset(capabilities.split_tokens(",".join(presented))),
        grant_ttl_ms=validation.duration_ms("grant_ttl_ms", grant_ttl_ms),
        capability_hash=validation.optional_text("capability_hash", capability_hash),
        route_snapshot_json=validation.optional_text("route_snapshot_json", route_snapshot_json),
        admission_summary=validation.optional_text("admission_summary", admission_summary),
    )


def build_holder(
    worker_id: object,
    worker_instance_id: object,
    lane_id: object,
    lease_id: object,
    attempt_id: object,
    lease_ttl_ms: object,
    minter: ids.Minter,
) -> LeaseHolder:
    """Who redeems a grant; ids that are not given are minted, and a blank lane is the execution's own."""
    return LeaseHolder(
        validate_worker_id(worker_id),
        validate_instance_id(worker_instance_id),
        "" if lane_id == "" else validate_lane_id(lane_id),
        optional_uuid("lease_id", lease_id) or minter.uuid(),
        optional_uuid("attempt_id", attempt_id) or minter.uuid(),
        validation.duration_ms("lease_ttl_ms", lease_ttl_ms),
    )
