"""Generates the diagram of public states: every operation is tried in every state that can be reached.

    python -m tests.docs.states      writes it into docs/concepts.md

Each path starts with a new execution on a store in memory; an operation that is refused is no transition. Two states
are equal if all seven dimensions are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from flowfabric import Engine, FabricError, Handle
from flowfabric.clock import ManualClock
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.engine.types import ByName, Single
from flowfabric.ids import FlowId, SeededMinter, mint_for_flow
from flowfabric.settings import Settings, Sweeps
from flowfabric.stores.memory.store import MemoryStore
from tests.executions import create_request, suspend_args
from tests.postgres_install import ROOT

PAGE = ROOT / "docs" / "concepts.md"
BEGIN, END = "<!-- states:begin -->\n", "<!-- states:end -->\n"
MAX_DEPTH = 6
TTL_MS = 1000
HOUR_MS = 3_600_000
ONE_RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}}
NEVER_MS: dict[str, Any] = {name: 0 for name in Sweeps.__struct_fields__ if name.endswith("_ms")}
NO_SWEEPS = Settings(sweeps=Sweeps(**NEVER_MS))

Operation = Callable[["Life"], Awaitable[Any]]


class Life:
    """One execution."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.engine = Engine(self.store, minter=SeededMinter(1), settings=NO_SWEEPS)
        self.id = ""
        self.upstream = ""
        self.handle: Handle | None = None

    async def begin(self) -> None:
        await self.store.open(migrate=True)
        await self.engine.ensure_signing_key("00" * 32)

    @property
    def held(self) -> Handle:
        if self.handle is None:
            raise FabricError("it has no lease")
        return self.handle

    async def vector(self) -> tuple[str, ...]:
        found = await self.engine.read_state_vector(self.id)
        assert found is not None
        return tuple(getattr(found, name) for name in found.__struct_fields__)


async def _create(life: Life, **options: Any) -> None:
    life.id = life.engine.new_execution_id()
    await life.engine.create_execution(execution_id=life.id, policy=ONE_RETRY, **options)


async def submit(life: Life) -> None:
    await _create(life, execution_deadline_at=life.clock() + HOUR_MS)


async def submit_with_delay(life: Life) -> None:
    await _create(life, delay_until=life.clock() + 500)


async def submit_in_a_flow(life: Life) -> None:
    engine, flow = life.engine, FlowId(life.engine.minter.uuid())
    life.upstream, life.id = (mint_for_flow(flow, engine.partitions, engine.minter) for _ in range(2))
    nodes = [create_request(one, lane) for one, lane in ((life.upstream, "upstream"), (life.id, "default"))]
    await engine.create_flow_graph(flow, nodes, [GraphEdge(life.upstream, life.id)])


async def claim(life: Life) -> None:
    claimed = await life.engine.claim("default", worker_id="w", worker_instance_id="w-1", lease_ttl_ms=TTL_MS)
    if claimed is None:
        raise FabricError("nothing to claim")
    life.handle = claimed.handle


async def suspend(life: Life) -> None:
    now, condition = life.clock(), Single("go", ByName("go"))
    await life.engine.suspend(life.held, suspend_args(now, condition, key="go", timeout_at=now + HOUR_MS))


async def signal(life: Life) -> None:
    page = await life.engine.list_pending_waitpoints(life.id)
    if not page.entries:
        raise FabricError("it waits for nothing")
    await life.engine.deliver_approval_signal(
        life.id,
        lane_id="default",
        waitpoint_id=page.entries[0].waitpoint_id,
        signal_name="go",
        idempotency_suffix="1",
        signal_dedup_ttl_ms=1000,
    )


async def promote(life: Life) -> None:
    life.clock.advance_ms(500)
    await life.engine.promote_delayed(life.id)


async def expire(life: Life) -> None:
    life.clock.advance_ms(HOUR_MS)
    await life.engine.sweep_once("execution_deadline")


async def time_out(life: Life) -> None:
    life.clock.advance_ms(HOUR_MS)
    await life.engine.expire_suspension(life.id)


async def take_over(life: Life) -> None:
    held = life.held
    if (await life.vector())[-1] != "active":
        raise FabricError("it is not active")
    life.clock.advance_ms(TTL_MS)
    claimed = await life.engine.claim("default", worker_id="w", worker_instance_id="w-2", lease_ttl_ms=TTL_MS)
    if claimed is None or claimed.handle.fields.lease_epoch <= held.fields.lease_epoch:
        raise FabricError("nothing to take over")
    life.handle = claimed.handle


async def _end_upstream(life: Life, *, success: bool) -> None:
    if not life.upstream:
        raise FabricError("it depends on nothing")
    claimed = await life.engine.claim("upstream", worker_id="w", worker_instance_id="w-3")
    if claimed is None:
        raise FabricError("it has ended")
    await (life.engine.complete(claimed.handle) if success else life.engine.fail(claimed.handle, reason="failed"))
    await life.engine.dispatcher.wait_idle()


SUBMITS: dict[str, Operation] = {
    "submit": submit,
    "submit with a delay": submit_with_delay,
    "submit as part of a flow": submit_in_a_flow,
}
# The names are those of the transitions in the diagram.
OPERATIONS: dict[str, Operation] = {
    "claim": claim,
    "complete": lambda life: life.engine.complete(life.held),
    "fail": lambda life: life.engine.fail(life.held, reason="failed"),
    "delay": lambda life: life.engine.delay_for(life.held, 500),
    "suspend": suspend,
    "signal": signal,
    "cancel": lambda life: life.engine.cancel_execution(life.id, reason="cancelled"),
    "replay": lambda life: life.engine.replay_execution(life.id),
    "a limit is reached": lambda life: life.engine.block_execution_for_admission(life.id, reason="waiting_for_quota"),
    "there is room": lambda life: life.engine.unblock_execution(life.id),
    "its time has come": promote,
    "its deadline passes": expire,
    "no signal in time": time_out,
    "its worker dies and another claims": take_over,
    "what it depends on succeeds": lambda life: _end_upstream(life, success=True),
    "what it depends on fails": lambda life: _end_upstream(life, success=False),
}


async def _run_path(path: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Run a path of operations; return the states before and after the last one, None if one was refused."""
    life = Life()
    await life.begin()
    try:
        await SUBMITS[path[0]](life)
        for name in path[1:-1]:
            await OPERATIONS[name](life)
        before = await life.vector()
        if path[1:]:
            await OPERATIONS[path[-1]](life)
        return before, await life.vector()
    except FabricError:
        return None
    finally:
        await life.engine.close()


async def transitions() -> list[tuple[str, str, list[str]]]:
    """Return the transitions: public state before, public state after, and the operations."""
    found: dict[tuple[str, str], list[str]] = {}
    known: set[tuple[str, ...]] = set()
    paths: list[tuple[str, ...]] = [(submit,) for submit in SUBMITS]
    while paths:
        path, *paths = paths
        played = await _run_path(path)
        if played is None:
            continue
        before, after = played[0][-1] if len(path) > 1 else "[*]", played[1][-1]
        operations = found.setdefault((before, after), [])
        moved = played[0] != played[1] or path[-1] == "its worker dies and another claims"
        if (len(path) == 1 or moved) and path[-1] not in operations:
            operations.append(path[-1])
        state = (*played[1], path[0])
        if state not in known and len(path) < MAX_DEPTH:
            known.add(state)
            paths += [(*path, name) for name in OPERATIONS]
    return [(before, after, operations) for (before, after), operations in found.items() if operations]


async def diagram() -> str:
    """Return the diagram in Mermaid syntax."""
    lines = [
        f"    {before} --> {after}: {', '.join(operations)}"
        for before, after, operations in sorted(await transitions(), key=_order)
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```", ""])


def _order(arrow: tuple[str, str, list[str]]) -> tuple[bool, str, str]:
    return arrow[0] != "[*]", arrow[0], arrow[1]


def stored_diagram() -> str:
    """Return the diagram in the page."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    """Write the diagram into its page."""
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{asyncio.run(diagram())}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
