"""Load an app or a task by `MODULE:NAME`; the current folder is searched first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from types import ModuleType, TracebackType

    from flowfabric import Fabric, Task

T = TypeVar("T")

AppArgument = Annotated[str, typer.Argument(metavar="MODULE[:APP]", help="Where the Fabric is: `shop.tasks:app`.")]

IMPORT_MACHINERY = {__name__, "importlib", "importlib._bootstrap", "importlib._bootstrap_external"}


def load_app(target: str) -> Fabric:
    """Return the Fabric at `module:name`; without a name, the only one of the module."""
    from flowfabric import Fabric
    from flowfabric.errors import InvalidInput

    module, name = _module(target, "MODULE:APP, as in shop.tasks:app")
    if name:
        return _named(module, name, Fabric)
    apps = _all(module, Fabric)
    if len(apps) != 1:
        unclear = f"say which Fabric of {module.__name__} is meant, as in {module.__name__}:app"
        raise InvalidInput(unclear + _others(module, Fabric))
    return next(iter(apps.values()))


def load_task(target: str) -> Task[..., Any]:
    """Return the task at `module:name`."""
    from flowfabric import Task
    from flowfabric.errors import InvalidInput

    module, name = _module(target, "MODULE:TASK, as in shop.tasks:send")
    if not name:
        unclear = f"say which task of {module.__name__} is meant, as in {module.__name__}:send"
        raise InvalidInput(unclear + _others(module, Task))
    return _named(module, name, Task)


def _module(target: str, form: str) -> tuple[ModuleType, str]:
    import importlib
    import sys
    import traceback

    from flowfabric.errors import InvalidInput

    module_name, _, name = target.partition(":")
    if "/" in module_name or module_name.endswith(".py") or module_name.startswith("."):
        raise InvalidInput(f"{target!r} is not {form}; a module is named as an import would name it")
    sys.path.insert(0, "")
    try:
        return importlib.import_module(module_name), name
    except Exception as fault:
        within = _within_module(fault)
        if within is not None or isinstance(fault, SyntaxError):  # the module exists and failed: show its traceback
            traceback.print_exception(type(fault), fault, within)
            raise typer.Exit(1) from None
        if isinstance(fault, ModuleNotFoundError):
            missing = f"there is no module {fault.name!r} here; run ff in the folder that contains it, or install it"
            raise InvalidInput(missing) from None
        if isinstance(fault, ValueError):
            raise InvalidInput(f"{target!r} is not {form}") from None
        raise


def _within_module(fault: Exception) -> TracebackType | None:
    """Return the traceback from the imported module on; None if none of its code ran."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_frame.f_globals["__name__"] in IMPORT_MACHINERY:
        trace = trace.tb_next
    return trace


def _named(module: ModuleType, name: str, kind: type[T]) -> T:
    from flowfabric.errors import InvalidInput

    found = getattr(module, name, None)
    if not isinstance(found, kind):
        what = "task" if kind.__name__ == "Task" else kind.__name__
        raise InvalidInput(f"{module.__name__} has no {what} named {name!r}{_others(module, kind)}")
    return found


def _all(module: ModuleType, kind: type[T]) -> dict[str, T]:
    return {name: value for name, value in vars(module).items() if isinstance(value, kind)}


def _others(module: ModuleType, kind: type[Any]) -> str:
    known = _all(module, kind)
    return f"; it has {', '.join(known)}" if known else "; it has none"
