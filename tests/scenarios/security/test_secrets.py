"""Tokens and secrets never appear in logs, reprs or errors, nor sealed secrets in the store."""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
from typing import Any, get_type_hints

import msgspec
import pytest

import flowfabric
from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.engine.runtime.secret_box import SEALED_PREFIX, SecretBox
from flowfabric.model.condition import Single
from flowfabric.rules.security.keystore import KeyRotated
from flowfabric.sdk.approvals import ApprovalLink
from flowfabric.settings import Secret, Settings
from flowfabric.stores.port import Store
from tests.scenarios.checked_store import dump
from tests.scenarios.env import Env
from tests.scenarios.waits import BUFFERED, SATISFIED, Waits, named, partition, printed_form

A, B = "00112233445566778899aabbccddeeff" * 2, "b0" * 32
KEY = "correct horse battery staple"
DIGEST = re.compile(r"[0-9a-f]{64}")


async def test_no_token_or_secret_is_printed_or_logged(
    env: Env, waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    engine, outputs = env.engine, list[Any]()
    claim, e = await env.create_claimed()
    pending = await engine.create_waitpoint(claim.handle, "kp", 60_000)
    outputs += [pending, await waits.send(e, "noise", pending)]
    outputs.append(await waits.suspend_on_pending(claim, pending, named("go", key="kp"), idempotency_key="K"))
    outputs += [await engine.list_pending_waitpoints(e), await engine.describe_waitpoint(e, pending.waitpoint_id)]
    outputs.append(await engine.read_waitpoint_token(partition(e), pending.waitpoint_id))
    good = pending.token.reveal()
    for token in (good[:-1], good + "0", good.upper()):
        args = waits.signal_args(e, "go", pending.waitpoint_id, token)
        with pytest.raises(errors.InvalidToken) as refusal:
            await engine.deliver_signal(args)
        outputs += [refusal.value, args]
    outputs += [await engine.rotate_waitpoint_hmac_secret_all("k2", B, 1000), await engine.list_waitpoint_hmac_kids()]
    outputs.append(await engine.rotate_waitpoint_hmac_secret_all("k2", A, 1000))
    outputs += [await engine.seed_waitpoint_hmac_secret("k2", A), engine.settings, engine.capabilities()]
    with pytest.raises(errors.InvalidSecretHex) as bad_secret:
        await engine.rotate_waitpoint_hmac_secret_all("k3", A + "zz", 1000)
    outputs.append(bad_secret.value)
    outputs.append(await waits.send(e, "go", pending))
    outputs += [await engine.lease_history(e), await waits.signal_events(), await env.core(e)]

    printed = "\n".join([*(printed_form(one) for one in outputs), caplog.text])

    for secret in (A, B, good.partition(":")[2]):
        assert secret not in printed
    assert DIGEST.search(printed) is None


async def test_no_token_is_stored(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", 60_000)
    await waits.suspend_on_pending(claim, pending, Single("kp"), idempotency_key="K")
    await waits.send(claim.execution_id, "other", pending, idempotency_key="i", source="\u00fc")

    digest = pending.token.reveal().partition(":")[2]
    kept = {name: rows for name, rows in (await env.dump()).items() if digest in repr(rows)}

    assert kept == {}


def structs(base: type[msgspec.Struct] = msgspec.Struct) -> set[type[msgspec.Struct]]:
    """Return every record type of the project."""
    below = {one for cls in base.__subclasses__() for one in (cls, *structs(cls))}
    return {one for one in below if one.__module__.startswith("flowfabric.")}


def test_no_record_with_a_token_or_a_secret_prints_it() -> None:
    for module in pkgutil.walk_packages(flowfabric.__path__, "flowfabric."):
        if not module.name.endswith("__main__") and ".peers" not in module.name:
            importlib.import_module(module.name)
    secretive = {"token", "waitpoint_token", "secret_hex", "new_secret_hex", "_text"}
    carriers = {
        cls
        for cls in structs()
        if any(get_type_hints(cls)[name] in (str, str | None) for name in secretive.intersection(cls.__struct_fields__))
    }

    assert {"SigningKey", "DeliverSignalRequest", "RotateWaitpointSecretRequest", "ApiTokenCreated"} <= {
        cls.__name__ for cls in carriers
    }
    assert [cls for cls in carriers if cls.__repr__ is msgspec.Struct.__repr__] == []


def test_an_approval_link_hides_its_token_in_its_repr() -> None:
    link = ApprovalLink.for_waitpoint("http://ff", "{fp:86}:e", "w", "k1:" + "a" * 64)

    assert f"{link} {link!s}".count("a" * 64) == 2
    assert "a" * 64 not in f"{link!r} {[link]}"
    assert repr(link) == "<Link http://ff/v1/waitpoints/%7Bfp:86%7D:e/w>"


async def sealed_engine(store: Store, key: str | None) -> Engine:
    return Engine(store, settings=Settings(secret_key=None if key is None else Secret(key)))


async def test_a_configured_key_seals_stored_secrets(store: Store, clock: ManualClock) -> None:
    engine = await sealed_engine(store, KEY)
    await engine.seed_waitpoint_hmac_secret("k1", A)

    [row] = (await dump(store))["ff_waitpoint_hmac"]

    assert row.secret_hex.startswith(SEALED_PREFIX)
    assert A not in repr(await dump(store))
    env = Env(engine, clock)
    waits = Waits(env)
    claim, p = await waits.create_suspended()
    assert await waits.effect(claim.execution_id, "go", p) == SATISFIED
    assert KEY not in printed_form(engine.settings)


async def test_sealed_secrets_cannot_be_used_without_their_key(store: Store, clock: ManualClock) -> None:
    sealed = await sealed_engine(store, KEY)
    await sealed.seed_waitpoint_hmac_secret("k1", A)
    env = Env(sealed, clock)
    waits = Waits(env)
    claim, p = await waits.create_suspended()
    for key in (None, "another"):
        blind = await sealed_engine(store, key)
        lost = Waits(Env(blind, clock))
        with pytest.raises(errors.Corruption, match="invalid_secret"):
            await lost.send(claim.execution_id, "go", p)
        with pytest.raises(errors.Corruption, match="invalid_secret"):
            await lost.create_suspended()
        [conflict] = await blind.rotate_waitpoint_hmac_secret_all("k1", B, 1000)
        assert isinstance(conflict.result, errors.RotationConflict)

    assert await waits.effect(claim.execution_id, "go", p) == SATISFIED


async def test_a_rotation_without_the_key_keeps_sealed_secrets(store: Store, clock: ManualClock) -> None:
    sealed = await sealed_engine(store, KEY)
    await sealed.seed_waitpoint_hmac_secret("k1", A)
    env = Env(sealed, clock)
    claim = await env.create_and_claim()
    pending = await sealed.create_waitpoint(claim.handle, "kp", 60_000)
    blind = await sealed_engine(store, None)

    [entry] = await blind.rotate_waitpoint_hmac_secret_all("k2", B, 60_000)

    assert entry.result == KeyRotated("k1", "k2", 0)
    assert await Waits(env).effect(claim.execution_id, "go", pending) == BUFFERED


async def test_plain_secrets_are_sealed_by_the_next_write(store: Store, clock: ManualClock) -> None:
    plainly = await sealed_engine(store, None)
    await plainly.seed_waitpoint_hmac_secret("k1", A)
    env = Env(plainly, clock)
    waits = Waits(env)
    claim, p = await waits.create_suspended()

    engine = await sealed_engine(store, KEY)
    await engine.rotate_waitpoint_hmac_secret_all("k2", B, 60_000)

    rows = (await dump(store))["ff_waitpoint_hmac"]
    assert all(row.secret_hex.startswith(SEALED_PREFIX) for row in rows)
    assert await Waits(Env(engine, clock)).effect(claim.execution_id, "go", p) == SATISFIED


def test_a_sealed_secret_belongs_to_its_kid() -> None:
    vault = SecretBox(Secret(KEY))
    kept = vault.seal(A, "k1")

    assert vault.open(kept, "k1") == A
    assert vault.open(kept, "k2") == vault.open(kept[:-4] + "AAAA", "k1") == vault.open(SEALED_PREFIX + "!", "k1")
    assert vault.open(kept, "k2") != A
    assert vault.seal(A, "k1") != kept
    assert SecretBox(None).seal(A, "k1") == A


def test_a_secret_hides_itself_in_its_repr() -> None:
    secret = Secret(KEY)

    assert KEY not in f"{secret!r} {secret} {Settings(secret_key=secret)!r}"
    assert secret.reveal() == KEY


async def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_SECRET_KEY", KEY)

    async with await open_engine("memory://") as engine:
        await engine.seed_waitpoint_hmac_secret("k1", A)
        [row] = (await dump(engine.store))["ff_waitpoint_hmac"]

    assert row.secret_hex.startswith(SEALED_PREFIX)
