"""Generates the reference from signatures and docstrings.

python -m tests.docs.reference      writes docs/reference.md
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import flowfabric
from flowfabric.testing import World
from tests.postgres_install import ROOT

PAGE = ROOT / "docs" / "reference.md"
WIDTH = 100

SECTIONS: dict[str, list[str]] = {
    "Applications": ["Fabric", "Task", "Run", "Keyed", "Worker", "Reset", "connect", "Settings", "Deadlines"],
    "Inside a task": [
        "Context",
        "current",
        "step",
        "RetryAfter",
        "Fatal",
        "Won",
        "Inbox",
        "Message",
        "Approval",
        "Votes",
        "Output",
        "Reservation",
    ],
    "Ways of a task": ["Retry", "Key", "Budget", "Limit"],
    "Schedules": ["Calendar", "ScheduleHandle"],
    "Flows and joins": ["Flow", "FlowRun", "AllOf", "AnyOf", "Quorum"],
    "How runs end": [
        "RunEnded",
        "RunFailed",
        "StepFailed",
        "StepTimeout",
        "StepInterrupted",
        "RunCancelled",
        "RunExpired",
        "RunSkipped",
        "BudgetExceeded",
        "Refused",
        "NotAnswered",
    ],
    "Errors": ["FabricError", "InvalidInput", "KeyTaken", "StoreUnavailable", "NonDeterministic"],
    "Underneath": ["Engine", "CreateExecution", "Fence", "Handle", "HandleKind"],
}
NOT_CONSTRUCTED = {"Task", "Run", "Keyed", "Context", "Flow", "FlowRun", "Inbox", "Message", "Approval", "Votes"}
NOT_CONSTRUCTED |= {"Output", "Reservation", "Engine", "ScheduleHandle"}
# Used between modules of the library, not by applications.
INTERNAL = {
    "Fabric": {"bind", "unbind", "declare", "declare_limits", "declare_budget", "portal", "stop_own_loop"},
    "Task": {"with_context", "build_create", "resolve_limits", "start_at", "submit_keyed", "check_result", "is_batch"},
    "Context": {
        "find_step",
        "record_step_result",
        "reach_fault_point",
        "run_once",
        "mark_cancelled",
        "flush",
        "durable",
        "handle",
        "is_parked",
    }
    | {"may_park", "close", "flush_quietly", "declared_inbox", "origin", "open_reservations"},
    "Key": {"check", "resolve"},
    "Run": {"timeout_error"},
    "Worker": {"simulate_kill", "stop_renewing"},
    "World": {"engine_for_app"},
    "Retry": {"policy", "covers", "backoff_ms"},
    "Budget": {"amounts", "stored_dimension", "display_amounts", "declare"},
    "Limit": {"declare"},
    "AllOf": {"required_successes", "policy"},
    "AnyOf": {"required_successes", "policy"},
    "Quorum": {"required_successes", "policy"},
    "Engine": {"limit_commands", "sweeper"},
}

HEAD = """# Reference

Every public name with its docstring; `./dev py -m tests.docs.reference` writes this page. All of them come from
`flowfabric` but `World`, which is in `flowfabric.testing`. Lengths of time are written like `"30s"`, `"5m"`, `"1h30m"`,
`"7d"`, as numbers of seconds, or as a `timedelta`. `task.sync`, `run.sync`, `flow.sync` and `ctx.sync` have the same
methods for code that cannot await. The command line explains itself: `ff --help`.
"""


def page() -> str:
    """Return the whole page."""
    missing = set(flowfabric.__all__) - {"__version__"} - {name for names in SECTIONS.values() for name in names}
    assert not missing, f"add {', '.join(sorted(missing))} to a section"
    parts = [HEAD]
    for section, names in SECTIONS.items():
        parts.append(f"## {section}\n")
        parts += [entry for name in names for entry in _entry(getattr(flowfabric, name))]
    parts += ["## Testing\n", *_entry(World)]
    return "\n".join(parts)


def outline(text: str) -> list[str]:
    """Return the names and signatures of a page; descriptions may change before the page is generated again."""
    kept = re.findall(r"^##[^\n]*|^\* `[^\n]*|^```$.*?^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [part.strip() for part in kept]


def _entry(thing: Any) -> Iterator[str]:
    name = thing.__name__
    yield f"### `{name}`\n"
    if inspect.isclass(thing):
        if name in NOT_CONSTRUCTED:
            pass
        elif thing.__init__ is not object.__init__ and "__init__" in vars(thing):
            yield f"```\n{_signature(thing.__init__, name)}\n```\n"
        elif getattr(thing, "__struct_fields__", ()):
            yield f"```\n{_fields(thing)}\n```\n"
    else:
        yield f"```\n{_signature(thing, name)}\n```\n"
    yield f"{_doc(thing)}\n"
    if not inspect.isclass(thing):
        return
    if thing.__name__ == "Engine":
        yield from _operations(thing)
        return
    for method_name, method in _methods(thing):
        shown = method_name if isinstance(method, property | cached_property) else _signature(method, method_name)
        yield f"* `{shown}`  \n  {' '.join(_doc(method).split())}"
    if any(True for _ in _methods(thing)):
        yield ""


def _methods(owner: type) -> Iterator[tuple[str, Any]]:
    seen = set()
    for base in owner.__mro__:
        if not base.__module__.startswith("flowfabric"):
            continue
        for name, found in vars(base).items():
            if name.startswith("_") or name in seen or name in INTERNAL.get(owner.__name__, ()):
                continue
            seen.add(name)
            found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
            if (inspect.isfunction(found) or isinstance(found, property | cached_property)) and inspect.getdoc(found):
                yield name, found


def _operations(engine: type) -> Iterator[str]:
    """Yield the operations of the engine, each with its signature and first paragraph."""
    for name, method in sorted(_methods(engine), key=lambda named: named[0]):
        if inspect.isfunction(method):
            yield f"* `{_signature(method, name)}`  \n  {' '.join(_doc(method).split(chr(10) * 2)[0].split())}"
    yield ""


def _doc(thing: Any) -> str:
    return inspect.cleandoc(inspect.getdoc(thing) or "")


def _signature(function: Any, name: str) -> str:
    """Return the signature as in the source, without `self`."""
    function = inspect.unwrap(function)
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef)
    parameters = tree.args
    for some in (parameters.posonlyargs, parameters.args):
        if some and some[0].arg in ("self", "cls"):
            some.pop(0)
            break
    has_result = tree.returns and name != "__init__" and tree.name != "__init__"
    result = f" -> {ast.unparse(tree.returns)}" if tree.returns and has_result else ""
    prefix = "async " if isinstance(tree, ast.AsyncFunctionDef) else ""
    arguments = _split(ast.unparse(parameters))
    line = f"{prefix}{name}({', '.join(arguments)}){result}"
    if len(line) <= WIDTH or tree.name != "__init__":
        return line
    return f"{name}(\n    " + ",\n    ".join(arguments) + "\n)"


def _split(arguments: str) -> list[str]:
    """Split arguments at commas outside of brackets."""
    parts, depth = [""], 0
    for letter in arguments:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [re.sub(r"^(\w+: .*?)=", r"\1 = ", part.strip()) for part in parts if part.strip()]


def _fields(struct: Any) -> str:
    """Return the fields of a struct as in the source."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(tree, ast.ClassDef)
    fields = [ast.unparse(line) for line in tree.body if isinstance(line, ast.AnnAssign)]
    return f"{struct.__name__}(\n    " + ",\n    ".join(fields) + "\n)"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
