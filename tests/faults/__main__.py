"""Seed each fault into a copy of the tree, run the tests that have to detect it, and report the result.

    ./dev faults              all faults
    ./dev faults grant take   those with one of these texts in their name or file

The tests run on the copy without a fault first, and have to pass there. The exit code is 1 if a fault was not detected
or could not be seeded. There are as many copies as processors, and one more: many tests wait.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from tests.conftest import migrated_template
from tests.faults import FAULTS
from tests.faults.fault import SOURCE, Fault
from tests.postgres_install import ROOT

COPIED = ("src", "tests", "pyproject.toml")
TIMEOUT_S = 300
TIMED_OUT = 124  # the exit code of `timeout`

T = TypeVar("T")
R = TypeVar("R")


class Copy:
    """A copy of the tree, into which faults are seeded."""

    def __init__(self, root: Path) -> None:
        self._root = root
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / name)
        # Compiled files that are compared by content: the interpreter cannot tell two versions of one second by time.
        compiled = ("-m", "compileall", "-q", "--invalidation-mode", "checked-hash", root / "src", root / "tests")
        subprocess.run([sys.executable, *compiled], check=True)

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Seed a fault during the block."""
        file = self._root / SOURCE / fault.file
        original = file.read_text()
        file.write_text(fault.applied(original))
        try:
            yield
        finally:
            file.write_text(original)

    def test(self, selection: str) -> tuple[int, str]:
        """Run tests in the copy until one fails; return the exit code and the output of pytest."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", selection]
        paths = os.pathsep.join([str(self._root / "src"), str(self._root)])
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=self._root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return TIMED_OUT, f"the tests did not end within {TIMEOUT_S} s"
        return done.returncode, done.stdout + done.stderr


def detecting_test(code: int, output: str) -> str | None:
    """Return the test that failed; None if none did, or if pytest could not start."""
    found = re.search(r"^FAILED \S*::(\S+)", output, re.MULTILINE)
    return found.group(1) if code == 1 and found else None


class Copies:
    """Several copies of the tree, each used by one thread at a time."""

    def __init__(self, root: Path, count: int) -> None:
        self._count = count
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for number in range(count):
            (root / str(number)).mkdir()
            self._free.put(Copy(root / str(number)))

    def map(self, work: Callable[[Copy, T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield the results in the order of the items."""

        def in_free_copy(item: T) -> R:
            copy = self._free.get()
            try:
                return work(copy, item)
            finally:
                self._free.put(copy)

        with ThreadPoolExecutor(self._count) as pool:
            yield from pool.map(in_free_copy, items)


def report_on_tests(copy: Copy, selection: str) -> tuple[bool, str]:
    """Run tests without a fault; return whether they pass, and a line about it."""
    began = time.monotonic()
    code, output = copy.test(selection)
    if code:
        return False, f"{output}\n✗ {selection} fails without any fault"
    return True, f"· {selection} passes in {time.monotonic() - began:.1f} s"


def report_on_fault(copy: Copy, fault: Fault) -> tuple[bool, str]:
    """Seed a fault and run the tests that have to detect it; return whether they do, and a line about it."""
    began = time.monotonic()
    try:
        with copy.with_fault(fault):
            code, output = copy.test(fault.detected_by)
    except ValueError as error:
        return False, f"✗ {error}"
    by = detecting_test(code, output)
    line = f"✓ {fault.name} — {by}" if by else f"✗ {fault.name} — SURVIVED ({fault.file})\n{output[-2000:]}"
    return by is not None, f"{line}  {time.monotonic() - began:.1f} s"


def main(texts: list[str]) -> int:
    migrated_template()  # it is made once, not by several copies at the same time
    faults = [fault for fault in FAULTS if not texts or any(text in f"{fault.name} {fault.file}" for text in texts)]
    with tempfile.TemporaryDirectory(prefix="flowfabric-faults-") as folder:
        copies = Copies(Path(folder), (os.cpu_count() or 1) + 1)
        for passes, line in copies.map(report_on_tests, dict.fromkeys(fault.detected_by for fault in faults)):
            print(line, flush=True)
            if not passes:
                return 1
        detected = 0
        for is_detected, line in copies.map(report_on_fault, faults):
            print(line, flush=True)
            detected += is_detected
    print(f"{detected} of {len(faults)} faults were detected", flush=True)
    return 0 if faults and detected == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
