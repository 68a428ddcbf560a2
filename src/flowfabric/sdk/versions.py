"""Versions: which code a worker runs, by name or by a digest of its source."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from flowfabric.errors import InvalidInput

MAX_VERSION_CHARS = 200
_INSTALLED = tuple({str(Path(path).resolve()) for path in sysconfig.get_paths().values()})


def validate_version(version: object) -> str | None:
    """Check the version of an app."""
    if version is None or version == "":
        return None
    is_text = isinstance(version, str) and version.isprintable() and len(version) <= MAX_VERSION_CHARS
    # Workers offer their version as a capability, and these are joined by commas.
    if not isinstance(version, str) or not is_text or "," in version or any(map(str.isspace, version)):
        raise InvalidInput(f"version: {version!r} is no short text without blanks and commas, such as 2026-11-17.3")
    return version


def source_digest(handler: Callable[..., Any]) -> str:
    """Return a digest of a function's module and of the project modules that it imports, directly or not."""
    return _module_digest(handler.__module__)


@lru_cache(maxsize=1000)
def _module_digest(name: str) -> str:
    digest = hashlib.sha256()
    module = sys.modules.get(name)
    for one in sorted(_project_modules(module), key=lambda one: one.__name__) if module is not None else ():
        digest.update(one.__name__.encode())
        digest.update(_source(one))
    return f"sha-{digest.hexdigest()[:16]}"


def _project_modules(module: ModuleType) -> Iterator[ModuleType]:
    """Yield a module and the modules of the project that it refers to; installed packages are not part of it."""
    seen: set[str] = set()
    queue = [module]
    while queue:
        one = queue.pop()
        if one.__name__ in seen:
            continue
        seen.add(one.__name__)
        yield one
        for value in list(vars(one).values()):
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            other = sys.modules.get(name) if isinstance(name, str) else None
            if other is not None and _is_of_project(other):
                queue.append(other)


def _is_of_project(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or module.__name__.partition(".")[0] == "flowfabric":
        return False
    return not str(Path(file).resolve()).startswith(_INSTALLED)


def _source(module: ModuleType) -> bytes:
    try:
        return Path(str(module.__file__)).read_bytes()
    except (OSError, AttributeError, TypeError):
        return b""
