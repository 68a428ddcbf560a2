"""Administration: signing keys, API tokens, retention and partitions."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.retention.purger import Purger
from flowfabric.engine.runtime.read_set import Many, One, ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.signing_keys import SigningKeys
from flowfabric.engine.validation import execution as validate
from flowfabric.model.api_token import ApiScope, ApiToken, ApiTokenCreated, TokenView
from flowfabric.model.deployment import Deployment
from flowfabric.model.execution import Execution
from flowfabric.model.signing_key import Keystore, SigningKey
from flowfabric.rules import deployment, retention, validation
from flowfabric.rules.feed import Filter
from flowfabric.rules.security import api_tokens, keystore
from flowfabric.stores.queries import Scan, Where

MAX_LISTED = 1000
_TOKEN_FORMAT = re.compile(r"ff_([0-9a-f]{32})_([A-Za-z0-9_-]{43})").fullmatch
logger = logging.getLogger("flowfabric.retention")
DEFAULT_BATCH = 20
PAGE_SIZE = 500  # scanned per round trip; not every scanned execution may be purged yet
MAX_BATCH = 10_000


class VerifiedToken(msgspec.Struct, frozen=True):
    """The bearer of a valid token."""

    token_id: str
    name: str
    scopes: frozenset[ApiScope]
    namespaces: frozenset[str] | None


class PartitionRotation(msgspec.Struct, frozen=True):
    """The outcome of a rotation in one keystore partition; there is one, number 0."""

    partition: int
    result: keystore.KeyRotated | keystore.KeyUnchanged | errors.FabricError


class AdminOperations:
    """Operations of an administrator: signing keys, API tokens, retention, partitions."""

    runtime: Runtime
    purger: Purger
    signing_keys: SigningKeys

    async def purge_execution(self, execution_id: str, *, default_retention_ms: int | None = None) -> bool:
        """Delete an ended execution whose retention is over, with everything that belongs to it.

        Its flow is deleted as well if no other member is left; the answer does not say so.
        """
        execution = validate.validate_execution_id(execution_id)
        default = validate.optional_duration("default_retention_ms", default_retention_ms)
        return await self.purger.purge_execution(execution, default)

    async def purge_flow(self, flow_id: str) -> bool:
        """Delete a flow without members, with its edges, joins and summary."""
        return await self.purger.purge_flow(validate.validate_flow_id(flow_id))

    async def make_api_token(
        self,
        name: str,
        scopes: Iterable[str],
        *,
        namespaces: Iterable[str] | None = None,
        expires_in_ms: int | None = None,
    ) -> ApiTokenCreated:
        """Create a token and return it, once; without namespaces it is valid in all of them."""
        label = validation.text("name", name, limit=validation.MAX_NAME_BYTES)
        granted = frozenset(_parse_scope(scope) for scope in validate.validate_iterable("scopes", scopes))
        if not granted:
            raise errors.InvalidInput("scopes: empty")
        names = None if namespaces is None else validate.validate_iterable("namespaces", namespaces)
        bound_to = None if names is None else frozenset(_validate_namespace(name) for name in names)
        valid_ms = None if expires_in_ms is None else validation.duration_ms("expires_in_ms", expires_in_ms)
        token_id, secret = self.runtime.minter.uuid(), secrets.token_urlsafe(32)
        reads, token = _read_token(token_id)
        await self.runtime.decide_and_commit(
            reads,
            lambda rows, _: api_tokens.create(
                token(rows),
                token_id=token_id,
                name=label,
                scopes=granted,
                namespaces=bound_to,
                digest=_digest(secret),
                expires_in_ms=valid_ms,
            ),
        )
        return _format_token(token_id, secret)

    async def rotate_api_token(self, token_id: str, *, grace_ms: int = 0) -> ApiTokenCreated:
        """Replace the secret of a token and return it, once; the previous one stays valid for `grace_ms`."""
        known, secret = ids.parse_uuid(validation.text("token_id", token_id), "token_id"), secrets.token_urlsafe(32)
        grace = validation.duration_ms("grace_ms", grace_ms, least=0)
        reads, token = _read_token(known)
        await self.runtime.decide_and_commit(
            reads, lambda rows, _: api_tokens.rotate(token(rows), _digest(secret), grace)
        )
        return _format_token(known, secret)

    async def revoke_api_token(self, token_id: str) -> bool:
        """Revoke a token; True if it was valid."""
        reads, token = _read_token(ids.parse_uuid(validation.text("token_id", token_id), "token_id"))
        return await self.runtime.decide_and_commit(reads, lambda rows, _: api_tokens.revoke(token(rows)))

    async def list_api_tokens(self, *, cursor: str | None = None, limit: int = 100) -> list[TokenView]:
        """List tokens by id, without their secrets."""
        after = None if cursor is None else (ids.parse_uuid(validation.text("cursor", cursor), "cursor"),)
        size = min(validation.integer("limit", limit, least=1), MAX_LISTED)
        rows: list[ApiToken] = await self.runtime.scan(Scan(ApiToken, (), ("token_id",), after, size))
        return [api_tokens.view(row) for row in rows]

    async def authenticate_token(self, token: str) -> VerifiedToken | None:
        """Return the bearer of this token; None if it is not valid."""
        if not isinstance(token, str):
            raise errors.InvalidInput("token: not text")
        found = _TOKEN_FORMAT(token)
        if found is None:
            return None
        reads, stored = _read_token(ids.parse_uuid(found[1]))
        loaded = await self.runtime.load(reads)
        row = stored(loaded.rows)
        if row is None or not api_tokens.is_valid(row, _digest(found[2]), loaded.now):
            return None
        return VerifiedToken(row.token_id, row.name, api_tokens.scopes_of(row), api_tokens.namespaces_of(row))

    async def ensure_partitions(self) -> None:
        """Check that this engine has the partition counts of the deployment; `PartitionMismatch` otherwise."""
        reads = ReadSet()
        row = reads.one(Deployment, deployment.DEPLOYMENT_ID)
        await self.runtime.decide_and_commit(
            reads, lambda rows, _: deployment.ensure_partitions(row(rows), self.runtime.partitions)
        )

    async def trim_retention(
        self,
        partition: int,
        lane_id: str,
        *,
        default_retention_ms: int | None = None,
        batch: int = DEFAULT_BATCH,
        chosen: Filter | None = None,
    ) -> int:
        """Purge up to `batch` ended executions of a lane and partition, oldest first; return how many were purged.

        The default applies to executions without a retention of their own; without one, the default when they ended.
        An execution that cannot be purged does not stop the others.
        """
        index = validate.validate_flow_partition(partition, self.runtime.partitions)
        default = validate.optional_duration("default_retention_ms", default_retention_ms)
        wanted = validation.integer("batch", batch, least=0, most=MAX_BATCH)
        accepted = validate.validate_filter(chosen)
        where = (
            Where("partition", "=", index),
            Where("lane_id", "=", validate.validate_lane_id(lane_id)),
            Where("purge_at", "set"),
        )
        purged, after, now = 0, None, await self.runtime.retry_while_unavailable(self.runtime.store.ping)
        while purged < wanted:
            scan = Scan(Execution, where, ("purge_at", "execution_id"), after, PAGE_SIZE)
            rows: list[Execution] = await self.runtime.scan(scan)
            due = [row for row in rows if accepted.accepts(row) and retention.is_retention_over(row, now, default)]
            while due and purged < wanted:
                chunk, due = due[: wanted - purged], due[wanted - purged :]
                purged += sum(await asyncio.gather(*(self._purge(row.execution_id, default) for row in chunk)))
            if len(rows) < PAGE_SIZE:
                break
            after = rows[-1].purge_at, rows[-1].execution_id
        return purged

    async def _purge(self, execution_id: str, default_ms: int | None) -> bool:
        try:
            return await self.purger.purge_execution(execution_id, default_retention_ms=default_ms)
        except Exception:  # any failure: purge the others
            logger.exception("%s could not be purged, and is kept", execution_id)
            return False

    async def seed_waitpoint_hmac_secret(
        self, kid: str, secret_hex: str
    ) -> keystore.KeySeeded | keystore.KeyAlreadySeeded:
        """Install the first signing key. It never overwrites, so it can be called on every start."""
        name = validation.text("kid", kid, limit=validation.MAX_NAME_BYTES)
        secret = validation.text("secret_hex", secret_hex)
        answer: keystore.KeySeeded | keystore.KeyAlreadySeeded = await self._change_keys(
            lambda keys, _: keystore.seed_key(keys, name, secret)
        )
        return answer

    async def rotate_waitpoint_hmac_secret_all(
        self, new_kid: str, new_secret_hex: str, grace_ms: int
    ) -> list[PartitionRotation]:
        """Install a new signing key; the previous one verifies for another `grace_ms`."""
        name = validation.text("new_kid", new_kid, limit=validation.MAX_NAME_BYTES)
        secret = validation.text("new_secret_hex", new_secret_hex)
        if refused := keystore.check_rotation(name, secret, grace_ms):
            raise refused
        try:
            result = await self._change_keys(lambda keys, now: keystore.rotate_key(keys, name, secret, grace_ms, now))
        except errors.RotationConflict as conflict:
            result = conflict
        return [PartitionRotation(0, result)]

    async def ensure_signing_key(self, secret_hex: str) -> keystore.KeySeeded | keystore.KeyAlreadySeeded:
        """Install this secret as the first key of an empty keystore; existing keys do not change."""
        answer: keystore.KeySeeded | keystore.KeyAlreadySeeded = await self._change_keys(
            lambda keys, _: keystore.install_configured_key(keys, secret_hex)
        )
        return answer

    async def _change_keys(self, rule: Callable[[tuple[SigningKey, ...], int], keystore.KeyDecision]) -> Any:
        reads, keys = _read_keystore()
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, now: self.signing_keys.decided(
                rows, rule(self.signing_keys.unseal_loaded_keys(keys(rows)), now)
            ),
        )

    async def list_waitpoint_hmac_kids(self) -> keystore.KeyIds:
        """List the id of the key that signs and of those that still verify."""
        reads, keys = _read_keystore()
        loaded = await self.runtime.load(reads)
        return keystore.list_kids(tuple(keys(loaded.rows)), loaded.now)


def _read_token(token_id: str) -> tuple[ReadSet, One[ApiToken]]:
    reads = ReadSet()
    return reads, reads.one(ApiToken, token_id)


def _read_keystore() -> tuple[ReadSet, Many[SigningKey]]:
    reads = ReadSet()
    reads.one(Keystore, 0)  # the root that a change of keys guards
    return reads, reads.many(SigningKey, 0)


def _format_token(token_id: str, secret: str) -> ApiTokenCreated:
    return ApiTokenCreated(token_id, f"ff_{token_id.replace('-', '')}_{secret}")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _parse_scope(value: object) -> ApiScope:
    try:
        return ApiScope(validation.text("scopes", value))
    except ValueError:
        raise errors.InvalidInput(f"scopes: {validation.preview(value)} is none of {', '.join(ApiScope)}") from None


def _validate_namespace(value: object) -> str:
    return validation.text("namespaces", value, limit=validation.MAX_NAME_BYTES)
