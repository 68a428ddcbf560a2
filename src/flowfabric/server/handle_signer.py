"""The server's signing keys: the first one is seeded here, and handles are signed and checked with a cached keystore.

The keystore is read again after `TRUSTED_S`, and once more when a handle matches none of the cached keys: another
server may have rotated them. Requests that need such a second load share it, and it happens at most once in `RELOAD_S`,
however many forged handles arrive.
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
    """See that there is a signing key: the configured secret, or a random one when there is none at all."""
    configured = settings.waitpoint_secret
    answer = await engine.ensure_signing_key(configured.reveal() if configured else secrets.token_hex(32))
    if configured is not None and getattr(answer, "same_secret", True) is False:
        logging.logger.warning("another signing secret is stored than the configured one; the stored one holds")


class HandleSigner:
    """Turns handles into the text that clients get, and that text back into handles."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._keys: HandleKeys | None = None
        self._loaded_at = 0.0  # when the load began: what was written before that is in it
        self._loading = asyncio.Lock()

    async def prepare(self) -> bytes:
        """Return the key that signs, and seed an empty keystore.

        Call it before work is claimed: a lease whose handle cannot be signed would be lost until it expires.
        """
        keys = await self._fresh(monotonic() - KEY_CACHE_S)
        if keys.signing is None:
            await seed_signing_key(
                self._engine, self._settings
            )  # changes nothing if there is a key that cannot be read
            keys = await self._fresh(monotonic())
        if keys.signing is None:
            raise errors.Corruption("invalid_secret")
        return keys.signing

    async def sign(self, handle: Handle) -> str:
        """Return the signed text of a handle.

        When the store is away, the last known key signs: the work has been claimed already.
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
        """Return the same for many, refusals included."""
        began = monotonic()
        answers: list[Handle | errors.FabricError] = [_parsed(text) for text in texts]
        unproven = [place for place, one in enumerate(answers) if isinstance(one, Handle)]
        for newer_than in (began - KEY_CACHE_S, began):
            if not unproven:
                break
            keys, now = await self._fresh(newer_than), self._engine.estimate.now()
            unproven = [
                place
                for place in unproven
                if isinstance(one := answers[place], Handle) and not is_signed_handle(keys, one, now)
            ]
        for place in unproven:
            answers[place] = errors.Corruption(HANDLE_NOT_OURS)
        return answers

    def clear_cache(self) -> None:
        """Read the keystore again before the next use."""
        self._keys = None

    async def _fresh(self, newer_than: float) -> HandleKeys:
        """Return keys whose load began after an instant."""
        # Before the lock: who is content with the cached keys never waits for who is not.
        if self._keys is not None and self._loaded_at > newer_than:
            return self._keys
        async with self._loading:
            if self._keys is None or self._loaded_at <= newer_than:
                if self._keys is not None:
                    await asyncio.sleep(self._loaded_at + MIN_RELOAD_INTERVAL_S - monotonic())
                began = monotonic()
                self._keys = await self._engine.handle_keys()
                self._loaded_at = began
            return self._keys


def _parsed(text: str) -> Handle | errors.FabricError:
    try:
        return handle_from_text(text)
    except errors.FabricError as refused:
        return refused
