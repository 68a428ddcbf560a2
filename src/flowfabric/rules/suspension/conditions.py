"""Resume conditions: their JSON form, when one is valid, and how signals satisfy it.

The progress of a condition is stored per node of its tree, as the set of distinct satisfiers the node has met. A node
is identified by its path, so that two sibling counts never share a satisfier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, assert_never

import msgspec

from flowfabric.errors import FabricError, InvalidInput
from flowfabric.model.condition import (
    AllConditions,
    ByName,
    Condition,
    Count,
    CountKind,
    Matcher,
    OperatorOnly,
    Single,
    TimeoutOnly,
    UnknownCondition,
    Wildcard,
)
from flowfabric.rules import validation

MAX_DEPTH = 4
READ_DEPTH = 16  # members of deeper nodes are ignored when parsing
EMPTY_NAME = "resume_condition: empty signal name (use Wildcard instead)"
OPERATOR_ONLY = "__operator_only__"
TIMEOUT_ONLY = "__timeout_only__"
MAX_SATISFIER_LENGTH = 100

Progress = dict[str, list[str]]  # satisfiers of each node, by path


class IncomingSignal(msgspec.Struct, frozen=True):
    """The parts of a signal that conditions inspect."""

    waitpoint_id: str
    waitpoint_key: str
    signal_id: str
    signal_name: str
    source_type: str
    source_identity: str


class SignalEffect:
    """The effect of a signal on the waitpoint that received it."""

    SATISFIED = "resume_condition_satisfied"
    APPENDED = "appended_to_waitpoint"
    DUPLICATE = "appended_to_waitpoint_duplicate"
    NOT_IN_CONDITION = "signal_ignored_not_in_condition"
    MATCHER_FAILED = "signal_ignored_matcher_failed"
    NO_OP = "no_op"
    BUFFERED = "buffered_for_pending_waitpoint"


UNMATCHED = frozenset({SignalEffect.NO_OP, SignalEffect.NOT_IN_CONDITION, SignalEffect.MATCHER_FAILED})


def check_structure(condition: Condition) -> FabricError | None:
    """Return the first fault of the tree, in depth-first order."""
    for path, depth, node in _walk(condition):
        if isinstance(node, AllConditions | Count) and depth > MAX_DEPTH:
            return InvalidInput(f"depth {depth} exceeds cap {MAX_DEPTH} at path {path}")
        if fault := _node_fault(node):
            return InvalidInput(fault if fault == EMPTY_NAME else f"{fault} at path {path}")
    return None


def _node_fault(node: Condition) -> str | None:
    """Return what is wrong with one node; None if nothing is."""
    match node:
        case AllConditions(members=()):
            return "allof_empty_members"
        case Count(n=0):
            return "count_n_zero"
        case Count(waitpoints=()):
            return "count_waitpoints_empty"
        case Count(count_kind=CountKind.DISTINCT_WAITPOINTS) if node.n > len(set(node.waitpoints)):
            return "count_exceeds_waitpoint_set"
        case Single(matcher=ByName(name="")) | Count(matcher=ByName(name="")):
            return EMPTY_NAME
        case _:
            return None


def referenced_keys(condition: Condition) -> list[str]:
    """Return the waitpoint keys that the tree names, in order of first use."""
    keys: dict[str, None] = {}
    for _, _, node in _walk(condition):
        keys.update(dict.fromkeys(_keys(node)))
    return list(keys)


def required_names(condition: Condition, waitpoint_key: str) -> list[str]:
    """Return the signal names that matter on this waitpoint, for reviewers; an empty list means any name."""
    names: dict[str, None] = {}
    for _, _, node in _walk(condition):
        match node:
            case OperatorOnly():
                names[OPERATOR_ONLY] = None
            case TimeoutOnly():
                names[TIMEOUT_ONLY] = None
            case Single(matcher=ByName(name=name)) | Count(matcher=ByName(name=name)):
                if waitpoint_key in _keys(node):
                    names[name] = None
            case _:
                pass
    return list(names)


def apply_signal(condition: Condition, progress: Progress, signal: IncomingSignal) -> tuple[str, Progress]:
    """Return the effect of a signal on a condition, and the new progress."""
    candidates = [(path, node) for path, _, node in _walk(condition) if signal.waitpoint_key in _keys(node)]
    matching = [(path, node) for path, node in candidates if _matches(node, signal.signal_name)]
    if not matching:
        if isinstance(condition, Single | OperatorOnly | TimeoutOnly):
            return SignalEffect.NO_OP, progress
        return (SignalEffect.MATCHER_FAILED if candidates else SignalEffect.NOT_IN_CONDITION), progress
    updated = {path: list(known) for path, known in progress.items()}
    is_new = False
    for path, node in matching:
        known, satisfier = updated.setdefault(path, []), _satisfier(node, signal)
        if satisfier not in known:
            known.append(satisfier)
            is_new = True
    if not is_new:
        return SignalEffect.DUPLICATE, progress
    return (SignalEffect.SATISFIED if is_satisfied(condition, updated) else SignalEffect.APPENDED), updated


def is_satisfied(condition: Condition, progress: Progress, path: str = "<root>") -> bool:
    """True if the condition is met."""
    match condition:
        case Single():
            return path in progress
        case Count(n=n):
            return len(progress.get(path, ())) >= n
        case AllConditions(members=members):
            return all(is_satisfied(member, progress, _child_path(path, index)) for index, member in enumerate(members))
        case OperatorOnly() | TimeoutOnly() | UnknownCondition():
            return False
        case _:
            assert_never(condition)


def _matches(node: Condition, name: str) -> bool:
    matcher = node.matcher if isinstance(node, Single | Count) else None
    return not isinstance(matcher, ByName) or matcher.name == name


def _satisfier(node: Condition, signal: IncomingSignal) -> str:
    """Return what a matching signal adds to the node's set of satisfiers."""
    if not isinstance(node, Count):
        return "met"
    match node.count_kind:
        case CountKind.DISTINCT_WAITPOINTS:
            return signal.waitpoint_id
        case CountKind.DISTINCT_SIGNALS:
            return signal.signal_id
        case CountKind.DISTINCT_SOURCES:  # with a length prefix: "a" + "b:c" differs from "a:b" + "c"
            return _shorten(f"{len(signal.source_type)}:{signal.source_type}:{signal.source_identity}")
        case _:
            assert_never(node.count_kind)


def _shorten(text: str) -> str:
    """Return the text, or its hash if it is long, because satisfiers are stored until the wait is over."""
    return text if len(text) <= MAX_SATISFIER_LENGTH else f"#{hashlib.sha256(text.encode()).hexdigest()}"


def _keys(node: Condition) -> tuple[str, ...]:
    match node:
        case Single(waitpoint_key=key):
            return (key,)
        case Count(waitpoints=keys):
            return keys
        case _:
            return ()


def _walk(node: Condition, path: str = "<root>", depth: int = 1) -> Iterator[tuple[str, int, Condition]]:
    yield path, depth, node
    if isinstance(node, AllConditions):
        for index, member in enumerate(node.members):
            yield from _walk(member, _child_path(path, index), depth + 1)


def _child_path(path: str, index: int) -> str:
    return f"members[{index}]" if path == "<root>" else f"{path}.members[{index}]"


# ---------------------------------------------------------------------------------------------------------------
# JSON form


def encode_condition(condition: Condition) -> str:
    """Encode the condition as JSON text, tagged by the names of its variants."""
    return msgspec.json.encode(condition_to_builtins(condition)).decode()


def decode_condition(text: str) -> Condition:
    """Decode a stored condition; an unknown node is kept as it is."""
    return _parse_node(msgspec.json.decode(text), strict=False)


def parse_condition(value: object) -> Condition:
    """Parse a condition that a caller gave as structs or JSON builtins. Raises `InvalidInput`."""
    try:
        if isinstance(value, Single | OperatorOnly | TimeoutOnly | AllConditions | Count):
            value = condition_to_builtins(value)  # structs are not validated when constructed
        condition = _parse_node(value, strict=True)
        validation.text("resume_condition", encode_condition(condition))
    except (AssertionError, AttributeError, TypeError, ValueError, RecursionError) as fault:
        raise InvalidInput("resume_condition: not a condition") from fault
    for text in (*referenced_keys(condition), *_names(condition)):
        validation.text("resume_condition", text)
    return condition


def condition_to_builtins(condition: Condition) -> Any:
    """Return the condition as JSON builtins."""
    match condition:
        case Single():
            return {
                "Single": {"waitpoint_key": condition.waitpoint_key, "matcher": _matcher_to_builtins(condition.matcher)}
            }
        case OperatorOnly():
            return "OperatorOnly"
        case TimeoutOnly():
            return "TimeoutOnly"
        case AllConditions(members=members):
            return {"Composite": {"kind": "AllOf", "members": [condition_to_builtins(member) for member in members]}}
        case Count():
            count = {"kind": "Count", "n": condition.n, "count_kind": condition.count_kind.value}
            if condition.matcher is not None:
                count["matcher"] = _matcher_to_builtins(condition.matcher)
            return {"Composite": count | {"waitpoints": list(condition.waitpoints)}}
        case UnknownCondition(stored=stored):
            return stored
        case _:
            assert_never(condition)


def _matcher_to_builtins(matcher: Matcher) -> Any:
    match matcher:
        case ByName(name=name):
            return {"ByName": name}
        case Wildcard():
            return "Wildcard"
        case _:
            assert_never(matcher)


def _parse_node(value: Any, *, strict: bool, depth: int = 1) -> Condition:
    match value:
        case "OperatorOnly":
            return OperatorOnly()
        case "TimeoutOnly":
            return TimeoutOnly()
        case {"Single": {"waitpoint_key": str(key), "matcher": matcher}} if (
            parsed_matcher := _parse_matcher(matcher)
        ) is not None:
            return Single(key, parsed_matcher)
        case {"Composite": {"kind": "AllOf", "members": list(members)}}:
            if depth > READ_DEPTH:
                return AllConditions(())
            return AllConditions(tuple(_parse_node(member, strict=strict, depth=depth + 1) for member in members))
        case {"Composite": {"kind": "Count", "n": int(n), "count_kind": str(kind), "waitpoints": list(keys)} as count}:
            matcher = _parse_matcher(count["matcher"]) if "matcher" in count else None
            kinds = {known.value: known for known in CountKind}
            known_matcher = matcher is not None or "matcher" not in count
            if kind in kinds and known_matcher and n >= 0 and not isinstance(n, bool) and _are_texts(keys):
                return Count(n, kinds[kind], tuple(keys), matcher)
        case _:
            pass
    if strict:
        raise InvalidInput("resume_condition: not a condition")
    return UnknownCondition(value)


def _parse_matcher(plain: Any) -> Matcher | None:
    match plain:
        case "Wildcard":
            return Wildcard()
        case {"ByName": str(name)}:
            return ByName(name)
        case _:
            return None


def _names(condition: Condition) -> list[str]:
    matchers = [node.matcher for _, _, node in _walk(condition) if isinstance(node, Single | Count)]
    return [matcher.name for matcher in matchers if isinstance(matcher, ByName)]


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
