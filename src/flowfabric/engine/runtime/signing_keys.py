"""SigningKeys: loads the keystore and opens its secrets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet, load_many
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.secret_box import UNREADABLE_SECRET, SecretBox
from flowfabric.model.change import Change, Delete, Guard, Upsert
from flowfabric.model.security.signing_key import Keystore, SigningKey
from flowfabric.rules.decision import Decision
from flowfabric.rules.security import keystore
from flowfabric.rules.security.signed_handle import HandleKeys, handle_keys

KEY_CACHE_S = 0.5
A = TypeVar("A")
KEYSTORE = ReadSet()
_ROOT = KEYSTORE.one(Keystore, 0)  # a change of keys guards this row
KEYS = KEYSTORE.many(SigningKey, 0)


class SigningKeys:
    """Loads, caches and unseals the keys that sign tokens and handles."""

    def __init__(self, runtime: Runtime, secret_box: SecretBox) -> None:
        self.runtime = runtime
        self.secret_box = secret_box
        self._cached: tuple[float, list[SigningKey]] | None = None
        self._clock = time.monotonic

    async def require_signing_key(self, op: str) -> SigningKey:
        """Return the key that signs grants; raise if there is none."""
        signer = await self.find_signing_key(op)
        if isinstance(signer, errors.FabricError):
            raise signer
        return signer

    async def find_signing_key(self, op: str) -> SigningKey | errors.FabricError:
        """Return the key that signs grants, or the reason why there is none."""
        return keystore.grant_signer(self.unseal_loaded_keys(await load_many(self.runtime, SigningKey, 0)), op)

    async def handle_keys(self) -> HandleKeys:
        """Return the current keys with which a server signs and checks handles."""
        return handle_keys(self.unseal_loaded_keys(await load_many(self.runtime, SigningKey, 0)))

    def cached_keys(self) -> list[SigningKey] | None:
        """Return the keystore's rows if they were loaded a moment ago: good enough to sign with, not to verify.

        A key that was retired within that moment still verifies for its grace period.
        """
        cached = self._cached
        return cached[1] if cached is not None and self._clock() - cached[0] < KEY_CACHE_S else None

    def unseal_loaded_keys(self, rows: list[Any]) -> tuple[SigningKey, ...]:
        """Cache keys that were just loaded and return them with their secrets opened."""
        self._cached = (self._clock(), rows)
        return self.unseal_keys(rows)

    def unseal_keys(self, rows: list[Any]) -> tuple[SigningKey, ...]:
        """Return keys with their secrets opened."""
        opened = (self.secret_box.open(key.secret_hex, key.kid) for key in rows)
        return tuple(msgspec.structs.replace(key, secret_hex=secret) for key, secret in zip(rows, opened, strict=True))

    async def change(self, rule: Callable[[tuple[SigningKey, ...], int], keystore.KeyDecision[A]]) -> A:
        """Change the keystore as a rule decides on its keys."""
        return await self.runtime.decide_and_commit(
            KEYSTORE, lambda rows, now: self._decided(rows, rule(self.unseal_loaded_keys(KEYS(rows)), now))
        )

    def _decided(self, rows: Rows, decision: keystore.KeyDecision[A]) -> Decision[A]:
        if not decision.put and not decision.drop:
            return Decision(decision.answer)
        self._cached = None
        root = _ROOT(rows)
        current = next((key.kid for key in decision.put if key.current), root.current_kid if root else "")
        sealed = (msgspec.structs.replace(key, secret_hex=self._sealed(key, KEYS(rows))) for key in decision.put)
        change = Change(
            guards=(Guard(Keystore, (0,), None if root is None else root.revision),),
            writes=(
                Upsert(Keystore(0, current)),
                *(Delete(SigningKey, (0, kid)) for kid in decision.drop),
                *(Upsert(key) for key in sealed),
            ),
        )
        return Decision(decision.answer, change)

    def _sealed(self, key: SigningKey, stored: list[SigningKey]) -> str:
        """Return the key's secret as it is stored; one that could not be opened here stays as it is."""
        if key.secret_hex == UNREADABLE_SECRET:
            return next(row.secret_hex for row in stored if row.kid == key.kid)
        return self.secret_box.seal(key.secret_hex, key.kid)
