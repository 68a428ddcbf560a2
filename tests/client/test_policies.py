"""A policy is accepted or refused through a server as on a store, as JSON text and as an object."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from tests.executions import create_request


@pytest.mark.parametrize("policy", ["", "{}", '{"max_replay_count": 1}', {"max_replay_count": 1}])
async def test_a_policy_may_be_json_text_or_an_object(caller: Engine, policy: Any) -> None:
    request = create_request(caller.new_execution_id(), policy=policy)

    created = await caller.create(request)

    assert created.execution_id == request.execution_id


@pytest.mark.parametrize(
    ("policy", "detail"),
    [("{", "malformed"), ("\ud800", "malformed"), ("[]", "not_object"), ("null", "not_object"), ("5", "not_object")],
)
async def test_an_invalid_policy_is_refused_with_the_same_error(caller: Engine, policy: str, detail: str) -> None:
    with pytest.raises(errors.InvalidPolicyJson) as caught:
        await caller.create(create_request(caller.new_execution_id(), policy=policy))

    assert caught.value.detail == detail
