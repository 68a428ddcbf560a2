"""SecretBox: signing secrets are stored in plain text by default, sealed with AES-256-GCM if a key is configured.

A sealed secret has a prefix, so a store may hold both kinds: a secret that was written before a key was configured
stays readable, and is sealed when it is written next. The kid is authenticated with the secret, so that one key's
secret cannot be put in the place of another's.
"""

from __future__ import annotations

import base64
import hashlib
import os
from typing import Any

from flowfabric import errors
from flowfabric.settings import Secret

SEALED_PREFIX = "sealed:1:"
UNREADABLE_SECRET = "<sealed>"  # in place of a secret that cannot be opened; neither valid nor empty
_SALT = b"flowfabric/secret-key/1"
_NONCE_BYTES = 12


class SecretBox:
    """Seals and opens secrets; without a key it returns them as they are."""

    def __init__(self, key: Secret | None) -> None:
        self._cipher: Any = None if key is None else _cipher(key)

    def seal(self, secret: str, kid: str) -> str:
        """Return the secret as it is stored."""
        if self._cipher is None or secret.startswith(SEALED_PREFIX):
            return secret
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, secret.encode(), kid.encode())
        return SEALED_PREFIX + base64.b64encode(nonce + sealed).decode()

    def open(self, stored: str, kid: str) -> str:
        """Return the secret itself, or `UNREADABLE_SECRET` if it cannot be opened here; nothing is signed with that."""
        if not stored.startswith(SEALED_PREFIX):
            return stored
        if self._cipher is None:
            return UNREADABLE_SECRET
        from cryptography.exceptions import InvalidTag

        try:
            data = base64.b64decode(stored.removeprefix(SEALED_PREFIX), validate=True)
            opened: bytes = self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], kid.encode())
            return opened.decode()
        except (InvalidTag, ValueError):
            return UNREADABLE_SECRET


def _cipher(key: Secret) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as missing:
        raise errors.InvalidInput("secret_key: sealing needs a cipher: pip install 'flowfabric[secrets]'") from missing
    derived = hashlib.scrypt(key.reveal().encode(), salt=_SALT, n=2**14, r=8, p=1, dklen=32)
    return AESGCM(derived)
