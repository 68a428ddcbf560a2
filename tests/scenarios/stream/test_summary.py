"""SS-057 to SS-061: the summary document, and progress."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.handles import Handle
from flowfabric.model.answers.execution import Claimed
from flowfabric.rules.stream.append import Appended
from tests.scenarios.play import LEASE_MS, Play
from tests.scenarios.waits import Waits


async def patch(play: Play, held: Claimed, payload: bytes) -> Appended:
    return await play.engine.append_frame(held.handle, payload, mode="summary")


async def document(play: Play, held: Claimed) -> Any:
    found = await play.engine.read_summary(held.execution_id, 0)
    assert found is not None
    return msgspec.json.decode(found.document_json)


@pytest.mark.spec("SS-057")
async def test_empty_object_patch_value(play: Play) -> None:
    held = await play.claimed()
    assert await play.engine.read_summary(held.execution_id, 0) is None

    assert (await patch(play, held, b'{"a":{"k":1}}')).summary_version == 1
    play.clock.advance_ms(7)
    assert (await patch(play, held, b'{"a":{}}')).summary_version == 2
    found = await play.engine.read_summary(held.execution_id, 0)
    assert found is not None
    assert (found.document_json, found.version, found.patch_kind) == ('{"a":{"k":1}}', 2, "json-merge-patch")
    assert (found.first_applied_ms, found.last_updated_ms) == (play.now - 7, play.now)

    await patch(play, held, b'{"a":5}')
    await patch(play, held, b'{"a":{}}')
    assert await document(play, held) == {"a": {}}
    page = await play.engine.read_stream(held.execution_id, 0)
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
async def test_rejected_patches(play: Play, payload: bytes, detail: str) -> None:
    held = await play.claimed()
    await patch(play, held, b'{"n":1}')

    async with play.refused(errors.InvalidInput, detail):
        await patch(play, held, payload)

    after = await patch(play, held, nested(16))
    assert (after.frame_count, after.summary_version) == (2, 2)


@pytest.mark.spec("SS-059")
async def test_large_integers(play: Play) -> None:
    held = await play.claimed()

    await patch(play, held, b'{"n":9007199254740993,"huge":123456789012345678901234567890,"f":1.10,"e":1e400}')

    found = await play.engine.read_summary(held.execution_id, 0)
    assert found is not None
    assert found.document_json == '{"n":9007199254740993,"huge":123456789012345678901234567890,"f":1.10,"e":1E+400}'


async def test_a_null_deletes_and_its_stand_in_is_kept_as_null(play: Play) -> None:
    held = await play.claimed()
    await patch(play, held, b'{"a":1,"b":{"c":2,"d":3},"l":[1,2]}')

    await patch(play, held, b'{"a":null,"b":{"c":null},"l":["__ff_null__",{"x":"__ff_null__"}],"z":"__ff_null__"}')

    assert await document(play, held) == {"b": {"d": 3}, "l": [None, {"x": None}], "z": None}
    for _ in range(70):
        await patch(play, held, b"{}")
    await play.engine.complete(held.handle)
    found = await play.engine.read_summary(held.execution_id, 0)
    assert found is not None
    assert found.version == 72
    assert len((await play.engine.read_stream(held.execution_id, 0)).frames) == 64


@pytest.mark.spec("SS-060")
async def test_overwrite_and_keep(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    before = (await play.everything())["events"]
    seen = []
    for pct, message in ((10, "a"), (20, None), (None, "b"), (None, "")):
        await play.engine.progress(held.handle, pct=pct, message=message)
        core = await play.core(e)
        seen.append((core["progress_pct"], core["progress_message"]))

    assert seen == [(10, "a"), (20, "a"), (20, "b"), (20, "b")]
    assert (await play.engine.read_stream(e, 0)).frames == []
    assert (await play.everything())["events"] == before


@pytest.mark.spec("SS-061")
async def test_fencing(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    fields = held.handle.fields
    stale = Handle.mint(held.handle.backend, held.handle.kind, msgspec.structs.replace(fields, lease_epoch=2))
    async with play.refused(errors.StaleLease):
        await play.engine.progress(stale, pct=1)
    async with play.refused(errors.InvalidInput):
        await play.engine.progress(held.handle, pct=101)
    waiting, _ = await waits.suspended()
    async with play.refused(errors.ExecutionNotActive):
        await play.engine.progress(waiting.handle, pct=1)
    play.clock.advance_ms(LEASE_MS)
    async with play.refused(errors.LeaseExpired):
        await play.engine.progress(held.handle, pct=1)
    assert (await play.vector(held.execution_id)).startswith("active/leased/")
