"""Operations answer invalid arguments with typed errors and write nothing."""

from __future__ import annotations

from collections.abc import Awaitable
from enum import IntEnum, StrEnum
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.handles import Handle, HandleKind, encode_handle
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Claimed, ClaimGrant, Created, Renewed
from flowfabric.model.states import PublicState
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.validation import MAX_PAYLOAD_BYTES
from flowfabric.stores.port import Store
from tests.engine.invalid_arguments import OPERATIONS, Placeholder, creation, handles
from tests.executions import claim_one, create_request, new_execution
from tests.scenarios.checked_store import dump

FRESH = "{fp:86}:99999999-9999-4999-8999-999999999999"


class World:
    """An engine with one claimed and one eligible execution."""

    def __init__(self, engine: Engine, held: Claimed, waiting: str) -> None:
        self.engine = engine
        self.held = held
        self.waiting = waiting
        ask = create_request(waiting)
        self._stands: dict[Placeholder, Any] = {
            Placeholder.HELD: held.execution_id,
            Placeholder.WAITING: waiting,
            Placeholder.HANDLE: held.handle,
            Placeholder.GRANT: ClaimGrant(waiting, "{fp:86}", "key", 1, "default"),
            Placeholder.ASK: ask,
            Placeholder.ASKS: [ask],
            Placeholder.NO_HANDLES: handles(held, engine.store.tag),
        }

    def resolve(self, value: Any) -> Any:
        """Return the value that a placeholder stands for; return any other value as it is."""
        return self._stands[value] if isinstance(value, Placeholder) else value

    async def call(self, verb: str, /, **changed: Any) -> Any:
        """Call the operation with its valid arguments, some of them replaced."""
        good = {name: self.resolve(value) for name, value in OPERATIONS[verb].good.items()}
        return await getattr(self.engine, verb)(**(good | changed))


@pytest.fixture
async def world(store: Store) -> World:
    engine = Engine(store, minter=SeededMinter(1))
    await engine.seed_waitpoint_hmac_secret("k1", "00112233445566778899aabbccddeeff" * 2)
    await engine.create_execution(execution_id=engine.new_execution_id())
    held = await claim_one(engine, worker_id="wa", worker_instance_id="wa-1", lease_ttl_ms=30_000)
    waiting = await new_execution(engine)
    return World(engine, held, waiting)


@pytest.mark.parametrize("verb", OPERATIONS)
async def test_every_invalid_argument_is_refused_by_name_and_nothing_is_written(world: World, verb: str) -> None:
    for argument, values in OPERATIONS[verb].bad.items():
        before = await dump(world.engine.store)
        for value in world.resolve(values):
            with pytest.raises(errors.FabricError) as caught:
                await world.call(verb, **{argument: value})
            assert caught.value.family == "validation", f"{argument}={value!r} gave {caught.value!r}"
            assert caught.value.detail or type(caught.value) is not errors.InvalidInput, "say what is wrong"
        assert await dump(world.engine.store) == before, f"{verb} wrote something for a wrong {argument}"


async def refusal(call: Awaitable[Any]) -> errors.FabricError | None:
    """Return the typed error that a call raised, if any; propagate any other error."""
    try:
        await call
    except errors.FabricError as refused:
        return refused
    return None


GARBAGE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.binary(max_size=200)
    | st.text(st.characters(), max_size=50)
    | st.text(st.characters(categories=["Cs", "Cc", "Zs", "Lo"]), max_size=10)
    | st.sampled_from(["default", "{fp:86}:11111111-1111-4111-8111-111111111111", "waiting", "operator_override"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = [(verb, argument) for verb in OPERATIONS for argument in {**OPERATIONS[verb].good, **OPERATIONS[verb].bad}]


def examples(count: int) -> settings:
    """Return settings for so many examples that share a store."""
    shared = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=count, deadline=None, suppress_health_check=shared)


async def assert_answered_or_refused(world: World, verb: str, argument: str, value: Any) -> None:
    """Assert that a call is answered or refused with a typed error; an invalid argument writes nothing."""
    if argument == "max_wait_ms" and isinstance(value, int):
        value = min(value, 0)  # A long wait is allowed.
    before = await dump(world.engine.store)

    refused = await refusal(world.call(verb, **{argument: value}))

    if refused is not None:
        assert refused.family not in ("bug", "transport")
        if refused.family == "validation" and refused.kind != "capability_mismatch":  # The rows record that one.
            assert await dump(world.engine.store) == before


@examples(100)
@given(where=st.sampled_from(ARGUMENTS), value=GARBAGE)
async def test_random_values_are_answered_or_refused_with_a_typed_error(
    world: World, where: tuple[str, str], value: Any
) -> None:
    await assert_answered_or_refused(world, *where, value)


@pytest.mark.soak
@pytest.mark.timeout(0)
@examples(5000)
@given(where=st.sampled_from(ARGUMENTS), value=GARBAGE)
async def test_very_many_random_values_are_answered_or_refused_with_a_typed_error(
    world: World, where: tuple[str, str], value: Any
) -> None:
    await assert_answered_or_refused(world, *where, value)


CHANGES = {
    "place": st.integers(0, 500),
    "byte": st.integers(0, 255),
    "verb": st.sampled_from(["renew", "progress", "complete"]),
}


async def assert_refused_or_valid(world: World, place: int, byte: int, verb: str) -> None:
    """Assert that a handle with one changed byte is refused, which writes nothing, or still valid."""
    data = bytearray(encode_handle(world.held.handle.fields, world.engine.store.tag))
    data[place % len(data)] = byte
    before = await dump(world.engine.store)

    refused = await refusal(world.call(verb, handle=Handle(world.engine.store.tag, HandleKind.FRESH, bytes(data))))

    if refused is not None:
        assert refused.family in ("validation", "not_found", "state", "contention")
        assert await dump(world.engine.store) == before


@examples(100)
@given(**CHANGES)
async def test_a_handle_with_a_changed_byte_is_refused_or_still_valid(
    world: World, place: int, byte: int, verb: str
) -> None:
    await assert_refused_or_valid(world, place, byte, verb)


@pytest.mark.soak
@pytest.mark.timeout(0)
@examples(5000)
@given(**CHANGES)
async def test_very_many_handles_with_a_changed_byte_are_refused_or_still_valid(
    world: World, place: int, byte: int, verb: str
) -> None:
    await assert_refused_or_valid(world, place, byte, verb)


async def test_a_renewal_by_handle_for_no_time_or_too_long_is_refused(world: World) -> None:
    fields = world.held.handle.fields
    for ttl in (0, 2**62, 2**64 - 1):
        data = encode_handle(msgspec.structs.replace(fields, lease_ttl_ms=ttl), world.engine.store.tag)
        before = await dump(world.engine.store)
        with pytest.raises(errors.InvalidInput):
            await world.engine.renew(Handle(world.engine.store.tag, HandleKind.FRESH, data))
        assert await dump(world.engine.store) == before


async def test_payloads_above_the_size_limit_are_refused(world: World) -> None:
    endless = bytes(MAX_PAYLOAD_BYTES + 1)
    before = await dump(world.engine.store)

    with pytest.raises(errors.PayloadTooLarge):
        await world.engine.create_execution(execution_id=FRESH, input_payload=endless)
    with pytest.raises(errors.PayloadTooLarge):
        await world.engine.complete(world.held.handle, result=endless)

    assert await dump(world.engine.store) == before


async def test_each_answer_of_a_bulk_create_is_independent(world: World) -> None:
    def ask(number: int, **fields: Any) -> CreateExecution:
        e = f"{{fp:86}}:{number:08d}-1111-4111-8111-111111111111"
        known: dict[str, Any] = {
            "execution_id": e,
            "partition": 86,
            "namespace": "n",
            "lane_id": "default",
            "execution_kind": "task",
        }
        return CreateExecution(**(known | fields))

    wrong = [(name, value) for name, values in creation.items() for value in values]
    asks: list[Any] = [ask(number, **{name: value}) for number, (name, value) in enumerate(wrong)]
    good = [ask(90_000_000 + number) for number in range(3)]
    asks = [good[0], *asks[: len(asks) // 2], good[1], None, 5, *asks[len(asks) // 2 :], good[2]]

    answers = await world.engine.create_executions(asks)

    created = [answer for answer in answers if isinstance(answer, Created)]
    assert created == [Created(one.execution_id, PublicState.WAITING) for one in good]
    refused = [answer for answer in answers if isinstance(answer, errors.FabricError)]
    assert len(refused) == len(wrong) + 2
    assert {one.family for one in refused} == {"validation"}
    assert len((await dump(world.engine.store))["ff_exec_core"]) == 2 + len(good)


async def test_each_answer_of_renew_many_is_independent(world: World) -> None:
    bad = handles(world.held, world.engine.store.tag)

    *refused, renewed = await world.engine.renew_many([*bad, world.held.handle])

    assert isinstance(renewed, Renewed)
    assert {one.family for one in refused if isinstance(one, errors.FabricError)} == {"validation"}
    assert len(refused) == len(bad)


class Word(StrEnum):
    TIMEOUT = "timeout"
    TAG = "app.kind"


class Number(IntEnum):
    SEVEN = 7


async def test_enum_members_are_stored_as_their_text_or_number(world: World) -> None:
    engine = world.engine
    await engine.create_execution(
        execution_id=FRESH, priority=Number.SEVEN, namespace=Word.TIMEOUT, tags={Word.TAG: Word.TIMEOUT}
    )
    await engine.progress(world.held.handle, pct=Number.SEVEN, message=Word.TIMEOUT)
    await engine.fail(world.held.handle, reason=Word.TIMEOUT, category=Word.TIMEOUT)

    kept = await engine.read_exec_core_fields(86, FRESH, ["priority", "namespace"])
    assert {name: (type(value), value) for name, value in kept.items()} == {
        "priority": (int, 7),
        "namespace": (str, "timeout"),
    }
    assert await engine.get_execution_tag(FRESH, "app.kind") == "timeout"
    [attempt] = await engine.attempt_history(world.held.execution_id)
    assert (attempt.failure_reason, attempt.failure_category) == ("timeout", "timeout")


class Text(str):
    """A subclass of str, as enum members and strings of some libraries are."""


class Count(int):
    """A subclass of int."""


@pytest.mark.parametrize("verb", OPERATIONS)
async def test_subclasses_of_str_and_int_never_reach_a_store(world: World, verb: str) -> None:
    given: dict[str, Any] = {}
    for name, value in OPERATIONS[verb].good.items():
        real = world.resolve(value)
        given[name] = Text(real) if type(real) is str else Count(real) if type(real) is int else real

    refused = await refusal(world.call(verb, **given))

    plain = await refusal(world.call(verb))
    assert refused is None or plain is None or type(refused) is type(plain)


async def test_a_lane_may_be_an_enum_member(world: World) -> None:
    engine = world.engine
    await engine.create_execution(execution_id=FRESH, lane_id=Word.TIMEOUT)

    claimed = await claim_one(engine, Word.TIMEOUT, worker_id=Word.TAG, worker_instance_id=Word.TAG)
    assert claimed.execution_id == FRESH
    assert (await engine.list_lanes()).lanes == ["default", "timeout"]


@pytest.mark.parametrize("number", [10**5000, -(10**5000)], ids=["many digits", "many digits below zero"])
async def test_a_number_with_too_many_digits_to_print_is_refused_like_any_other(world: World, number: int) -> None:
    before = await dump(world.engine.store)
    for call in (
        world.call("create_execution", priority=number),
        world.call("change_priority", new_priority=number),
        world.call("delay_for", length_ms=number),
        world.call("list_executions", partition=number),
        world.call("create_execution", policy={"max_replay_count": number}),
        world.call("rotate_waitpoint_hmac_secret_all", grace_ms=number),
    ):
        refused = await refusal(call)
        assert refused is not None
        assert refused.family == "validation"
    assert await dump(world.engine.store) == before


async def test_ids_of_a_fence_may_be_in_upper_case(world: World) -> None:
    held = world.held
    fence = Fence(held.lease_id.upper(), held.lease_epoch, held.attempt_id.upper())

    renewed = await world.engine.renew(
        execution_id=held.execution_id, attempt_index=0, fence=fence, lease_ttl_ms=30_000
    )

    assert renewed.lease_epoch == 1
