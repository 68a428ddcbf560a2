"""Runs the code of documentation pages.

Python blocks that begin with `# NAME.py` are files. In `console` blocks a line that begins with `$ ` is a command, and
the lines below it are its output, where `…` matches anything. All commands of a page run in one shell, in order.
Comments of the form `<!-- sh: … -->` are commands that a reader does not need, such as waiting for a process.

Other Python blocks, and comments of the form `<!-- run … -->`, run in order as one module, in one event loop.

Blocks marked `py` are code of other systems, which is shown and not executed.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType

import msgspec

_BLOCK = re.compile(
    r"^```(?P<language>\w+)\n(?P<code>.*?)^```$|^<!-- (?P<hidden>sh:|run)(?P<words>.*?)-->$", re.DOTALL | re.MULTILINE
)
_FILE = re.compile(r"# ([\w/]+\.py)\n")
MARK = "--8<--"


class Block(msgspec.Struct, frozen=True):
    """A block of a page that is executed."""

    kind: str  # python, console, sh or run
    code: str
    line: int

    @property
    def file(self) -> str | None:
        """The name of the file that the block contains, or None."""
        named = _FILE.match(self.code) if self.kind == "python" else None
        return named[1] if named else None


class Command(msgspec.Struct, frozen=True):
    """A command of a page and its expected output; None if the page shows no output."""

    words: str
    prints: str | None = None


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page that are executed, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        kind = match["language"] or match["hidden"].strip(":")
        if kind in ("python", "console", "sh", "run"):
            code = match["code"] or match["words"]
            found.append(Block(kind, code, text.count("\n", 0, match.start()) + 2))
    return found


def commands(found: list[Block]) -> list[Command]:
    """Return the commands of a page; a file is written by a command, too."""
    session: list[Command] = []
    for block in found:
        if block.kind == "sh":
            session.append(Command(block.code.strip()))
        elif block.file:
            session.append(Command(f"cat > {block.file} <<'{MARK}'\n{block.code}{MARK}", ""))
        elif block.kind == "console":
            for part in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
                words, _, prints = part.partition("\n")
                session.append(Command(words, prints))
    return session


def script(session: list[Command]) -> str:
    """Return the commands as a shell script that prints a mark after the output of each command."""
    return "\n".join(f"{command.words}\necho '{MARK}'" for command in session)


def matches(expected: str, printed: str) -> bool:
    """True if the output matches the page; white space is ignored."""

    def squeezed(text: str) -> str:
        return "\n".join(" ".join(line.split()) for line in text.strip().splitlines() if line.split())

    pattern = re.escape(squeezed(expected)).replace("…", ".*").replace("\\ .*\\ ", ".*").replace("\\ .*", ".*")
    return re.fullmatch(pattern.replace(".*\\ ", ".*"), squeezed(printed), re.DOTALL) is not None


async def run_module(page: Path, found: list[Block], module: ModuleType) -> int:
    """Run the Python blocks of a page as one module; return their number."""
    ran = 0
    for block in found:
        if block.kind not in ("python", "run") or block.file:
            continue
        code = "\n" * (block.line - 1) + block.code
        compiled = compile(code, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(compiled, module.__dict__)
        if inspect.isawaitable(result):
            await result
        ran += 1
    return ran
