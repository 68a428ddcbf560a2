"""Policy: the terms under which an execution runs.

A policy is a JSON document with many optional parts. Create parses the parts that rules need into `Terms` once. Most
executions share a few policies, so parsing and encoding are cached. Unknown fields and parts of other domains are
ignored. A known part with a bad value is refused with `InvalidPolicyJson`, which names the field, such as
`retry_policy.max_retries:negative`.

Every number fits a signed 64-bit column. Durations and instants are capped at 2^53 - 1 milliseconds (285,000 years), so
that no sum with the current time overflows in any store.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import isfinite
from typing import Final, TypeAlias, TypeVar

import msgspec

from flowfabric import json_limits
from flowfabric.errors import Corruption, FabricError, InvalidInput, InvalidPolicyJson
from flowfabric.ids import parse_uuid
from flowfabric.rules.durable import schema_limits
from flowfabric.rules.execution.retry import BackoffPolicy, ExponentialBackoff, FixedBackoff, RetryPolicy
from flowfabric.rules.scheduling.capabilities import required_capabilities

T = TypeVar("T")

DAY_MS: Final = 86_400_000
MAX_LENGTH_MS: Final = 2**53 - 1
MAX_NUMBER: Final = 2**63 - 1
MAX_AGEING_MS: Final = 10**12  # at this value one priority step outweighs any age


class Terms(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parsed policy of an execution. Durations are milliseconds; None is unset."""

    retry: RetryPolicy | None = None
    attempt_timeout_ms: int | None = None
    execution_deadline_ms: int | None = None
    max_reclaim_count: int | None = None
    max_replay_count: int = 10
    budget_ids: tuple[str, ...] = ()
    quota_policy_ids: tuple[str, ...] = ()
    fairness_key: str | None = None
    fairness_weight: int = 1
    ageing: int | None = None
    required_capabilities: str = ""
    dedup_window_ms: int = DAY_MS
    retention_ttl_ms: int | None = None
    delay_until: int | None = None
    kept_for_successors: bool = False
    detached: bool = False
    has_inbox: bool = False  # it declares which messages the run takes; see `rules.durable.inbox_schema`


DEFAULT_TERMS: Final = Terms()

PARTS: Final = frozenset(
    {
        "priority",
        "delay_until",
        "retry_policy",
        "timeout_policy",
        "max_reclaim_count",
        "suspension_policy",
        "fallback_policy",
        "max_replay_count",
        "budget_ids",
        "quota_policy_ids",
        "quota_policy_id",
        "fairness_key",
        "fairness_weight",
        "ageing",
        "routing_requirements",
        "dedup_window_ms",
        "stream_policy",
        "max_signals_per_execution",
        "kept_for_successors",
        "detached",
        "inbox",
    }
)


# ---------------------------------------------------------------------------------------------------------------
# Stored form


@lru_cache(maxsize=4096)
def encode_terms(terms: Terms) -> str | None:
    """Encode terms as short JSON; None if all of them are defaults."""
    return None if terms == DEFAULT_TERMS else _to_json(terms).decode()


@lru_cache(maxsize=4096)
def decode_terms(text: str | None) -> Terms:
    """Decode stored terms. Raises `Corruption` if the text is not valid."""
    try:
        return DEFAULT_TERMS if text is None else _from_json(text)
    except msgspec.DecodeError as fault:
        raise Corruption(f"exec_core: terms: {fault}") from fault


_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder(Terms).decode


# ---------------------------------------------------------------------------------------------------------------
# Parsing

Document: TypeAlias = Mapping[str, object]

_CACHED_LENGTH: Final = 4096


def parse_policy(policy: str | bytes | Document | None) -> tuple[Terms | FabricError, str | None]:
    """Return the terms of a policy with their stored text, or the refusal; without a policy the defaults apply."""
    try:
        terms = read_policy(policy)
    except FabricError as refused:
        return refused, None
    return terms, encode_terms(terms)


def read_policy(policy: str | bytes | Document | None) -> Terms:
    """Return the terms of a policy given as JSON text or as a mapping; without a policy the defaults apply.

    Raises `InvalidPolicyJson` or `InvalidCapabilities` for the first error.
    """
    if policy is None or policy == "" or policy == b"":
        return DEFAULT_TERMS
    if isinstance(policy, Mapping):
        return _parse_document(policy)
    return _parse_cached(policy) if len(policy) <= _CACHED_LENGTH else _parse_text(policy)


def parse_retry(text: str | bytes | None) -> RetryPolicy | None:
    """Return the retry policy that came with a failure; if it cannot be parsed nothing is retried."""
    try:
        return _retry(_decode_object(text)) if text else None
    except InvalidPolicyJson:
        return None


def _parse_text(text: str | bytes) -> Terms:
    return _parse_document(_decode_object(text))


_parse_cached = lru_cache(maxsize=1024)(_parse_text)


def _decode_object(text: str | bytes) -> Document:
    try:
        document = json_limits.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidPolicyJson("malformed") from error
    if not isinstance(document, dict):
        raise InvalidPolicyJson("not_object")
    return document


def _parse_document(policy: Document) -> Terms:
    required = required_capabilities(policy)  # first, because its checks have an order and errors of their own
    retry = _part(policy, "retry_policy")
    timeout = _part(policy, "timeout_policy") or {}
    stream = _part(policy, "stream_policy") or {}
    ageing = _number(policy, "ageing")
    weight = _number(policy, "fairness_weight")
    if weight == 0:
        raise InvalidPolicyJson("fairness_weight:not_positive")
    return Terms(
        retry=None if retry is None else _retry(retry, "retry_policy."),
        attempt_timeout_ms=_length(timeout, "attempt_timeout_ms", "timeout_policy.") or None,
        execution_deadline_ms=_length(timeout, "execution_deadline_ms", "timeout_policy.") or None,
        max_reclaim_count=_number(policy, "max_reclaim_count"),
        max_replay_count=_or(_number(policy, "max_replay_count"), DEFAULT_TERMS.max_replay_count),
        budget_ids=_ids(policy, "budget_ids"),
        quota_policy_ids=_quota_policy_ids(policy),
        fairness_key=_text(policy, "fairness_key") or None,
        fairness_weight=_or(weight, DEFAULT_TERMS.fairness_weight),
        ageing=min(ageing, MAX_AGEING_MS) if ageing else None,
        required_capabilities=required,
        dedup_window_ms=_or(_length(policy, "dedup_window_ms"), DEFAULT_TERMS.dedup_window_ms),
        retention_ttl_ms=_retention(stream),
        delay_until=_length(policy, "delay_until"),
        kept_for_successors=_or(_flag(policy, "kept_for_successors", ""), False),
        detached=_or(_flag(policy, "detached", ""), False),
        has_inbox=_has_inbox(policy),
    )


def _has_inbox(policy: Document) -> bool:
    """True if the policy declares which messages the run takes, each with the JSON schema of its value."""
    inbox = _part(policy, "inbox")
    for name, schema in (inbox or {}).items():
        if not name or not isinstance(schema, Mapping):
            raise InvalidPolicyJson(f"inbox.{name}:not_object")
        if invalid := schema_limits.check_schema(msgspec.json.encode(schema).decode()):
            raise InvalidPolicyJson(f"inbox.{name}:{invalid.detail}")
    return bool(inbox)


def _retry(document: Document, path: str = "") -> RetryPolicy:
    default = RetryPolicy()
    backoff = _part(document, "backoff", path)
    return RetryPolicy(
        max_retries=_or(_number(document, "max_retries", path), default.max_retries),
        backoff=default.backoff if backoff is None else _backoff(backoff, f"{path}backoff."),
        retryable_categories=_texts(document, "retryable_categories", path),
    )


def _backoff(document: Document, path: str) -> BackoffPolicy:
    match document.get("type"):
        case "fixed":
            return FixedBackoff(_or(_length(document, "delay_ms", path), FixedBackoff().delay_ms))
        case "exponential":
            default = ExponentialBackoff()
            return ExponentialBackoff(
                initial_delay_ms=_or(_length(document, "initial_delay_ms", path), default.initial_delay_ms),
                max_delay_ms=_or(_length(document, "max_delay_ms", path), default.max_delay_ms),
                multiplier=_or(_factor(document, "multiplier", path), default.multiplier),
                jitter=_or(_flag(document, "jitter", path), default.jitter),
            )
        case _:
            return FixedBackoff()


def _quota_policy_ids(policy: Document) -> tuple[str, ...]:
    single = policy.get("quota_policy_id")
    several = _ids(policy, "quota_policy_ids")
    return several if single is None else tuple(dict.fromkeys((*several, *_as_ids((single,), "quota_policy_id"))))


def _retention(stream: Document) -> int | None:
    """Return the retention; an invalid value is ignored and leaves the default in force."""
    try:
        return _length(stream, "retention_ttl_ms", "stream_policy.")
    except InvalidPolicyJson:
        return None


# ---------------------------------------------------------------------------------------------------------------
# Fields. Absent and null mean the same; any other value must have the type of the field.


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _part(document: Document, field: str, path: str = "") -> Document | None:
    value = document.get(field)
    if value is None or isinstance(value, Mapping):
        return value
    raise InvalidPolicyJson(f"{path}{field}:not_object")


def _number(document: Document, field: str, path: str = "") -> int | None:
    """Return a whole number from 0 to 2^63 - 1; None if absent."""
    value = document.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidPolicyJson(f"{path}{field}:not_an_integer")
    if value < 0:
        raise InvalidPolicyJson(f"{path}{field}:negative")
    if value > MAX_NUMBER:
        raise InvalidPolicyJson(f"{path}{field}:too_large")
    return value


def _length(document: Document, field: str, path: str = "") -> int | None:
    """Return a duration in milliseconds, capped at `MAX_LENGTH_MS`."""
    value = _number(document, field, path)
    return None if value is None else min(value, MAX_LENGTH_MS)


def _factor(document: Document, field: str, path: str) -> float | None:
    value = document.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidPolicyJson(f"{path}{field}:not_a_number")
    try:
        factor = float(value)
    except OverflowError as error:
        raise InvalidPolicyJson(f"{path}{field}:too_large") from error
    if not isfinite(factor):
        raise InvalidPolicyJson(f"{path}{field}:not_finite")
    if factor < 0:
        raise InvalidPolicyJson(f"{path}{field}:negative")
    return factor


def _flag(document: Document, field: str, path: str) -> bool | None:
    value = document.get(field)
    if value is None or isinstance(value, bool):
        return value
    raise InvalidPolicyJson(f"{path}{field}:not_a_boolean")


def _text(document: Document, field: str) -> str | None:
    value = document.get(field)
    return None if value is None else _as_text(value, field)


def _texts(document: Document, field: str, path: str = "") -> tuple[str, ...]:
    return tuple(_as_text(value, f"{path}{field}") for value in _array(document, field, path))


def _ids(document: Document, field: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_as_ids(_array(document, field), field)))


def _array(document: Document, field: str, path: str = "") -> list[object] | tuple[object, ...]:
    value = document.get(field)
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return value
    raise InvalidPolicyJson(f"{path}{field}:not_array")


def _as_text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidPolicyJson(f"{field}:not_a_string")
    if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
        raise InvalidPolicyJson(f"{field}:not_text")  # databases reject NUL and lone surrogates
    return value


def _as_ids(values: list[object] | tuple[object, ...], field: str) -> list[str]:
    try:
        return [parse_uuid(_as_text(value, field), field) for value in values]
    except InvalidInput as error:
        raise InvalidPolicyJson(f"{field}:not_a_uuid") from error
