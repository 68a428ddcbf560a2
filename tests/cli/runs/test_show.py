"""`ff show`: input, and the operations of a durable function in their order."""

from __future__ import annotations

import json
import re

import pytest

from flowfabric import Engine
from flowfabric.engine.types import GateArgs
from flowfabric.model.gate import GateKind, StepState
from flowfabric.sdk.serialization.failures import encode_failure
from tests.cli.terminal import Terminal
from tests.executions import claim_one


@pytest.fixture
def ff(ff_or_server: Terminal) -> Terminal:
    return ff_or_server


def test_show_prints_input_and_operations_in_their_order(ff: Terminal) -> None:
    execution = ff.submit("--payload", '{"card": "4242"}')

    async def work(engine: Engine) -> None:
        claimed = await claim_one(engine)
        handle = claimed.handle
        tries = json.dumps({"count": 3, "of": 5, "next_at": 1_700_000_000_000, "last": "503"}).encode()
        await engine.record_step(handle, "zip", 0, b'"zipped"', number=1)
        await engine.record_step(handle, "charge", 0, tries, state=StepState.TRIES, number=2)
        await engine.record_step(handle, "ask", 0, tries, state=StepState.TRIES, number=3)
        failure = encode_failure(ValueError("no"))
        await engine.record_step(handle, "charge", 0, failure, state=StepState.FAILED, number=4)
        await engine.open_gate(handle, GateArgs(name="sleep#0", kind=GateKind.TIMER, expires_in_ms=60_000, number=5))
        await engine.record_step(handle, "add", 1, b"3", number=6)

    ff.engine(work)

    found = ff.document("show", execution)
    assert found["input"] == {"bytes": 16, "text": '{"card": "4242"}'}
    assert [(one["kind"], one["name"], one["state"]) for one in found["timeline"]] == [
        ("step", "zip", "done"),
        ("step", "ask", "tries"),
        ("step", "charge", "failed"),
        ("sleep", "sleep#0", "open"),
        ("step", "add #1", "done"),
    ]
    shown = ff.stdout("show", execution)
    assert '{"card": "4242"}' in shown
    assert re.search(r"step +ask +tries +try 3 of 5, next at 2023-11-14 22:13:20.000Z, last: 503", shown)
    assert re.search(r"step +charge +failed +ValueError: no", shown)
    assert re.search(r"sleep +sleep#0 +open +time to pass, until 20", shown)
    assert shown.index("zip") < shown.index("charge") < shown.index("sleep#0") < shown.index("add #1")


def test_show_prints_no_table_of_operations_for_a_plain_task(ff: Terminal) -> None:
    execution = ff.submit()

    assert "Operations" not in ff.stdout("show", execution)
    assert ff.document("show", execution)["timeline"] == []


def test_a_run_is_found_by_task_and_key_and_shows_its_key_and_life(ff: Terminal) -> None:
    execution = ff.submit("--kind", "cart", "--key", "cart|cart-7")
    assert ff.stdout("find", "cart", "cart-7").strip() == execution
    assert ff.document("find", "cart", "cart-7") == {"execution_id": execution}
    assert "cart has no run under 'cart-8'" in ff.refuses("find", "cart", "cart-8")

    async def go_on(engine: Engine) -> None:
        claimed = await claim_one(engine)
        await engine.continue_as_new(claimed.handle, b"[2]")

    ff.engine(go_on)
    shown = ff.stdout("show", execution)
    assert re.search(r"key +cart-7", shown)
    assert re.search(r"life +1, since it continued as new", shown)
