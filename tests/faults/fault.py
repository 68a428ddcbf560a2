"""A fault: a text in one file, its replacement, and the test that has to detect it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SOURCE = Path("src/flowfabric")


class Fault(NamedTuple):
    """One mistake: in `file`, the text `old`, which occurs once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    detected_by: str

    def applied(self, text: str) -> str:
        """Return the text of the file with the fault; raise ValueError if `old` does not occur exactly once."""
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: its text occurs {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)
