"""Put each fault into a copy of the tree, run the tests that have to notice, and say who noticed.

    ./dev faults              all of them
    ./dev faults grant take   those with one of these words in their name or file

The tests are run on the copy without any fault first: what fails there notices nothing. Ends with 1 when a fault
survived, or could not be put in.
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

from tests.faults.fault import SOURCE, Fault
from tests.faults.faults import FAULTS
from tests.postgres_install import ROOT

COPIED = ("src", "tests", "pyproject.toml")
LONGEST_S = 300


class Copy:
    """A copy of the tree in which anything may be broken."""

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
        """Put a fault in, and take it out again."""
        file = self._root / SOURCE / fault.file
        sound = file.read_text()
        file.write_text(fault.applied(sound))
        try:
            yield
        finally:
            file.write_text(sound)

    def test(self, selection: str) -> tuple[int, str]:
        """Run tests in the copy until one fails; pytest's code, and its last words."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", selection]
        paths = os.pathsep.join([str(self._root / "src"), str(self._root)])
        # Without compiled files: two versions of a file within one second would look the same to the interpreter.
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=self._root, env=environment, capture_output=True, text=True, timeout=LONGEST_S
        )
        return done.returncode, done.stdout + done.stderr


def noticed(code: int, words: str) -> str | None:
    """The test that noticed; None when nobody did. A copy that does not even start has not been tested."""
    found = re.search(r"^FAILED \S*::(\S+)", words, re.MULTILINE)
    return found.group(1) if code == 1 and found else None


def main(wanted: list[str]) -> int:
    faults = [fault for fault in FAULTS if not wanted or any(word in f"{fault.name} {fault.file}" for word in wanted)]
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="flowfabric-faults-") as folder:
        copy = Copy(Path(folder))
        for selection in dict.fromkeys(fault.noticed_by for fault in faults):
            began = time.monotonic()
            code, words = copy.test(selection)
            if code:
                print(f"{words}\n✗ {selection} fails without any fault", flush=True)
                return 1
            print(f"· {selection} passes in {time.monotonic() - began:.1f} s", flush=True)
        for fault in faults:
            began = time.monotonic()
            try:
                with copy.with_fault(fault):
                    code, words = copy.test(fault.noticed_by)
            except ValueError as moved_on:
                print(f"✗ {moved_on}", flush=True)
                survivors += 1
                continue
            by = noticed(code, words)
            survivors += by is None
            told = f"✓ {fault.name} — {by}" if by else f"✗ {fault.name} — SURVIVED ({fault.file})\n{words[-2000:]}"
            print(f"{told}  {time.monotonic() - began:.1f} s", flush=True)
    print(f"{len(faults) - survivors} of {len(faults)} faults were noticed", flush=True)
    return 1 if survivors or not faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
