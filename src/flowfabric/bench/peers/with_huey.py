"""huey on SQLite with fsync: `with_huey.py submit FILE JOBS`, then `with_huey.py work FILE`.

Two worker processes, as its documentation advises for two cores; results are kept.
"""

from __future__ import annotations

import sys

from huey import SqliteHuey
from starts import body, note

app = SqliteHuey("bench", filename=sys.argv[2], fsync=True)


@app.task(name="noop")  # type: ignore[untyped-decorator]
def noop(job: dict[str, object]) -> dict[str, bool]:
    """Do nothing."""
    note()
    return {"ok": True}


if __name__ == "__main__":
    if sys.argv[1] == "submit":
        job = body()
        for _ in range(int(sys.argv[3])):
            noop(job)
    else:
        app.create_consumer(
            workers=2, worker_type="process", initial_delay=0.01, max_delay=0.1, backoff=1.1, periodic=False
        ).run()
