"""Uploads as octets: the body is one field, and the other fields are in a header."""

from __future__ import annotations

import json
import os
from typing import Any

import httpx2
import pytest

from tests.server.api_client import ApiClient, new_execution_id, path

BLOB = bytes(range(256))


async def upload(api: ApiClient, url: str, blob: bytes, kind: str = "application/octet-stream", **fields: Any) -> Any:
    headers = {"content-type": kind, "x-ff-fields": json.dumps(fields)}
    return await api("POST", url, content=blob, headers=headers)


def creation(execution_id: str, **given: Any) -> dict[str, Any]:
    return {"execution_id": execution_id, "namespace": "ns", "lane_id": "L", "execution_kind": "t"} | given


async def test_an_execution_is_created_with_its_input_as_the_body(api: ApiClient) -> None:
    execution_id = new_execution_id()
    answer = await upload(api, "/v1/executions", BLOB, "Application/Octet-Stream; x=y", **creation(execution_id))

    assert (answer.status_code, answer.json()["Created"]["execution_id"]) == (201, execution_id)
    assert (await api.engine.read_execution_context(execution_id)).input_payload == BLOB


async def test_an_upload_above_its_limit_is_refused(api: ApiClient) -> None:
    whole = os.urandom(1_048_576)
    assert (await upload(api, "/v1/executions", whole, **creation(new_execution_id()))).status_code == 201
    assert (await upload(api, "/v1/executions", whole + b"!", **creation(new_execution_id()))).status_code == 413


async def test_a_result_a_step_and_a_message_can_be_uploaded_as_octets(api: ApiClient) -> None:
    await api.create()
    claims = await api.post("/v1/workers/w/claims", {"worker_instance_id": "i", "lanes": ["L"]})
    [work] = claims.json()["claimed"]
    url = path(work["execution_id"])

    assert (await upload(api, f"{url}/messages", BLOB, mailbox="m")).status_code == 200
    step = await upload(api, "/v1/leases/steps", BLOB, handle=work["handle"], name="s", occurrence=0)
    assert step.status_code == 200
    assert (await upload(api, "/v1/leases/complete", BLOB, handle=work["handle"], encoding="raw")).status_code == 200

    [kept] = await api.engine.read_steps(work["execution_id"])
    assert kept.result == BLOB
    assert (await api.get(f"{url}/result")).content == BLOB


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        (b"{", 400, "invalid JSON: Bad Request"),
        (b"\xff", 400, "invalid JSON: Bad Request"),
        (b"[]", 422, "invalid JSON: Unprocessable Entity"),
        (b"{}", 422, "invalid JSON: Unprocessable Entity"),
        (b'{"namespace": "ns", "lane_id": 7, "execution_kind": "t"}', 422, "invalid JSON: Unprocessable Entity"),
        (b'{"namespace": "ns", "lane_id": "L", "execution_kind": "t", "input_payload": [1]}', 422, "invalid JSON: "),
        (b'{"namespace": "ns", "lane_id": "L", "execution_kind": "t", "input_payload_b64": "YQ=="}', 422, "invalid"),
    ],
)
async def test_invalid_fields_of_an_upload_are_refused_and_create_nothing(
    api: ApiClient, fields: bytes, status: int, words: str
) -> None:
    headers = httpx2.Headers([(b"content-type", b"application/octet-stream"), (b"x-ff-fields", fields)])
    transport = httpx2.ASGITransport(app=api.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://ff") as client:
        answer = await client.post("/v1/executions", content=b"x", headers=headers)

    assert (answer.status_code, answer.json()["error"][: len(words)]) == (status, words)
    assert (await api.engine.search_executions()).executions == []


async def test_a_route_without_an_octets_field_refuses_an_upload(api: ApiClient) -> None:
    answer = await upload(api, "/v1/flows", b"x", flow_id="550e8400-e29b-41d4-a716-446655440000")
    assert answer.status_code == 415
