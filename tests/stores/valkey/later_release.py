"""A step of the release after this one, whose executions have two more columns, on a database that both use.

It runs with a copy of the library that has these columns (`later_library`), so it calls functions of its own:
`python later_release.py URL NOW STEP` prints these columns of all executions.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

NAMES = [f"{{fp:3}}:0190c0de-0000-7000-8000-00000000000{digit}" for digit in range(6)]
FIRST, SECOND = NAMES[:4], NAMES[4:]  # inserted by the later release, and by this one


def later_library(folder: Path) -> Path:
    """Copy the library to a folder with two more columns of executions; return what PYTHONPATH has to begin with."""
    import flowfabric

    package = Path(flowfabric.__file__).parent
    shutil.copytree(package, folder / "flowfabric", ignore=shutil.ignore_patterns("__pycache__", "static"))
    for name, mark, columns in (
        (
            "model/execution.py",
            "    revision: int = 0  #",
            "    later_text: str | None = None\n    later_at: int | None = None\n",
        ),
        ("stores/valkey/rows/layout.py", """\n    \"\"\",\n    "ff_payload":""", " later_text later_at"),
    ):
        file = folder / "flowfabric" / name
        text = file.read_text()
        assert text.count(mark) == 1, mark
        file.write_text(text.replace(mark, columns + mark))
    return folder


async def take_step(url: str, now: int, step: str) -> None:
    """Insert rows, or change the columns that only this release knows; print them."""
    from msgspec.structs import replace

    from flowfabric.clock import ManualClock
    from flowfabric.model.change import Insert, Patch, Upsert
    from flowfabric.model.execution import Execution
    from flowfabric.stores.valkey.address import parse_url
    from flowfabric.stores.valkey.store import ValkeyStore
    from tests.stores.sample_rows import change, one, payload, queued

    store = ValkeyStore(parse_url(url), ManualClock(now))
    await store.open(migrate=False)
    match step:
        case "insert":
            rows = [queued(name, later_text="new", later_at=7) for name in FIRST]
            await store.commit([change(Insert(row), Insert(payload(row.execution_id))) for row in rows])
        case "patch":
            for name in (FIRST[0], *SECOND):
                await store.commit([change(Patch(Execution, (name,), {"later_text": None, "later_at": 9}))])
            row = await one(store, Execution, FIRST[1])
            await store.commit([change(Upsert(replace(row, later_text="again", later_at=None)))])
    found = [await one(store, Execution, name) for name in NAMES]
    columns = [None if row is None else [row.later_text, row.later_at] for row in found]
    print(json.dumps({"library": store._library.name, "columns": columns}))
    await store.close()


if __name__ == "__main__":
    asyncio.run(take_step(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
