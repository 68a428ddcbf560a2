"""Validation of arguments: each call is checked once, before the store is used, and brought into canonical form.

Invalid arguments raise a `ValidationError`. Every store can hold the values that are returned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from flowfabric import errors, ids
from flowfabric.ids import Minter
from flowfabric.model.failure import FAILURE_ENCODING, MAX_FAILURE_BYTES, decode_stored, encode_stored
from flowfabric.rules import validation
from flowfabric.rules.execution import expire as expire_rules
from flowfabric.rules.execution.create import CreateExecution, share_template
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.execution.grant import GrantRequest
from flowfabric.rules.execution.lease import LeaseHolder
from flowfabric.rules.feed import Filter
from flowfabric.rules.scheduling import capabilities

T = TypeVar("T")

MAX_ATTEMPT_INDEX = 2**32 - 1
MAX_COUNTED_BRANCHES = 1000
MAX_EPOCH = 2**64 - 1
MAX_REVISION = 2**64 - 1


class ClaimOrder(msgspec.Struct, frozen=True, gc=False):
    """The arguments of a claim: worker, lane, lease, and whether budgets and quotas have to admit the work.

    Only work of these `namespaces` is claimed; None means all.
    """

    lane_id: str
    worker_id: str
    worker_instance_id: str
    capabilities: frozenset[str]
    lease_ttl_ms: int
    admission: bool = False
    namespaces: frozenset[str] | None = None


def value_or_raise(value: T | errors.FabricError) -> T:
    """Return the value that a rule made of an argument, or raise its refusal."""
    if isinstance(value, errors.FabricError):
        raise value
    return value


def check_type(name: str, value: object, kind: type[T]) -> T:
    """Return a value of this type, or raise `InvalidInput`."""
    if not isinstance(value, kind):
        raise errors.InvalidInput(f"{name}: not a {kind.__name__}")
    return value


# ---------------------------------------------------------------------------------------------------------------
# Names


def validate_execution_id(execution_id: object) -> ids.ExecutionId:
    """Parse an execution id."""
    if type(execution_id) is str and ids.is_canonical_execution_id(execution_id):
        return ids.ExecutionId(execution_id)
    return ids.parse_execution_id(validation.text("execution_id", execution_id))


def validate_member_id(name: str, execution_id: object) -> ids.ExecutionId:
    """Parse an execution id; an error names the argument."""
    return ids.parse_execution_id(validation.text(name, execution_id))


def validate_flow_id(flow_id: object) -> ids.FlowId:
    """Parse a flow id."""
    return ids.FlowId(parse_uuid("flow_id", flow_id))


def validate_flow_partition(partition: object, counts: ids.PartitionCounts) -> int:
    """Parse a partition of flows and executions, given as number or key; refuse one that does not exist."""
    if isinstance(partition, str):
        parsed = ids.parse_partition_key(partition)
        if parsed.family is not ids.PartitionFamily.FLOW:
            raise errors.InvalidInput(f"partition: {validation.preview(partition)} holds no flows and no executions")
        partition = parsed.index
    return validation.integer("partition", partition, least=0, most=counts.flow - 1)


def validate_lane_id(lane_id: object) -> ids.LaneId:
    """Parse a lane id."""
    if not isinstance(lane_id, str):
        return ids.parse_lane_id(validation.text("lane_id", lane_id))
    return ids.parse_lane_id(lane_id if type(lane_id) is str else str.__str__(lane_id))


def validate_worker_id(worker_id: object) -> ids.WorkerId:
    """Parse a worker id."""
    return ids.parse_worker_id(validation.text("worker_id", worker_id))


def validate_instance_id(worker_instance_id: object) -> ids.WorkerInstanceId:
    """Parse a worker instance id."""
    return ids.parse_worker_instance_id(validation.text("worker_instance_id", worker_instance_id))


def parse_uuid(name: str, value: object) -> str:
    """Parse a UUID; an error names the argument."""
    return ids.parse_uuid(validation.text(name, value), name)


def optional_uuid(name: str, value: object) -> str | None:
    """Parse a UUID; None stays None."""
    return None if value is None else parse_uuid(name, value)


def validate_source(value: object) -> str | None:
    """Check the name of a caller that is not the lease holder; None stays None."""
    return validation.optional_name("source", value)


def validate_encoding(value: object) -> str | None:
    """Check the label of a result's encoding; the engine's own one is refused."""
    label = validation.optional_name("result_encoding", value)
    if label == FAILURE_ENCODING:
        raise errors.InvalidInput(f"result_encoding: {FAILURE_ENCODING} is reserved for failures")
    return label


def validate_failure(value: object) -> str:
    """Check the document of a failure (`StoredFailure` as JSON), and return it in canonical form."""
    data = validation.payload("failure", value)
    try:
        document = encode_stored(decode_stored(data))
    except (ValueError, RecursionError) as error:
        raise errors.InvalidInput(f"failure: {error}") from error
    if len(document) > MAX_FAILURE_BYTES:
        raise errors.InvalidInput(f"failure: {len(document)} bytes, the limit is {MAX_FAILURE_BYTES}")
    return document.decode()


# ---------------------------------------------------------------------------------------------------------------
# Numbers and lists


def optional_instant(name: str, value: object) -> int | None:
    """Check an instant; None stays None."""
    return None if value is None else validation.instant_ms(name, value)


def optional_duration(name: str, value: object) -> int | None:
    """Check a duration, which may be zero; None stays None."""
    return None if value is None else validation.duration_ms(name, value, least=0)


def validate_revision(name: str, value: object) -> int | None:
    """Check the graph revision that a caller expects; None stays None. It may not exist."""
    return None if value is None else validation.integer(name, value, least=0, most=MAX_REVISION)


def validate_filter(value: object) -> Filter:
    """Check a filter of executions or events; None accepts all."""
    if value is None:
        return Filter()
    if not isinstance(value, Filter):
        raise errors.InvalidInput("filter: not a filter")
    namespace = validation.optional_text("namespace", value.namespace)
    tag: object = value.instance_tag
    if tag is None:
        return Filter(namespace)
    if not isinstance(tag, tuple | list) or len(tag) != 2:
        raise errors.InvalidInput("instance_tag: not a pair of key and value")
    return Filter(namespace, (validation.text("instance_tag", tag[0]), validation.text("instance_tag", tag[1])))


def parse_cursor(cursor: object, listed: str) -> tuple[int, str]:
    """Parse the cursor of a list by instant and id, `<instant>/<id>`; the id is not checked."""
    instant, slash, identity = validation.text("cursor", cursor).partition("/")
    if not slash or not instant.isascii() or not instant.isdecimal() or len(instant) > 15:
        raise errors.InvalidInput(f"cursor: not one of a list of {listed}")
    return int(instant), identity


def validate_iterable(name: str, values: object) -> Iterable[Any]:
    """Check that a value is iterable and not a text."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise errors.InvalidInput(f"{name}: not a list")
    return values


def validate_counts(name: str, counts: object) -> dict[str, int]:
    """Check counts by branch."""
    if not isinstance(counts, Mapping):
        raise errors.InvalidInput(f"{name}: not a mapping")
    if len(counts) > MAX_COUNTED_BRANCHES:
        raise errors.InvalidInput(f"{name}: {len(counts)} branches, the limit is {MAX_COUNTED_BRANCHES}")
    return {validation.text(name, one): validation.integer(name, count, least=0) for one, count in counts.items()}


def validate_pairs(name: str, values: object) -> list[tuple[Any, Any]]:
    """Check a list of pairs."""
    pairs = list(validate_iterable(name, values))
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise errors.InvalidInput(f"{name}: not a list of pairs")
    return pairs


# ---------------------------------------------------------------------------------------------------------------
# Whole requests


def validate_create(ask: object) -> CreateExecution:
    """Check a create, and add the partition, which follows from the id."""
    ask = check_type("ask", ask, CreateExecution)
    name_limit = validation.MAX_NAME_BYTES
    execution_id = validate_execution_id(ask.execution_id)
    return CreateExecution(
        execution_id=execution_id,
        partition=ids.partition_of(execution_id),
        lane_id=validate_lane_id(ask.lane_id),
        namespace=validation.text("namespace", ask.namespace, limit=name_limit),
        execution_kind=validation.text("execution_kind", ask.execution_kind, limit=name_limit),
        input_payload=validation.payload("input_payload", ask.input_payload),
        payload_encoding=validation.optional_text("payload_encoding", ask.payload_encoding, limit=name_limit),
        priority=validation.integer("priority", ask.priority),
        creator_identity=validation.text("creator_identity", ask.creator_identity, limit=name_limit),
        idempotency_key=validation.optional_text("idempotency_key", ask.idempotency_key),
        tags=validate_tags(ask.tags),
        policy=policy_text(ask.policy),
        delay_until=optional_instant("delay_until", ask.delay_until),
        execution_deadline_at=optional_instant("execution_deadline_at", ask.execution_deadline_at),
        parent_id=_parent(ask.parent_id, execution_id),
        key_lane=None if ask.key_lane is None else validate_lane_id(ask.key_lane),
    )


class CreateValidator:
    """Checks creates one after the other; arguments that equal those of the one before are not checked again."""

    __slots__ = ("_previous",)

    def __init__(self) -> None:
        self._previous: CreateExecution | None = None  # the last create in canonical form, without its input

    def __call__(self, ask: object) -> CreateExecution:
        """Check a create, and add the partition, which follows from the id."""
        previous = self._previous
        if not isinstance(ask, CreateExecution) or previous is None or not share_template(ask, previous):
            return self._remember(validate_create(ask))
        execution_id = validate_execution_id(ask.execution_id)
        return msgspec.structs.replace(
            previous,
            execution_id=execution_id,
            partition=ids.partition_of(execution_id),
            input_payload=validation.payload("input_payload", ask.input_payload),
        )

    def _remember(self, accepted: CreateExecution) -> CreateExecution:
        timed = accepted.delay_until is not None or accepted.execution_deadline_at is not None
        if not timed and accepted.parent_id is None:
            self._previous = msgspec.structs.replace(accepted, input_payload=b"")
        return accepted


def validate_creates(asks: object) -> list[CreateExecution]:
    """Check the creates of one call."""
    return list(map(CreateValidator(), validate_iterable("nodes", asks)))


def _parent(parent_id: object, child_id: ids.ExecutionId) -> ids.ExecutionId | None:
    """Check a parent: the change that completes the child writes to it, so it has to be on the same partition."""
    if parent_id is None:
        return None
    parent = ids.parse_execution_id(validation.text("parent_id", parent_id))
    if ids.partition_of(parent) != ids.partition_of(child_id):
        raise errors.InvalidInput("parent_id: on another partition than its child")
    return parent


# msgspec's encoder would encode bytes as a text, and NaN as null.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _to_json(policy: Mapping[Any, Any]) -> str:
    try:
        return _encode(policy)
    except TypeError:  # structs, enums and the like; bytes stay bytes and are refused
        return _encode(msgspec.to_builtins(policy, builtin_types=(bytes, bytearray, memoryview), str_keys=True))


def policy_text(policy: object) -> str | None:
    """Return the JSON text of a policy, given as text or mapping; its content is checked by the rules."""
    if policy is None:
        return None
    if isinstance(policy, str):
        if "\x00" in policy or not _is_unicode(policy):
            return str.__str__(policy)  # neither JSON nor storable: the rules refuse it in the specified order
        return validation.text("policy", policy) or None
    if not isinstance(policy, Mapping):
        raise errors.InvalidInput("policy: neither JSON text nor a mapping")
    try:
        return policy_text(_to_json(policy))
    except (TypeError, ValueError, OverflowError, RecursionError) as fault:
        raise errors.InvalidPolicyJson("malformed") from fault


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def validate_tags(pairs: object) -> dict[str, str]:
    """Check that tags are texts; the form of their keys is checked by the rules."""
    if type(pairs) is not dict and not isinstance(pairs, Mapping):
        raise errors.InvalidInput("tags: not a mapping")
    if len(pairs) > validation.MAX_TAGS:
        raise errors.InvalidInput(f"tags: {len(pairs)} of them, the limit is {validation.MAX_TAGS}")
    return {_tag_key(key): validation.text(f"tags[{key}]", value) for key, value in pairs.items()}


def _tag_key(key: object) -> str:
    """Check that a tag key is a text; the rules refuse a NUL in it with a better error."""
    if isinstance(key, str) and "\0" in key:
        validation.text("tags", key.replace("\0", " "))
        return str.__str__(key)
    return validation.text("tags", key)


def validate_fence(fence: object) -> Fence:
    """Check the parts of a fence; a blank part is left out."""
    if not isinstance(fence, Fence):
        raise errors.InvalidInput("fence: not a fence")
    epoch = fence.lease_epoch
    return Fence(
        lease_id=uuid_unless_blank("lease_id", fence.lease_id),
        lease_epoch=None if epoch is None else validation.integer("lease_epoch", epoch, least=0, most=MAX_EPOCH),
        attempt_id=uuid_unless_blank("attempt_id", fence.attempt_id),
    )


def uuid_unless_blank(name: str, value: object) -> str | None:
    """Parse a UUID; None and a blank are None."""
    return None if value == "" else optional_uuid(name, value)


def validate_expiry_reason(reason: object) -> str:
    """Check the name of the timer that expires an execution."""
    timer = validation.text("reason", reason)
    if timer not in (expire_rules.ATTEMPT_TIMEOUT, expire_rules.EXECUTION_DEADLINE):
        raise errors.InvalidInput(f"reason: {timer!r} is neither attempt_timeout nor execution_deadline")
    return timer


def validate_capabilities(tokens: object) -> frozenset[str]:
    """Check the capabilities that a worker offers."""
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
    """Check the arguments of a claim."""
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
    """Check the namespaces whose work is claimed; None means all."""
    if names is None:
        return None
    return frozenset(validation.text("namespaces", name) for name in validate_iterable("namespaces", names))


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
    """Check the arguments of a grant; capabilities may be joined by commas, and the rules bound their length."""
    presented = [
        validation.text("worker_capabilities", token, limit=validation.MAX_INTEGER)
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
    minter: Minter,
) -> LeaseHolder:
    """Check who redeems a grant; missing ids are minted, and a blank lane means the lane of the execution."""
    return LeaseHolder(
        validate_worker_id(worker_id),
        validate_instance_id(worker_instance_id),
        "" if lane_id == "" else validate_lane_id(lane_id),
        optional_uuid("lease_id", lease_id) or minter.uuid(),
        optional_uuid("attempt_id", attempt_id) or minter.uuid(),
        validation.duration_ms("lease_ttl_ms", lease_ttl_ms),
    )
