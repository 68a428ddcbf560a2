"""A fault: a piece of text in one file, what it becomes, and the tests that have to notice."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SOURCE = Path("src/flowfabric")


class Fault(NamedTuple):
    """One slip: in `file`, the text `old` (which stands there once) becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    noticed_by: str

    def applied(self, text: str) -> str:
        """The file with the fault in it; an error when the text has moved on."""
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: its text stands {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)
