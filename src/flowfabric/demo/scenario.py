"""The play: orders come in, workers work, one dies."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from pathlib import Path
from time import monotonic

import msgspec

from flowfabric import Engine, FabricError, Fence
from flowfabric.connector import open_engine
from flowfabric.demo import release
from flowfabric.demo.checks import DemoState, check_claims
from flowfabric.demo.orders import FAILURE, FLAKY, LANE, LEASE_MS, LONG, ORDERS, RETRIES
from flowfabric.demo.screen import OrderStatus, Screen
from flowfabric.demo.worker_processes import WorkerProcesses

DEADLINE_S = 60.0
POLL_INTERVAL_S = 0.05
KILL_AT = 25  # per cent of the long order


async def run_scenario(screen: Screen) -> int:
    """Play it and judge it; 0 when everything that is claimed was seen to hold."""
    with tempfile.TemporaryDirectory(prefix="ff-demo-") as folder:
        url = f"sqlite:///{folder}/demo.db"
        async with await open_engine(url) as engine:
            with WorkerProcesses(url, Path(folder)) as crew:
                screen.print_event(
                    f"{len(ORDERS)} orders, a flow of {len(release.MEMBERS)}, two workers, SQLite; "
                    f"leases of {LEASE_MS / 1000} s",
                    "bold",
                )
                await engine.ensure_signing_key(secrets.token_hex(32))
                play = DemoState(await submit(engine), await release.submit(engine))
                for name in ("worker-a", "worker-b"):
                    screen.print_event(f"{name} starts as process {crew.start(name)}")
                with screen.live_table():
                    finished = await _watch(engine, crew, play, screen)
                if not finished:
                    screen.print_event(f"not finished after {DEADLINE_S:.0f} s\n{crew.read_logs()}", "red")
                    return 1
            return 0 if await check_claims(engine, play, screen) else 1


async def submit(engine: Engine) -> dict[str, str]:
    """Hand the orders in; the execution of each by its name."""
    ids: dict[str, str] = {}
    for order in ORDERS:
        ids[order.name] = engine.new_execution_id(LANE)
        await engine.create_execution(
            execution_id=ids[order.name],
            lane_id=LANE,
            execution_kind="order",
            input_payload=msgspec.json.encode(order),
            policy=RETRIES,
            tags={"demo.order": order.name},
        )
    return ids


async def _watch(engine: Engine, crew: WorkerProcesses, play: DemoState, screen: Screen) -> bool:
    """Look on until all is done, killing the worker of the long order on the way; False when it takes too long."""
    until = monotonic() + DEADLINE_S
    while monotonic() < until:
        sights = [await _sight(engine, name, execution_id) for name, execution_id in (play.ids | play.flow).items()]
        screen.show(sights)
        if all(sight.state == release.EXPECTED_STATES.get(sight.name, "completed") for sight in sights):
            return True
        if died := crew.exited_workers():
            screen.print_event(f"{', '.join(died)} ended by itself\n{crew.read_logs()}", "red")
            return False
        if not play.retried and any(sight.name == FLAKY.name and sight.state == "delayed" for sight in sights):
            play.retried = True
            screen.print_event(f"{FLAKY.name} failed ({FAILURE}) and will be tried again", "bold yellow")
        long = next(sight for sight in sights if sight.name == LONG.name)
        if not play.killed and long.state == "active" and long.progress >= KILL_AT:
            pid = crew.kill(long.worker)
            play.killed, play.killed_at = long.worker, await engine.ping()
            screen.print_event(
                f"{long.worker} (process {pid}) gets SIGKILL at {long.progress} % of {long.name}", "bold red"
            )
        elif play.killed and not play.late_write and long.attempts > 1:
            screen.print_event(f"{long.worker} takes {long.name} over", "bold green")
            play.late_write = await _late_write(engine, play.ids[LONG.name])
        if any(sight.state == "suspended" for sight in sights) and not play.approval:
            play.approval = await release.approve(engine, play.flow[release.PUBLISH])
            screen.print_event(f"{release.PUBLISH} asks, and gets a yes", "bold green")
        await asyncio.sleep(POLL_INTERVAL_S)
    return False


async def _sight(engine: Engine, name: str, execution_id: str) -> OrderStatus:
    snapshot = await engine.describe_execution(execution_id)
    assert snapshot is not None
    partition = int(execution_id[4 : execution_id.index("}")])
    fields = await engine.read_exec_core_fields(partition, execution_id, ("progress_pct",))
    held = snapshot.current_lease
    return OrderStatus(
        name,
        snapshot.public_state.value,
        snapshot.total_attempt_count,
        held.worker_instance_id if held else "",
        fields.get("progress_pct", 0),
    )


async def _late_write(engine: Engine, execution_id: str) -> str:
    """Complete the order with the lease of the worker that is dead, as if it had only been slow; the answer."""
    first = (await engine.attempt_history(execution_id))[0]
    fence = Fence(first.lease_id, first.lease_epoch, first.attempt_id)
    try:
        await engine.complete(execution_id=execution_id, fence=fence, result=b"too late")
    except FabricError as refused:
        return refused.kind
    return "accepted"
