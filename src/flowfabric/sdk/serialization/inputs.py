"""The stored input of a run, whose parameters may refer to the results of other runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.engine.types import SCHEDULE_KEY
from flowfabric.errors import IdInOtherNamespace, InvalidInput
from flowfabric.sdk.exceptions import Fatal
from flowfabric.sdk.serialization.values import json_bytes

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.handles import Handle
    from flowfabric.model.execution import Payload

JSON_ENCODING = "json"
JSON_WITH_RESULTS_ENCODING = "json+results"
BUDGET_IDS_KEY = "sdk_budgets"  # in the stored policy: the ids of a run's budgets by name


class InputWithResults(msgspec.Struct, frozen=True):
    """An input of which some parameters are the results of other runs."""

    input: dict[str, Any]
    results: dict[str, str | list[str]]  # parameter -> run id, or list of run ids

    def to_json(self) -> bytes:
        """Encode it for the store."""
        return json_bytes({"input": self.input, "results": self.results})


def inline_input(payload: Payload | None) -> bytes:
    """Return the arguments as a JSON object, if they need no results of other runs; else nothing."""
    if payload is None or payload.payload_encoding == JSON_WITH_RESULTS_ENCODING:
        return b""
    return payload.input_payload or b""


async def resolve_input(engine: EngineAPI, payload: Payload | None, namespace: str) -> bytes:
    """Return the arguments as a JSON object, with the results of other runs filled in.

    A run without a result counts as null; one that retention has removed raises `Fatal`. So does a run of another
    namespace: run ids are derived, so it is not the run that was meant.
    """
    if payload is None:
        return b""
    data = payload.input_payload or b""
    if payload.payload_encoding != JSON_WITH_RESULTS_ENCODING:
        return data
    try:
        stored = msgspec.json.decode(data, type=InputWithResults)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"input: {error}") from error
    run_ids = [run for runs in stored.results.values() for run in ([runs] if isinstance(runs, str) else runs)]
    try:
        result_by_run = await engine.read_results(tuple(dict.fromkeys(run_ids)), namespace=namespace)
    except IdInOtherNamespace as error:
        raise Fatal(f"input: {error}") from error
    if missing := [run for run, result in result_by_run.items() if result is None]:
        existing = await engine.read_kinds(missing)
        if removed := [run for run in missing if run not in existing]:
            raise Fatal(f"input: the result of {', '.join(removed)} was removed when its retention was over")

    def result(run: str) -> msgspec.Raw:
        return msgspec.Raw(result_by_run[run] or b"null")

    results = {
        name: result(runs) if isinstance(runs, str) else [result(run) for run in runs]
        for name, runs in stored.results.items()
    }
    return json_bytes({**stored.input, **results})


def schedule_of(payload: Payload | None) -> tuple[str, int] | None:
    """Return the name of the schedule that created a run, and its instant; None if none did."""
    if payload is None or payload.policy is None:
        return None
    found = msgspec.json.decode(payload.policy).get(SCHEDULE_KEY)
    return None if found is None else (found["name"], found["at"])


def budget_ids_by_name(payload: Payload | None) -> dict[str, str]:
    """Return the ids of the budgets that were resolved for a run when it was submitted, by name."""
    if payload is None or payload.policy is None:
        return {}
    budget_ids: dict[str, str] = msgspec.json.decode(payload.policy).get(BUDGET_IDS_KEY, {})
    return budget_ids


async def batch_input(engine: EngineAPI, handle: Handle, payload: Payload | None, parameter: str) -> bytes:
    """Return the arguments of a batch as a JSON object: one list of the inputs that were submitted."""
    inputs = [msgspec.Raw(one.payload or b"null") for one in await engine.read_batch(handle)]
    if not inputs:  # a run that was created without a key, as by a form, has its one input like any other
        stored = msgspec.json.decode((payload and payload.input_payload) or b"{}", type=dict[str, msgspec.Raw])
        inputs = [stored[parameter]] if parameter in stored else []
    return msgspec.json.encode({parameter: inputs})
