"""Resume conditions: their written form, what makes one acceptable, and how signals satisfy it.

How far a condition has come is kept per node of its tree, as the set of different satisfiers the node has met. A node
is named by its path, so that two counts beside each other never share a satisfier.
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
READ_DEPTH = 16  # what lies deeper is not looked at
EMPTY_NAME = "resume_condition: empty signal name (use Wildcard instead)"
OPERATOR_ONLY = "__operator_only__"
TIMEOUT_ONLY = "__timeout_only__"
LONGEST_SATISFIER = 100

Progress = dict[str, list[str]]  # the satisfiers of each node, by its path


class IncomingSignal(msgspec.Struct, frozen=True):
    """What a condition asks of a signal."""

    waitpoint_id: str
    waitpoint_key: str
    signal_id: str
    signal_name: str
    source_type: str
    source_identity: str


class SignalEffect:
    """What a signal did."""

    SATISFIED = "resume_condition_satisfied"
    APPENDED = "appended_to_waitpoint"
    DUPLICATE = "appended_to_waitpoint_duplicate"
    NOT_IN_CONDITION = "signal_ignored_not_in_condition"
    MATCHER_FAILED = "signal_ignored_matcher_failed"
    NO_OP = "no_op"
    BUFFERED = "buffered_for_pending_waitpoint"


UNMATCHED = frozenset({SignalEffect.NO_OP, SignalEffect.NOT_IN_CONDITION, SignalEffect.MATCHER_FAILED})


def check_structure(condition: Condition) -> FabricError | None:
    """What is wrong with the tree: depth first, the first fault wins."""
    for path, depth, node in _walk(condition):
        if isinstance(node, AllConditions | Count) and depth > MAX_DEPTH:
            return InvalidInput(f"depth {depth} exceeds cap {MAX_DEPTH} at path {path}")
        if fault := _fault(node):
            return InvalidInput(fault if fault == EMPTY_NAME else f"{fault} at path {path}")
    return None


def _fault(node: Condition) -> str | None:
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
    """The waitpoint keys that the tree names, first seen first."""
    keys: dict[str, None] = {}
    for _, _, node in _walk(condition):
        keys.update(dict.fromkeys(_keys(node)))
    return list(keys)


def required_names(condition: Condition, waitpoint_key: str) -> list[str]:
    """The signal names that mean something on this waitpoint, for reviewers; none at all stands for any name."""
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


def apply_signal(condition: Condition, progress: Progress, arrival: IncomingSignal) -> tuple[str, Progress]:
    """What a signal does to a condition, and how far it has come then."""
    candidates = [(path, node) for path, _, node in _walk(condition) if arrival.waitpoint_key in _keys(node)]
    matching = [(path, node) for path, node in candidates if _matches(node, arrival.signal_name)]
    if not matching:
        if isinstance(condition, Single | OperatorOnly | TimeoutOnly):
            return SignalEffect.NO_OP, progress
        return (SignalEffect.MATCHER_FAILED if candidates else SignalEffect.NOT_IN_CONDITION), progress
    grown = {path: list(tokens) for path, tokens in progress.items()}
    news = False
    for path, node in matching:
        tokens, token = grown.setdefault(path, []), _token(node, arrival)
        if token not in tokens:
            tokens.append(token)
            news = True
    if not news:
        return SignalEffect.DUPLICATE, progress
    return (SignalEffect.SATISFIED if is_satisfied(condition, grown) else SignalEffect.APPENDED), grown


def is_satisfied(condition: Condition, progress: Progress, path: str = "<root>") -> bool:
    """Whether the condition has come to its end."""
    match condition:
        case Single():
            return path in progress
        case Count(n=n):
            return len(progress.get(path, ())) >= n
        case AllConditions(members=members):
            return all(is_satisfied(member, progress, _below(path, place)) for place, member in enumerate(members))
        case OperatorOnly() | TimeoutOnly() | UnknownCondition():
            return False
        case _:
            assert_never(condition)


def _matches(node: Condition, name: str) -> bool:
    matcher = node.matcher if isinstance(node, Single | Count) else None
    return not isinstance(matcher, ByName) or matcher.name == name


def _token(node: Condition, arrival: IncomingSignal) -> str:
    if not isinstance(node, Count):
        return "met"
    match node.count_kind:
        case CountKind.DISTINCT_WAITPOINTS:
            return arrival.waitpoint_id
        case CountKind.DISTINCT_SIGNALS:
            return arrival.signal_id
        case CountKind.DISTINCT_SOURCES:  # as a pair: "a" of "b:c" is not "a:b" of "c"
            return _short(f"{len(arrival.source_type)}:{arrival.source_type}:{arrival.source_identity}")
        case _:
            assert_never(node.count_kind)


def _short(text: str) -> str:
    """The text, or what stands for a long one: every satisfier is kept until the wait is over."""
    return text if len(text) <= LONGEST_SATISFIER else f"#{hashlib.sha256(text.encode()).hexdigest()}"


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
        for place, member in enumerate(node.members):
            yield from _walk(member, _below(path, place), depth + 1)


def _below(path: str, place: int) -> str:
    return f"members[{place}]" if path == "<root>" else f"{path}.members[{place}]"


# ---------------------------------------------------------------------------------------------------------------
# The written form


def encode_condition(condition: Condition) -> str:
    """The condition as JSON text, tagged by the names of its variants."""
    return msgspec.json.encode(condition_to_builtins(condition)).decode()


def decode_condition(text: str) -> Condition:
    """The reverse, for what was stored; a node that is not known here is kept as it is."""
    return _node(msgspec.json.decode(text), strict=False)


def parse_condition(plain: object) -> Condition:
    """A condition as a caller gave it, in records or in JSON's own types; `InvalidInput` when it is none."""
    try:
        if isinstance(plain, Single | OperatorOnly | TimeoutOnly | AllConditions | Count):
            plain = condition_to_builtins(plain)  # records are not checked when they are made
        condition = _node(plain, strict=True)
        validation.text("resume_condition", encode_condition(condition))
    except (AssertionError, AttributeError, TypeError, ValueError, RecursionError) as fault:
        raise InvalidInput("resume_condition: not a condition") from fault
    for text in (*referenced_keys(condition), *_names(condition)):
        validation.text("resume_condition", text)
    return condition


def condition_to_builtins(condition: Condition) -> Any:
    """The condition as JSON's own types."""
    match condition:
        case Single():
            return {"Single": {"waitpoint_key": condition.waitpoint_key, "matcher": _plain_matcher(condition.matcher)}}
        case OperatorOnly():
            return "OperatorOnly"
        case TimeoutOnly():
            return "TimeoutOnly"
        case AllConditions(members=members):
            return {"Composite": {"kind": "AllOf", "members": [condition_to_builtins(member) for member in members]}}
        case Count():
            plain = {"kind": "Count", "n": condition.n, "count_kind": condition.count_kind.value}
            if condition.matcher is not None:
                plain["matcher"] = _plain_matcher(condition.matcher)
            return {"Composite": plain | {"waitpoints": list(condition.waitpoints)}}
        case UnknownCondition(stored=stored):
            return stored
        case _:
            assert_never(condition)


def _plain_matcher(matcher: Matcher) -> Any:
    match matcher:
        case ByName(name=name):
            return {"ByName": name}
        case Wildcard():
            return "Wildcard"
        case _:
            assert_never(matcher)


def _node(plain: Any, *, strict: bool, depth: int = 1) -> Condition:
    match plain:
        case "OperatorOnly":
            return OperatorOnly()
        case "TimeoutOnly":
            return TimeoutOnly()
        case {"Single": {"waitpoint_key": str(key), "matcher": matcher}} if (found := _matcher(matcher)) is not None:
            return Single(key, found)
        case {"Composite": {"kind": "AllOf", "members": list(members)}}:
            if depth > READ_DEPTH:
                return AllConditions(())
            return AllConditions(tuple(_node(member, strict=strict, depth=depth + 1) for member in members))
        case {"Composite": {"kind": "Count", "n": int(n), "count_kind": str(kind), "waitpoints": list(keys)} as count}:
            matcher = _matcher(count["matcher"]) if "matcher" in count else None
            kinds = {known.value: known for known in CountKind}
            known_matcher = matcher is not None or "matcher" not in count
            if kind in kinds and known_matcher and n >= 0 and not isinstance(n, bool) and _texts(keys):
                return Count(n, kinds[kind], tuple(keys), matcher)
        case _:
            pass
    if strict:
        raise InvalidInput("resume_condition: not a condition")
    return UnknownCondition(plain)


def _matcher(plain: Any) -> Matcher | None:
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


def _texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
