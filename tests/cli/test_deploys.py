"""`ff explain`, `release`, `unpin`, `patches` and `doctor` for runs whose code changes under way."""

from __future__ import annotations

import re

import pytest

from flowfabric import Engine
from flowfabric.engine.types import GateArgs
from flowfabric.handles import Handle
from flowfabric.model.gate import GateKind
from tests.cli.terminal import Terminal
from tests.executions import claim_one

WHY = "step 'charge_card' would run for the first time although 'charge' ran before: was it renamed or moved?"
HOLD = GateArgs(
    name="hold:charge_card#0.0", kind=GateKind.MAILBOX, mailbox="ff.hold", task="order", version="2", note=WHY
)


@pytest.fixture
def ff(ff_or_server: Terminal) -> Terminal:
    return ff_or_server


async def claimed(engine: Engine, *capabilities: str) -> Handle:
    """Claim the next execution."""
    claim = await claim_one(engine, capabilities=capabilities, lease_ttl_ms=60_000)
    return claim.handle


def test_a_held_execution_is_explained_counted_and_released(ff: Terminal) -> None:
    async def hold(engine: Engine) -> None:
        await engine.open_gates_and_park(await claimed(engine), (HOLD,))

    execution = ff.submit()
    assert ff.stdout("release", execution) == f"{execution} is not held\n"
    ff.engine(hold)

    found = ff.document("explain", execution)
    assert (found["obstacle"], found["facts"]["why"], found["facts"]["version"]) == ("Held", WHY, "2")
    output = ff.stdout("explain", execution)
    assert "by version 2" in output
    assert f"  → ff release {execution} --accept   takes the new way, once\n" in output
    assert f"  → ff cancel {execution}\n" in output
    sick = ff.run("doctor", "--json")
    assert sick.exit_code == 1
    assert "1 execution held because the code of the task has changed: 1 of order" in sick.stdout

    assert ff.document("release", execution, "--accept") == {"execution_id": execution, "released": True}
    assert ff.document("doctor")["healthy"]


def test_a_pinned_execution_is_explained_listed_and_unpinned(ff: Terminal) -> None:
    async def pin(engine: Engine) -> None:
        handle = await claimed(engine)
        await engine.pin_version(handle, "1")
        await engine.record_patch(handle, "fraud-check", is_new=False)
        await engine.delay(handle, delay_until=await engine.ping() + 1)

    async def is_ready(engine: Engine) -> bool:
        await engine.sweep_once("delayed_promoter")
        return (await engine.describe_execution(execution)).public_state.value == "waiting"  # type: ignore[union-attr]

    assert ff.stdout("patches") == "No execution goes the old way of a patch, and none is pinned.\n"
    execution = ff.submit()
    ff.engine(pin)
    while not ff.engine(is_ready):
        pass

    assert ff.document("patches") == {"patches": {"fraud-check": 1}, "pinned": {"1": 1}}
    assert re.search(r"fraud-check +1", ff.stdout("patches"))
    assert ff.document("explain", execution)["obstacle"] == "Pinned"
    assert f"  → ff unpin {execution}   lets workers" in ff.stdout("explain", execution)
    assert ff.stdout("unpin", execution, "--to", "2") == f"✓ {execution} is pinned to 2\n"
    assert ff.stdout("unpin", execution, "--to", "2") == f"{execution} is not pinned to another version\n"
    unpinned = {"execution_id": execution, "unpinned": True, "version": None}
    assert ff.document("unpin", execution) == unpinned
    assert ff.stdout("unpin", execution) == f"{execution} is not pinned\n"
    assert ff.document("patches")["pinned"] == {}
