"""Pages whose code runs: what is printed there is what a reader gets.

Python blocks that begin with `# NAME.py` are files. In `console` blocks a line after `$ ` is a command, and the lines
below it are what it prints, where `…` stands for anything. All commands of a page run in one shell, in order. Comments
of the form `<!-- sh: … -->` are commands that readers do not need, as waiting is for those who type.

Other Python blocks, and comments of the form `<!-- run … -->`, run one after the other as one module, in one loop.
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
    """A piece of a page that runs."""

    kind: str  # python, console, sh or run
    code: str
    line: int

    @property
    def file(self) -> str | None:
        """The file that it is, if it is one."""
        named = _FILE.match(self.code) if self.kind == "python" else None
        return named[1] if named else None


class Command(msgspec.Struct, frozen=True):
    """A command of a page, and what it prints according to the page; None when the page does not say."""

    words: str
    prints: str | None = None


def blocks(page: Path) -> list[Block]:
    """What runs of a page, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        kind = match["language"] or match["hidden"].strip(":")
        if kind in ("python", "console", "sh", "run"):
            code = match["code"] or match["words"]
            found.append(Block(kind, code, text.count("\n", 0, match.start()) + 2))
    return found


def commands(found: list[Block]) -> list[Command]:
    """The session that a page tells of: files are commands, too."""
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
    """The session for a shell; a line of its own follows what each command printed."""
    return "\n".join(f"{command.words}\necho '{MARK}'" for command in session)


def matches(expected: str, printed: str) -> bool:
    """Whether something was printed as the page says; spaces are not counted."""

    def squeezed(text: str) -> str:
        return "\n".join(" ".join(line.split()) for line in text.strip().splitlines() if line.split())

    pattern = re.escape(squeezed(expected)).replace("…", ".*").replace("\\ .*\\ ", ".*").replace("\\ .*", ".*")
    return re.fullmatch(pattern.replace(".*\\ ", ".*"), squeezed(printed), re.DOTALL) is not None


async def run_module(page: Path, found: list[Block], module: ModuleType) -> int:
    """Run the Python of a page as one module; how many blocks there were."""
    ran = 0
    for block in found:
        if block.kind not in ("python", "run") or block.file:
            continue
        code = "\n" * (block.line - 1) + block.code
        compiled = compile(code, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        made = eval(compiled, module.__dict__)
        if inspect.isawaitable(made):
            await made
        ran += 1
    return ran
