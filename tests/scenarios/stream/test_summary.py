"""SS-057 to SS-061: the summary document, and progress."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.handles import Handle
from flowfabric.model.answers.execution import Claimed
from flowfabric.rules.stream.append import Appended
from tests.scenarios.env import LEASE_MS, Env
from tests.scenarios.waits import Waits


async def patch(env: Env, claim: Claimed, payload: bytes) -> Appended:
    return await env.engine.append_frame(claim.handle, payload, mode="summary")


async def document(env: Env, claim: Claimed) -> Any:
    found = await env.engine.read_summary(claim.execution_id, 0)
    assert found is not None
    return msgspec.json.decode(found.document_json)


@pytest.mark.spec("SS-057")
async def test_an_empty_object_in_a_patch_merges(env: Env) -> None:
    claim = await env.create_and_claim()
    assert await env.engine.read_summary(claim.execution_id, 0) is None

    assert (await patch(env, claim, b'{"a":{"k":1}}')).summary_version == 1
    env.clock.advance_ms(7)
    assert (await patch(env, claim, b'{"a":{}}')).summary_version == 2
    found = await env.engine.read_summary(claim.execution_id, 0)
    assert found is not None
    assert (found.document_json, found.version, found.patch_kind) == ('{"a":{"k":1}}', 2, "json-merge-patch")
    assert (found.first_applied_ms, found.last_updated_ms) == (env.now - 7, env.now)

    await patch(env, claim, b'{"a":5}')
    await patch(env, claim, b'{"a":{}}')
    assert await document(env, claim) == {"a": {}}
    page = await env.engine.read_stream(claim.execution_id, 0)
    assert [frame.fields["summary_version"] for frame in page.frames] == ["1", "2", "3", "4"]
    assert {frame.fields["mode"] for frame in page.frames} == {"summary"}


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"{}" + b"}" * levels


@pytest.mark.spec("SS-058")
@pytest.mark.parametrize(
    ("payload", "detail"),
    [
        (b"not json", "patch payload is not valid JSON"),
        (b'{"a":NaN}', "patch payload is not valid JSON"),
        (b'{"a":"\xff"}', "patch payload is not valid JSON"),
        (b"", "patch payload is not valid JSON"),
        (b"[1]", "patch must be a JSON object"),
        (b"5", "patch must be a JSON object"),
        (b"null", "patch must be a JSON object"),
        (b"[]", "patch must be a JSON object"),
        (b"[" * 30_000 + b"]" * 30_000, "patch must be a JSON object"),
        (nested(17), "patch_depth_exceeded"),
        (nested(9_000), "patch_depth_exceeded"),
        (b'{"a":' + b"[" * 17 + b"]" * 17 + b"}", "patch_depth_exceeded"),
    ],
)
async def test_invalid_patches_are_refused(env: Env, payload: bytes, detail: str) -> None:
    claim = await env.create_and_claim()
    await patch(env, claim, b'{"n":1}')

    async with env.refused(errors.InvalidInput, detail):
        await patch(env, claim, payload)

    after = await patch(env, claim, nested(16))
    assert (after.frame_count, after.summary_version) == (2, 2)


@pytest.mark.spec("SS-059")
async def test_a_summary_keeps_large_numbers_exactly(env: Env) -> None:
    claim = await env.create_and_claim()

    await patch(env, claim, b'{"n":9007199254740993,"huge":123456789012345678901234567890,"f":1.10,"e":1e400}')

    found = await env.engine.read_summary(claim.execution_id, 0)
    assert found is not None
    assert found.document_json == '{"n":9007199254740993,"huge":123456789012345678901234567890,"f":1.10,"e":1E+400}'


async def test_a_null_deletes_a_key_and_the_null_sentinel_stores_null(env: Env) -> None:
    claim = await env.create_and_claim()
    await patch(env, claim, b'{"a":1,"b":{"c":2,"d":3},"l":[1,2]}')

    await patch(env, claim, b'{"a":null,"b":{"c":null},"l":["__ff_null__",{"x":"__ff_null__"}],"z":"__ff_null__"}')

    assert await document(env, claim) == {"b": {"d": 3}, "l": [None, {"x": None}], "z": None}
    for _ in range(70):
        await patch(env, claim, b"{}")
    await env.engine.complete(claim.handle)
    found = await env.engine.read_summary(claim.execution_id, 0)
    assert found is not None
    assert found.version == 72
    assert len((await env.engine.read_stream(claim.execution_id, 0)).frames) == 64


@pytest.mark.spec("SS-060")
async def test_progress_overwrites_only_the_given_fields(env: Env) -> None:
    claim = await env.create_and_claim()
    before = (await env.dump())["events"]
    seen = []
    for pct, message in ((10, "a"), (20, None), (None, "b"), (None, "")):
        await env.engine.progress(claim.handle, pct=pct, message=message)
        core = await env.core(claim.execution_id)
        seen.append((core["progress_pct"], core["progress_message"]))

    assert seen == [(10, "a"), (20, "a"), (20, "b"), (20, "b")]
    assert (await env.engine.read_stream(claim.execution_id, 0)).frames == []
    assert (await env.dump())["events"] == before


@pytest.mark.spec("SS-061")
async def test_progress_requires_a_live_current_lease(env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()
    fields = claim.handle.fields
    stale = Handle.mint(claim.handle.backend, claim.handle.kind, msgspec.structs.replace(fields, lease_epoch=2))
    async with env.refused(errors.StaleLease):
        await env.engine.progress(stale, pct=1)
    async with env.refused(errors.InvalidInput):
        await env.engine.progress(claim.handle, pct=101)
    waiting, _ = await waits.create_suspended()
    async with env.refused(errors.ExecutionNotActive):
        await env.engine.progress(waiting.handle, pct=1)
    env.clock.advance_ms(LEASE_MS)
    async with env.refused(errors.LeaseExpired):
        await env.engine.progress(claim.handle, pct=1)
    assert (await env.vector(claim.execution_id)).startswith("active/leased/")
