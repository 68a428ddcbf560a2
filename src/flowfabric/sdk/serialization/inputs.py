"""Inputs: what a run was given, with the results of others where it refers to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.errors import IdInOtherNamespace, InvalidInput
from flowfabric.sdk.exceptions import Fatal
from flowfabric.sdk.serialization.values import json_bytes

if TYPE_CHECKING:
    from flowfabric.engine_api import EngineAPI
    from flowfabric.model.execution import Payload

JSON_ENCODING = "json"
JSON_WITH_RESULTS_ENCODING = "json+results"
BUDGET_IDS_KEY = "sdk_budgets"  # in the stored policy: the ids of a run's budgets by name


class InputWithResults(msgspec.Struct, frozen=True):
    """An input some of whose parameters are the results of other runs."""

    input: dict[str, Any]
    results: dict[str, str | list[str]]  # parameter -> run, or runs

    def to_json(self) -> bytes:
        """On its way into the store."""
        return json_bytes({"input": self.input, "results": self.results})


def inline_input(payload: Payload | None) -> bytes:
    """The parameters as a JSON object, if they stand in the payload as they are; else nothing."""
    if payload is None or payload.payload_encoding == JSON_WITH_RESULTS_ENCODING:
        return b""
    return payload.input_payload or b""


async def resolve_input(engine: EngineAPI, payload: Payload | None, namespace: str) -> bytes:
    """The parameters as a JSON object; a run without a result counts as null, one that is gone as a failure.

    The ids of the runs are derived. One that belongs to another namespace is not the run that was meant.
    """
    if payload is None:
        return b""
    given = payload.input_payload or b""
    if payload.payload_encoding != JSON_WITH_RESULTS_ENCODING:
        return given
    try:
        referring = msgspec.json.decode(given, type=InputWithResults)
    except msgspec.DecodeError as fault:
        raise InvalidInput(f"input: {fault}") from fault
    named = [run for runs in referring.results.values() for run in ([runs] if isinstance(runs, str) else runs)]
    try:
        found = await engine.read_results(tuple(dict.fromkeys(named)), namespace=namespace)
    except IdInOtherNamespace as foreign:
        raise Fatal(f"input: {foreign}") from foreign
    if without := [run for run, result in found.items() if result is None]:
        there = await engine.read_kinds(without)
        if gone := [run for run in without if run not in there]:
            raise Fatal(f"input: the result of {', '.join(gone)} was removed when its retention was over")

    def result(run: str) -> msgspec.Raw:
        return msgspec.Raw(found[run] or b"null")

    results = {
        name: result(runs) if isinstance(runs, str) else [result(run) for run in runs]
        for name, runs in referring.results.items()
    }
    return json_bytes({**referring.input, **results})


def budget_ids_by_name(payload: Payload | None) -> dict[str, str]:
    """The ids of the budgets that were found for a run when it was submitted, by name."""
    if payload is None or payload.policy is None:
        return {}
    named: dict[str, str] = msgspec.json.decode(payload.policy).get(BUDGET_IDS_KEY, {})
    return named
