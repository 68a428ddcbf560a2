"""Programs: the syntax tree of a durable function, and a hypothesis strategy for it.

A node is evaluated at a *path*: its place in the tree with the number of each repetition, such as `r.1.0`. Paths name
effects and results, so that a result at the wrong place is seen. Each member of a group is a *branch*, named by its
path. The outside world is scripted: the first `failures` calls of a step fail, however often the engine makes them.

At most one member of a group may raise: two failures at once would make the outcome a matter of timing.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st

from flowfabric import Fatal, RetryAfter, RunFailed

NAMES = ("charge", "book")  # few, so that steps of different branches share one
ALWAYS = 99  # failures of a step that never succeeds

Kind = Literal["declined", "value", "missing", "fatal", "busy"]


class Declined(Exception):
    """A failure of the outside world with a field of its own."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Busy(RetryAfter):
    """A failure after which the attempt is delayed, unless it is caught."""

    def __init__(self, text: str) -> None:
        super().__init__("1s")
        self.args = (text,)


FAILURES = (Declined, Busy, ValueError, FileNotFoundError, Fatal, RunFailed)  # all that a program raises and catches


def make_failure(kind: Kind, path: str, call: int) -> Exception:
    """Return the failure of one call of a step."""
    text = f"{kind} {path} {call}"
    match kind:
        case "declined":
            return Declined(text, call)
        case "value":
            return ValueError(text)
        case "missing":
            return FileNotFoundError(2, text)
        case "fatal":
            return Fatal(text)
        case "busy":
            return Busy(text)


def describe_failure(failure: BaseException) -> dict[str, Any]:
    """Return class, text and fields of a failure. A subclass of a known class counts as that class."""
    if isinstance(failure, RunFailed):  # its text has the run's id
        found = re.search(r"child failed \S+", failure.reason)
        return {"class": "RunFailed", "text": found[0] if found else failure.reason, "fields": {}}
    known = next((kind for kind in FAILURES if isinstance(failure, kind)), type(failure))
    fields = {name: value for name, value in vars(failure).items() if isinstance(value, int | str)}
    return {"class": known.__name__, "text": str(failure), "fields": fields}


# -- the tree ----------------------------------------------------------------------------------------------------------


class Node(msgspec.Struct, frozen=True, tag=True):
    """A part of a program."""


class Step(Node, frozen=True):
    """A step that takes `ms`; with `argument` its path is an argument, and so part of the digest of its input."""

    name: str = "charge"
    failures: int = 0
    kind: Kind = "declined"
    ms: int = 0
    argument: bool = False


class Pause(Node, frozen=True):
    """A pause of the function's own, which the engine does not see. It has another length in each invocation."""

    ms: int


class Sleep(Node, frozen=True):
    minutes: int


class Receive(Node, frozen=True):
    """Receive from the mailbox of the branch. The message is sent `after` minutes; None waits five minutes in vain."""

    after: int | None = 0


class Ask(Node, frozen=True):
    """An approval, answered `after` minutes."""

    after: int = 0


class Child(Node, frozen=True):
    fails: bool = False


class Children(Node, frozen=True):
    """Children that one `ctx.gather` starts and waits for."""

    count: int


class Spend(Node, frozen=True):
    amount: int


class Reserve(Node, frozen=True):
    """A reservation around a part of the program, of which `amount` is spent at the beginning."""

    amount: int
    body: Node


class Sequence(Node, frozen=True):
    items: tuple[Node, ...] = ()


class Loop(Node, frozen=True):
    times: int
    body: Node


class Catch(Node, frozen=True):
    """Catch a failure of the body and run the handler; with `raises` the failure is raised again afterwards."""

    body: Node
    handler: Node = Sequence()
    raises: bool = False


class Saga(Node, frozen=True):
    """Steps, and if one fails, a step `undo` for each that was done, last first; then the failure may be raised."""

    steps: tuple[Step, ...]
    raises: bool = False


class Group(Node, frozen=True):
    """Concurrent branches."""

    how: Literal["ctx.gather", "asyncio.gather", "return_exceptions", "TaskGroup"]
    members: tuple[Node, ...]


class WaitFor(Node, frozen=True):
    """`asyncio.wait_for` around a step, which is in time or not."""

    step: Step
    is_late: bool


class Leave(Node, frozen=True):
    """Wait for a message and for a sleep with `asyncio.wait`; no message comes, and the receive is cancelled."""

    minutes: int


class Options(Node, frozen=True):
    """A step with retries of its own: `ctx.options(retry=…).step(…)`."""

    step: Step
    retries: int


class Race(Node, frozen=True):
    """`ctx.race` of a message and a sleep. The message is sent `after` minutes and wins; None never comes."""

    minutes: int
    after: int | None = None


class RaceOf(Node, frozen=True):
    """`ctx.race` of parts of a program: the first that ends wins, and its failure is that of the race."""

    members: tuple[Node, ...]


class Program(msgspec.Struct, frozen=True):
    """A durable function and the retries of its task."""

    body: Node
    retries: int = 0


def can_raise(node: Node) -> bool:
    """True if the node may raise a failure."""
    match node:
        case Step(failures=failures):
            return failures > 0
        case Child(fails=fails):
            return fails
        case WaitFor(step=step, is_late=is_late):
            return not is_late and can_raise(step)
        case Options(step=step, retries=retries):
            return step.failures > (0 if step.kind == "fatal" else retries)
        case Reserve(body=body) | Loop(body=body):
            return can_raise(body)
        case Sequence(items=items) | RaceOf(members=items):
            return any(map(can_raise, items))
        case Catch(body=body, handler=handler, raises=raises):
            return can_raise(body) and (raises or can_raise(handler))
        case Saga(steps=steps, raises=raises):
            return raises and any(map(can_raise, steps))
        case Group(how=how, members=members):
            return how != "return_exceptions" and any(map(can_raise, members))
        case _:
            return False


def total_minutes(node: Node) -> int:
    """Return more minutes than all waits of a program take together."""
    match node:
        case Sleep(minutes=minutes) | Leave(minutes=minutes) | Race(minutes=minutes):
            return minutes
        case Receive(after=after):
            return 5 if after is None else after
        case Ask(after=after):
            return after
        case Reserve(body=body):
            return total_minutes(body)
        case Loop(times=times, body=body):
            return times * total_minutes(body)
        case Catch(body=body, handler=handler):
            return total_minutes(body) + total_minutes(handler)
        case Sequence(items=nodes) | Group(members=nodes) | RaceOf(members=nodes):
            return sum(map(total_minutes, nodes))
        case _:
            return 0


# -- the strategy ------------------------------------------------------------------------------------------------------


class Feature(StrEnum):
    """What a program may contain beside steps that succeed."""

    FAIL = "steps that fail and are retried by the task"
    CATCH = "failures that are caught"
    SAGA = "compensation"
    SLEEP = "sleeps"
    RECEIVE = "messages"
    ASK = "approvals"
    CHILD = "children"
    GATHER = "ctx.gather"
    ASYNCIO_GATHER = "asyncio.gather"
    RETURN_EXCEPTIONS = "asyncio.gather with return_exceptions"
    TASK_GROUP = "asyncio.TaskGroup"
    WAIT_FOR = "asyncio.wait_for"
    LEAVE = "asyncio.wait and cancel"
    PAUSE = "pauses of the function's own"
    SPEND = "spending"
    RESERVE = "reservations"
    LOOP = "loops"
    OPTIONS = "ctx.options"
    RACE = "ctx.race"
    RACE_OF = "ctx.race of parts of the program"


EVERYTHING = frozenset(Feature)

MINUTES = st.sampled_from((2, 5, 20))
GROUPS: dict[Feature, Literal["ctx.gather", "asyncio.gather", "return_exceptions", "TaskGroup"]] = {
    Feature.GATHER: "ctx.gather",
    Feature.ASYNCIO_GATHER: "asyncio.gather",
    Feature.RETURN_EXCEPTIONS: "return_exceptions",
    Feature.TASK_GROUP: "TaskGroup",
}


def programs(features: frozenset[Feature] = EVERYTHING) -> st.SearchStrategy[Program]:
    """Return a strategy for programs with these features."""
    return st.builds(Program, _nodes(features, depth=2, most=4), st.integers(0, 2))


def _steps(features: frozenset[Feature]) -> st.SearchStrategy[Step]:
    failures = (0, 0, 1, ALWAYS) if features & {Feature.FAIL, Feature.CATCH, Feature.SAGA} else (0,)
    kinds = st.sampled_from(("declined", "value", "missing", "fatal", "busy"))
    return st.builds(
        Step, st.sampled_from(NAMES), st.sampled_from(failures), kinds, st.sampled_from((0, 10, 300)), st.booleans()
    ).filter(lambda step: (step.kind, step.failures) != ("busy", ALWAYS))  # it would be delayed for ever


def _leaves(features: frozenset[Feature]) -> st.SearchStrategy[Node]:
    steps = _steps(features)
    late_steps = st.builds(Step, st.sampled_from(NAMES))
    leaves: dict[Feature, st.SearchStrategy[Node]] = {
        Feature.SLEEP: st.builds(Sleep, MINUTES),
        Feature.RECEIVE: st.builds(Receive, st.sampled_from((0, 3, None))),
        Feature.ASK: st.builds(Ask, st.sampled_from((0, 3))),
        Feature.CHILD: st.builds(Children, st.integers(1, 3))
        | st.builds(Child, st.booleans() if Feature.FAIL in features else st.just(False)),
        Feature.PAUSE: st.builds(Pause, st.sampled_from((0, 10, 200))),
        Feature.SPEND: st.builds(Spend, st.integers(1, 3)),
        Feature.WAIT_FOR: st.builds(WaitFor, steps, st.just(False)) | st.builds(WaitFor, late_steps, st.just(True)),
        Feature.LEAVE: st.builds(Leave, MINUTES),
        Feature.SAGA: st.builds(Saga, st.lists(steps, min_size=1, max_size=3).map(tuple), st.booleans()),
        Feature.OPTIONS: st.builds(Options, steps, st.integers(1, 3)),
        Feature.RACE: st.builds(Race, MINUTES) | st.builds(Race, st.just(20), st.sampled_from((0, 3))),
    }
    return st.one_of(steps, steps, *(leaf for feature, leaf in leaves.items() if feature in features))


def _nodes(features: frozenset[Feature], *, depth: int, most: int) -> st.SearchStrategy[Node]:
    leaves = _leaves(features)
    if depth == 0:
        return leaves
    parts = _nodes(features, depth=depth - 1, most=3)
    inner: dict[Feature, st.SearchStrategy[Node]] = {
        Feature.CATCH: st.builds(Catch, parts, parts, st.booleans()),
        Feature.RESERVE: st.builds(Reserve, st.integers(1, 3), parts),
        Feature.LOOP: st.builds(Loop, st.integers(2, 3), leaves),
    }
    members = st.lists(parts, min_size=2, max_size=3).map(lambda nodes: _with_one_that_raises(nodes, features))
    inner[Feature.RACE_OF] = st.builds(RaceOf, members)
    for feature, how in GROUPS.items():
        inner[feature] = st.builds(Group, st.just(how), members)
    choices = [node for feature, node in inner.items() if feature in features]
    items = st.one_of(leaves, leaves, *choices)
    if Feature.FAIL not in features:  # then every failure is caught
        items = items.map(lambda node: Catch(node) if can_raise(node) else node)
    return st.lists(items, min_size=1, max_size=most).map(lambda items: items[0] if len(items) == 1 else _chain(items))


def _chain(items: list[Node]) -> Node:
    return Sequence(tuple(items))


def _with_one_that_raises(members: list[Node], features: frozenset[Feature]) -> tuple[Node, ...]:
    """Let only the first member that may raise do so; failures of the others are caught, or they are left out."""
    raising = next((number for number, node in enumerate(members) if can_raise(node)), None)
    return tuple(
        node if number == raising or not can_raise(node) else Catch(node) if Feature.CATCH in features else Step()
        for number, node in enumerate(members)
    )
