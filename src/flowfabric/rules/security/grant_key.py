"""Grant keys: the signed text by which a worker redeems a grant.

A grant key is bound to the execution, the worker, its instance, the expiry and the kind (claim or reclaim). The store
keeps only its hash.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from enum import StrEnum

import msgspec

from flowfabric.ids import ExecutionId, uuid_of
from flowfabric.model.execution import Grant
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.rules.security.keystore import SigningKeys, find_key, is_hex, sign_message


class GrantFault(StrEnum):
    """Why a grant key is not accepted."""

    MALFORMED = "malformed"
    EXPIRED = "expired"
    UNKNOWN_KID = "unknown_kid"
    UNKNOWN_GRANT = "unknown_grant"
    SIGNATURE_MISMATCH = "signature_mismatch"


_GRANT_KEY = re.compile(
    r"pg:(?P<reclaim>reclaim:)?(?P<tag>\{fp:[0-9]{1,5}\}):(?P<uuid>[0-9a-fA-F-]{32,36}):(?P<expires>[0-9]{1,19})"
    r":(?P<kid>[^:]+):(?P<digest>[0-9a-f]{64})"
).fullmatch


def sign_grant(
    key: SigningKey,
    execution_id: ExecutionId,
    *,
    worker_id: str,
    worker_instance_id: str,
    expires_at: int,
    reclaim: bool = False,
) -> str:
    """Return the key that redeems a grant."""
    tag, uuid = execution_id[: execution_id.index("}") + 1], uuid_of(execution_id)
    message = _grant_message(tag, uuid, worker_id, worker_instance_id, expires_at, reclaim)
    digest = sign_message(key.secret_hex, key.kid, message)
    return f"pg:{'reclaim:' if reclaim else ''}{tag}:{uuid}:{expires_at}:{key.kid}:{digest}"


def grant_id(grant_key: str) -> str:
    """Return the SHA-256 of a grant key. It is stored instead of the key, so a leaked store yields no grants."""
    return hashlib.sha256(grant_key.encode("utf-8", "surrogatepass")).hexdigest()


def verify_grant(grant_key: str, grant: Grant | None, keys: SigningKeys, now: int) -> GrantFault | None:
    """Return why a key does not redeem the stored grant; None if it does.

    The signature is checked against the worker and instance of the stored grant. Retired keys verify as long as they
    are in the keystore, because a grant expires by itself.
    """
    parts = _GRANT_KEY(grant_key)
    if parts is None:
        return GrantFault.MALFORMED
    expires_at = int(parts["expires"])
    if expires_at <= now:
        return GrantFault.EXPIRED
    signer = find_key(keys, parts["kid"])
    if signer is None or not is_hex(signer.secret_hex):
        return GrantFault.UNKNOWN_KID
    if grant is None:
        return GrantFault.UNKNOWN_GRANT
    reclaim = parts["reclaim"] is not None
    message = _grant_message(
        parts["tag"], parts["uuid"], grant.worker_id, grant.worker_instance_id, expires_at, reclaim
    )
    if not hmac.compare_digest(sign_message(signer.secret_hex, signer.kid, message), parts["digest"]):
        return GrantFault.SIGNATURE_MISMATCH
    # A valid signature of another grant: superseded since, or of the other kind.
    return None if hmac.compare_digest(grant_id(grant_key), grant.key_id) else GrantFault.UNKNOWN_GRANT


class GrantProof(msgspec.Struct, frozen=True):
    """The key that a caller presents for a grant, and the keystore to check it with."""

    grant_key: str
    keys: tuple[SigningKey, ...]

    def covers(self, grant: Grant, now: int) -> bool:
        """True if this is the key that was issued with the grant; a grant without a key needs none."""
        return not grant.key_id or verify_grant(self.grant_key, grant, self.keys, now) is None


def _grant_message(tag: str, uuid: str, worker: str, instance: str, expires_at: int, reclaim: bool) -> str:
    return f"{tag}|{uuid}|{worker}|{instance}|{expires_at}{'|reclaim' if reclaim else ''}"
