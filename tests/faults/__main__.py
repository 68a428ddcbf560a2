"""Seed each fault into a copy of the tree, run the tests that have to detect it, and report the result.

    ./dev faults              all faults
    ./dev faults grant take   those with one of these texts in their name or file

The tests run on the copy without a fault first, and have to pass there. The exit code is 1 if a fault was not detected
or could not be seeded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults import FAULTS
from tests.faults.fault import SOURCE, Fault
from tests.postgres_install import ROOT

COPIED = ("src", "tests", "pyproject.toml")
TIMEOUT_S = 300


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
        # Without compiled files: the interpreter cannot distinguish two versions of a file of the same second.
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=self._root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        return done.returncode, done.stdout + done.stderr


def detecting_test(code: int, output: str) -> str | None:
    """Return the test that failed; None if none did, or if pytest could not start."""
    found = re.search(r"^FAILED \S*::(\S+)", output, re.MULTILINE)
    return found.group(1) if code == 1 and found else None


def main(texts: list[str]) -> int:
    faults = [fault for fault in FAULTS if not texts or any(text in f"{fault.name} {fault.file}" for text in texts)]
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="flowfabric-faults-") as folder:
        copy = Copy(Path(folder))
        for selection in dict.fromkeys(fault.detected_by for fault in faults):
            began = time.monotonic()
            code, output = copy.test(selection)
            if code:
                print(f"{output}\n✗ {selection} fails without any fault", flush=True)
                return 1
            print(f"· {selection} passes in {time.monotonic() - began:.1f} s", flush=True)
        for fault in faults:
            began = time.monotonic()
            try:
                with copy.with_fault(fault):
                    code, output = copy.test(fault.detected_by)
            except ValueError as error:
                print(f"✗ {error}", flush=True)
                survivors += 1
                continue
            by = detecting_test(code, output)
            survivors += by is None
            line = f"✓ {fault.name} — {by}" if by else f"✗ {fault.name} — SURVIVED ({fault.file})\n{output[-2000:]}"
            print(f"{line}  {time.monotonic() - began:.1f} s", flush=True)
    print(f"{len(faults) - survivors} of {len(faults)} faults were detected", flush=True)
    return 1 if survivors or not faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
