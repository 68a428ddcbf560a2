"""dramatiq on Valkey or Redis: `with_dramatiq.py submit URL JOBS`, then `with_dramatiq.py work URL`.

Two processes of eight threads, which is its best on two cores; results are kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from starts import body, note

URL_VARIABLE = "FF_BENCH_BROKER"  # for the processes that its command starts
PROCESSES, THREADS = 2, 8

url = os.environ.setdefault(URL_VARIABLE, sys.argv[2] if __name__ == "__main__" else "")
broker = RedisBroker(url=url)
broker.add_middleware(Results(backend=RedisBackend(url=url), store_results=True))
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name="noop")  # type: ignore[untyped-decorator]
def noop(job: dict[str, object]) -> dict[str, bool]:
    """Do nothing."""
    note()
    return {"ok": True}


if __name__ == "__main__":
    if sys.argv[1] == "submit":
        job = body()
        for _ in range(int(sys.argv[3])):
            noop.send(job)
    else:
        here = Path(__file__)
        program = str(Path(sys.executable).with_name("dramatiq"))
        options = ("--path", str(here.parent), "--processes", str(PROCESSES), "--threads", str(THREADS))
        os.execv(program, [program, here.stem, *options])
