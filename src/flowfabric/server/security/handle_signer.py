"""Signing keys of the server: seeds the first one, and signs and verifies handles with a cached keystore.

The keystore is loaded again after `KEY_CACHE_S`, and once more if a handle matches none of the cached keys, because
another server may have rotated them. Requests share that second load, and it happens at most once in
`MIN_RELOAD_INTERVAL_S`, however many forged handles arrive.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from time import monotonic

from flowfabric import errors
from flowfabric.api.encoding import HANDLE_NOT_OURS, handle_from_text, handle_to_text
from flowfabric.engine.engine import Engine
from flowfabric.engine.types import HandleKeys, is_signed_handle, sign_handle
from flowfabric.handles import Handle
from flowfabric.server import logging
from flowfabric.server.settings import ServerSettings

KEY_CACHE_S = 5.0
MIN_RELOAD_INTERVAL_S = 0.5


async def seed_signing_key(engine: Engine, settings: ServerSettings) -> None:
    """Ensure that a signing key exists: the configured secret, or else a random one."""
    configured = settings.waitpoint_secret
    answer = await engine.ensure_signing_key(configured.reveal() if configured else secrets.token_hex(32))
    if configured is not None and getattr(answer, "same_secret", True) is False:
        logging.logger.warning("the stored signing secret differs from the configured one; the stored one is used")


class HandleSigner:
    """Turns handles into the text that clients get, and that text back into handles."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._keys: HandleKeys | None = None
        self._loaded_at = 0.0  # start of the load: it contains everything written before
        self._loading = asyncio.Lock()

    async def prepare(self) -> bytes:
        """Return the key that signs, and seed an empty keystore.

        Call it before work is claimed: a lease whose handle cannot be signed would be lost until it expires.
        """
        keys = await self._load_keys(monotonic() - KEY_CACHE_S)
        if keys.signing is None:
            # This changes nothing if there is a key that cannot be read.
            await seed_signing_key(self._engine, self._settings)
            keys = await self._load_keys(monotonic())
        if keys.signing is None:
            raise errors.Corruption("invalid_secret")
        return keys.signing

    async def sign(self, handle: Handle) -> str:
        """Return the signed text of a handle.

        If the store is unavailable, the last known key signs, because the work is already claimed.
        """
        try:
            key = await self.prepare()
        except errors.StoreUnavailable:
            if self._keys is None or self._keys.signing is None:
                raise
            key = self._keys.signing
        return handle_to_text(handle, sign_handle(key, handle))

    async def verify(self, text: str) -> Handle:
        """Return the handle of a text that a server of this store signed; `Corruption` for any other."""
        [answer] = await self.verify_all([text])
        if isinstance(answer, errors.FabricError):
            raise answer
        return answer

    async def verify_all(self, texts: Sequence[str]) -> list[Handle | errors.FabricError]:
        """Verify many texts; return a handle or an error for each, in order."""
        began = monotonic()
        answers: list[Handle | errors.FabricError] = [_parse(text) for text in texts]
        unverified = [index for index, parsed in enumerate(answers) if isinstance(parsed, Handle)]
        for newer_than in (began - KEY_CACHE_S, began):
            if not unverified:
                break
            keys, now = await self._load_keys(newer_than), self._engine.estimate.now()
            unverified = [
                index
                for index in unverified
                if isinstance(parsed := answers[index], Handle) and not is_signed_handle(keys, parsed, now)
            ]
        for index in unverified:
            answers[index] = errors.Corruption(HANDLE_NOT_OURS)
        return answers

    def clear_cache(self) -> None:
        """Read the keystore again before the next use."""
        self._keys = None

    async def _load_keys(self, newer_than: float) -> HandleKeys:
        """Return keys whose load began after an instant."""
        # Before the lock: a caller that accepts the cached keys never waits for a reload.
        if self._keys is not None and self._loaded_at > newer_than:
            return self._keys
        async with self._loading:
            if self._keys is None or self._loaded_at <= newer_than:
                if self._keys is not None:
                    await asyncio.sleep(self._loaded_at + MIN_RELOAD_INTERVAL_S - monotonic())
                began = monotonic()
                self._keys = await self._engine.signing_keys.handle_keys()
                self._loaded_at = began
            return self._keys


def _parse(text: str) -> Handle | errors.FabricError:
    try:
        return handle_from_text(text)
    except errors.FabricError as refused:
        return refused
