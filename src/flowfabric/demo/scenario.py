"""The scenario of the demo: submit orders and a flow, start workers, kill one, and approve the last step."""

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
KILL_AT = 25  # percent of the long order


async def run_scenario(screen: Screen, console_port: int | None = None) -> int:
    """Run the scenario and check its claims; return 0 if all of them hold. With a port, the console follows."""
    with tempfile.TemporaryDirectory(prefix="ff-demo-") as folder:
        url = f"sqlite:///{folder}/demo.db"
        async with await open_engine(url) as engine:
            with WorkerProcesses(url, Path(folder)) as workers:
                screen.print_event(
                    f"{len(ORDERS)} orders, a flow of {len(release.MEMBERS)}, two workers, SQLite; "
                    f"leases of {LEASE_MS / 1000} s",
                    "bold",
                )
                await engine.ensure_signing_key(secrets.token_hex(32))
                demo = DemoState(await submit(engine), await release.submit(engine))
                for name in ("worker-a", "worker-b"):
                    screen.print_event(f"{name} starts as process {workers.start(name)}")
                with screen.live_table():
                    finished = await _watch(engine, workers, demo, screen)
                if not finished:
                    screen.print_event(f"not finished after {DEADLINE_S:.0f} s\n{workers.read_logs()}", "red")
                    return 1
            held = await check_claims(engine, demo, screen)
            if console_port is not None:
                from flowfabric.demo.console import serve_console  # the server is an extra

                await serve_console(engine, screen, console_port)
            return 0 if held else 1


async def submit(engine: Engine) -> dict[str, str]:
    """Submit the orders; return the execution id of each by name."""
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


async def _watch(engine: Engine, workers: WorkerProcesses, demo: DemoState, screen: Screen) -> bool:
    """Watch until everything is done, and kill the worker of the long order meanwhile; False after the deadline."""
    until = monotonic() + DEADLINE_S
    while monotonic() < until:
        statuses = [
            await _order_status(engine, name, execution_id) for name, execution_id in (demo.ids | demo.flow).items()
        ]
        screen.show(statuses)
        if all(status.state == release.EXPECTED_STATES.get(status.name, "completed") for status in statuses):
            return True
        if died := workers.exited_workers():
            screen.print_event(f"{', '.join(died)} exited unexpectedly\n{workers.read_logs()}", "red")
            return False
        if not demo.retried and any(status.name == FLAKY.name and status.state == "delayed" for status in statuses):
            demo.retried = True
            screen.print_event(f"{FLAKY.name} failed ({FAILURE}) and will be retried", "bold yellow")
        long = next(status for status in statuses if status.name == LONG.name)
        if not demo.killed and long.state == "active" and long.progress >= KILL_AT:
            pid = workers.kill(long.worker)
            demo.killed, demo.killed_at = long.worker, await engine.ping()
            screen.print_event(
                f"{long.worker} (process {pid}) gets SIGKILL at {long.progress} % of {long.name}", "bold red"
            )
        elif demo.killed and not demo.late_write and long.attempts > 1:
            screen.print_event(f"{long.worker} takes {long.name} over", "bold green")
            demo.late_write = await _late_write(engine, demo.ids[LONG.name])
        if any(status.state == "suspended" for status in statuses) and not demo.approval:
            demo.approval = await release.approve(engine, demo.flow[release.PUBLISH])
            screen.print_event(f"{release.PUBLISH} asks for approval, and is approved", "bold green")
        await asyncio.sleep(POLL_INTERVAL_S)
    return False


async def _order_status(engine: Engine, name: str, execution_id: str) -> OrderStatus:
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
    """Complete the order with the lease of the dead worker, as if it had only been slow; return the reply."""
    first = (await engine.attempt_history(execution_id))[0]
    fence = Fence(first.lease_id, first.lease_epoch, first.attempt_id)
    try:
        await engine.complete(execution_id=execution_id, fence=fence, result=b"too late")
    except FabricError as error:
        return error.kind
    return "accepted"
