"""Two releases on one database: each calls functions of its own, and keeps what it does not know of a row."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flowfabric.clock import ManualClock
from flowfabric.model.change import Insert, Patch, Upsert
from flowfabric.model.execution import Execution
from flowfabric.rules.execution.lease import CLAIM, RENEWAL
from flowfabric.stores.claims import ClaimRequest, LeaseIds, LeaseRef
from flowfabric.stores.valkey.library import library
from flowfabric.stores.valkey.store import ValkeyStore
from tests.postgres_install import ROOT
from tests.stores.sample_rows import MAIL, change, one, payload, queued
from tests.stores.valkey import later_release
from tests.stores.valkey.later_release import FIRST, NAMES, SECOND, later_library
from tests.stores.valkey.test_fast_paths import completed
from tests.stores.valkey.test_functions import functions_on


class LaterRelease:
    """The next release, which takes each step in a process of its own."""

    def __init__(self, store: ValkeyStore, clock: ManualClock, folder: Path) -> None:
        hosts, database = store.client.address.hosts, store.client.address.database
        self.library = ""
        self._url = f"valkey://{hosts[0][0]}:{hosts[0][1]}/{database}"
        self._clock = clock
        self._environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(later_library(folder)), str(ROOT)))}

    async def take(self, step: str) -> list[Any]:
        """Take a step; return what the columns hold that only this release knows."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, later_release.__file__, self._url, str(self._clock.now), step),
            env=self._environ,
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await process.communicate()
        assert process.returncode == 0
        found = json.loads(printed)
        self.library = found["library"]
        columns: list[Any] = found["columns"]
        return columns


@pytest.mark.slow
async def test_two_releases_write_one_row_in_turn_and_neither_loses_what_the_other_wrote(
    vk: ValkeyStore, clock: ManualClock, tmp_path: Path
) -> None:
    later = LaterRelease(vk, clock, tmp_path / "later")
    assert await later.take("insert") == [["new", 7]] * 4 + [None] * 2
    assert later.library != library().name
    assert {later.library, library().name} <= await functions_on(vk)

    await vk.commit([change(Insert(queued(name)), Insert(payload(name))) for name in SECOND])
    ids = tuple(LeaseIds(f"lease-{n:030}", f"attempt-{n:030}", 1000 + n) for n in range(6))
    claimed = (await vk.claim_rows(ClaimRequest((MAIL,), ids, "w", "i", 1000, CLAIM))).rows
    assert sorted(row.execution_id for row, _ in claimed) == NAMES
    assert await later.take("patch") == [[None, 9], ["again", None], ["new", 7], ["new", 7], [None, 9], [None, 9]]

    rows = {name: await one(vk, Execution, name) for name in NAMES}
    leases = [LeaseRef(name, 0, row.attempt_id, row.lease_id, row.lease_epoch, 2000) for name, row in rows.items()]
    assert None not in await vk.renew(leases, RENEWAL)
    await vk.commit([change(Patch(Execution, (FIRST[0],), {"tags": "patched"}))])
    await vk.commit([change(Upsert(replace(rows[FIRST[1]], tags="replaced")))])
    ends = [completed(await one(vk, Execution, name)) for name in (*FIRST[2:], *SECOND)]
    assert None not in await vk.commit(ends)

    assert await later.take("look") == [[None, 9], ["again", None], ["new", 7], ["new", 7], [None, 9], [None, 9]]
    assert [(await one(vk, Execution, name)).tags for name in FIRST[:2]] == ["patched", "replaced"]
