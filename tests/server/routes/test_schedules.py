"""Schedules over HTTP: one is put in place, looked at, paused, triggered, made up for and deleted."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from flowfabric.model.scheduling.schedule import Schedule
from flowfabric.stores.queries import Scan
from tests.server.api_client import ApiClient, why_refused

HOUR_MS = 3_600_000
URL, OF_NS = "/v1/schedules/nightly", {"namespace": "ns"}
RUN = {"namespace": "ns", "lane_id": "L", "execution_kind": "report", "input_payload_b64": "e30="}
HOURLY: dict[str, Any] = {"cron": "0 * * * *", "tz": "Europe/Berlin"}


async def put(api: ApiClient, spec: dict[str, Any], *, url: str = URL, **fields: Any) -> Any:
    return await api.put(url, {"spec": spec, "run": RUN} | fields)


async def rows(api: ApiClient) -> list[Schedule]:
    found: list[Schedule] = await api.engine.store.scan(Scan(Schedule, (), ("name",), limit=10))
    return found


async def test_a_schedule_is_put_in_place_described_and_listed(api: ApiClient) -> None:
    assert (await put(api, HOURLY)).json() == {"outcome": "created"}
    assert (await put(api, HOURLY)).json() == {"outcome": "unchanged"}
    assert (await put(api, HOURLY | {"jitter_ms": 1000})).json() == {"outcome": "changed"}
    exists = await put(api, HOURLY, only_new=True)
    assert (exists.status_code, "another definition; delete it first" in exists.text) == (409, True)

    described = (await api.get(URL, params=OF_NS)).json()
    assert described["status"]["spec"] == HOURLY | {"jitter_ms": 1000}
    assert (described["status"]["task"], len(described["next_instants"]), described["runs"]) == ("report", 10, [])
    [listed] = (await api.get("/v1/schedules", params=OF_NS)).json()["schedules"]
    assert listed == described["status"]
    assert (await api.get("/v1/schedules", params={"namespace": "other"})).json()["schedules"] == []


async def test_a_schedule_is_paused_resumed_triggered_made_up_for_and_deleted(api: ApiClient) -> None:
    await put(api, HOURLY)
    note = {"note": "a migration"}
    paused = [(await api.post(f"{URL}/pause", note, params=OF_NS)).json()["changed"] for _ in range(2)]
    assert (await api.get(URL, params=OF_NS)).json()["status"]["note"] == "a migration"
    resumed = [(await api.post(f"{URL}/resume", params=OF_NS)).json()["changed"] for _ in range(2)]
    assert paused == resumed == [True, False]

    trigger = {"trigger_id": str(uuid.uuid4())}
    first, again = [await api.post(f"{URL}/trigger", trigger, params=OF_NS) for _ in range(2)]
    assert (first.status_code, again.status_code) == (201, 200)
    run = first.json()["Created"]["execution_id"]
    assert again.json() == {"Duplicate": {"execution_id": run}}
    assert await api.state(run) == "waiting"

    end = await api.engine.ping()
    times = {"start": end - 3 * HOUR_MS, "end": end, "overlap": "allow"}
    made = [(await api.post(f"{URL}/backfill", times, params=OF_NS)).json() for _ in range(2)]
    assert [(one["created"], one["known"]) for one in made] == [(3, 0), (0, 3)]
    assert [(await api("DELETE", URL, params=OF_NS)).json()["changed"] for _ in range(2)] == [True, False]
    assert (await api.get(URL, params=OF_NS)).status_code == 404


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"cron": "61 * * * *"}, 'write it like "30 2 * * mon-fri"'),
        ({"cron": "* * * * * *"}, "it needs five"),
        ({"cron": "0 0 30 2 *"}, "bad day-of-month"),
        ({"cron": "@daily", "tz": "Mars/Base"}, "write one like Europe/Berlin"),
        ({"cron": "@daily", "every_ms": 5000}, "it has cron and every"),
        ({}, "give one of cron=, every= and at="),
        ({"every_ms": 10}, "every: "),
        ({"every_ms": 5000, "offset_ms": 7000}, "offset: "),
        ({"cron": "@daily", "jitter_ms": -1}, "jitter: "),
        ({"cron": "@daily", "catch_up_ms": 1}, 'write "10s" or more'),
        ({"cron": "@daily", "overlap": "often"}, "spec.overlap: invalid enum value 'often'"),
        ({"calendar": {"day": 31, "month": 2}}, "names no day that exists"),
        ({"calendar": {"weekdays": "mon-fry"}}, 'write "mon-fri,sun"'),
        ({"crom": "@daily"}, "spec: object contains unknown field `crom`"),
    ],
)
async def test_a_spec_that_cannot_be_used_is_refused_and_changes_nothing(
    api: ApiClient, spec: dict[str, Any], why: str
) -> None:
    await put(api, HOURLY)
    before = await rows(api)

    for url in (URL, "/v1/schedules/new"):
        refused = await put(api, spec, url=url)
        assert refused.status_code in (400, 422), refused.text
        assert why in why_refused(refused)

    assert await rows(api) == before


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ({"start": 0, "end": 4000 * HOUR_MS, "overlap": "allow"}, "more than 1000 instants; choose a shorter time"),
        ({"start": 0, "end": 200 * HOUR_MS}, 'choose a shorter time, or pass overlap="allow"'),
        ({"start": HOUR_MS, "end": HOUR_MS}, "start is not before end"),
        ({"start": 0, "end": 2**47}, "end lies in the future"),
        ({"start": -1, "end": HOUR_MS}, "start: expected `int` >= 0"),
        ({"start": 0, "end": HOUR_MS, "overlap": "often"}, "overlap: invalid enum value"),
    ],
)
async def test_a_backfill_that_cannot_be_is_refused_and_changes_nothing(
    api: ApiClient, times: dict[str, Any], why: str
) -> None:
    await put(api, HOURLY)
    before = await rows(api)

    refused = await api.post(f"{URL}/backfill", times, params=OF_NS)

    assert refused.status_code in (400, 422), refused.text
    assert why in why_refused(refused)
    assert await rows(api) == before


async def test_an_unknown_schedule_is_not_found(api: ApiClient) -> None:
    for verb, body in (("pause", {}), ("resume", None), ("trigger", {}), ("backfill", {"start": 0, "end": 1})):
        missing = await api.post(f"{URL}/{verb}", body, params=OF_NS)
        assert (missing.status_code, "schedule" in missing.json()["error"]) == (404, True)
