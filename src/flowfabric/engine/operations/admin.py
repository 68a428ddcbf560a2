"""Administration: signing keys, API tokens, retention and partitions."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Iterable
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.retention.purger import Purger
from flowfabric.engine.runtime.after_commit import first
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.signing_keys import KEYSTORE, SigningKeys
from flowfabric.engine.validation import execution as validate
from flowfabric.model.api_token import ApiScope, ApiToken, ApiTokenCreated, TokenView
from flowfabric.model.deployment import Deployment
from flowfabric.model.execution import Execution
from flowfabric.rules import deployment, retention, validation
from flowfabric.rules.feed import Filter
from flowfabric.rules.security import api_tokens, keystore
from flowfabric.stores.queries import Read, Scan, Where

MAX_LISTED = 1000
_FORM = re.compile(r"ff_([0-9a-f]{32})_([A-Za-z0-9_-]{43})").fullmatch
logger = logging.getLogger("flowfabric.retention")
DEFAULT_BATCH = 20
PAGE_SIZE = 500  # how many are looked at in one trip: not all that stand here are over
MAX_BATCH = 10_000


class VerifiedToken(msgspec.Struct, frozen=True):
    """Somebody with a good token."""

    token_id: str
    name: str
    scopes: frozenset[ApiScope]
    namespaces: frozenset[str] | None


class PartitionRotation(msgspec.Struct, frozen=True):
    """The outcome of a rotation where keys are kept; there is one such place, number 0."""

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
        """A new token, shown once; without namespaces it is good in all of them."""
        label = validation.text("name", name, limit=validation.MAX_NAME_BYTES)
        wanted = frozenset(_scope(one) for one in validate.validate_iterable("scopes", scopes))
        if not wanted:
            raise errors.InvalidInput("scopes: empty")
        named = None if namespaces is None else validate.validate_iterable("namespaces", namespaces)
        where = None if named is None else frozenset(_namespace(one) for one in named)
        lasts = None if expires_in_ms is None else validation.duration_ms("expires_in_ms", expires_in_ms)
        token_id, secret = self.runtime.minter.uuid(), secrets.token_urlsafe(32)
        await self.runtime.decide_and_commit(
            _wants(token_id),
            lambda rows, _: api_tokens.create(
                first(rows[0]),
                token_id=token_id,
                name=label,
                scopes=wanted,
                namespaces=where,
                digest=_digest(secret),
                expires_in_ms=lasts,
            ),
        )
        return _made(token_id, secret)

    async def rotate_api_token(self, token_id: str, *, grace_ms: int = 0) -> ApiTokenCreated:
        """Another secret for a token, shown once; the one before is good for `grace_ms` more."""
        known, secret = ids.parse_uuid(validation.text("token_id", token_id), "token_id"), secrets.token_urlsafe(32)
        grace = validation.duration_ms("grace_ms", grace_ms, least=0)
        await self.runtime.decide_and_commit(
            _wants(known), lambda rows, _: api_tokens.rotate(first(rows[0]), _digest(secret), grace)
        )
        return _made(known, secret)

    async def revoke_api_token(self, token_id: str) -> bool:
        """Make a token good for nothing; True when it was good for something."""
        known = ids.parse_uuid(validation.text("token_id", token_id), "token_id")
        return await self.runtime.decide_and_commit(_wants(known), lambda rows, _: api_tokens.revoke(first(rows[0])))

    async def list_api_tokens(self, *, cursor: str | None = None, limit: int = 100) -> list[TokenView]:
        """Tokens by id, without what they are known by."""
        after = None if cursor is None else (ids.parse_uuid(validation.text("cursor", cursor), "cursor"),)
        wanted = min(validation.integer("limit", limit, least=1), MAX_LISTED)
        rows: list[ApiToken] = await self.runtime.scan(Scan(ApiToken, (), ("token_id",), after, wanted))
        return [api_tokens.view(row) for row in rows]

    async def authenticate_token(self, token: str) -> VerifiedToken | None:
        """Who shows this token; None when it is not good."""
        if not isinstance(token, str):
            raise errors.InvalidInput("token: not text")
        found = _FORM(token)
        if found is None:
            return None
        loaded = await self.runtime.load(_wants(ids.parse_uuid(found[1])))
        row: ApiToken | None = first(loaded.rows[0])
        if row is None or not api_tokens.is_valid(row, _digest(found[2]), loaded.now):
            return None
        return VerifiedToken(row.token_id, row.name, api_tokens.scopes_of(row), api_tokens.namespaces_of(row))

    async def ensure_partitions(self) -> None:
        """See that this engine counts partitions as everybody else; `PartitionMismatch` otherwise."""
        await self.runtime.decide_and_commit(
            (Read(Deployment, (deployment.DEPLOYMENT_ID,)),),
            lambda rows, _: deployment.ensure_partitions(first(rows[0]), self.runtime.partitions),
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
        """Purge up to `batch` finished executions of a lane and partition, oldest end first; how many went.

        The default is for those whose policy does not say how long they are kept; without one, what was the default
        when they ended. One that cannot be purged does not keep the others.
        """
        place = validate.validate_flow_partition(partition, self.runtime.partitions)
        default = validate.optional_duration("default_retention_ms", default_retention_ms)
        wanted = validation.integer("batch", batch, least=0, most=MAX_BATCH)
        accepted = validate.validate_filter(chosen)
        where = (
            Where("partition", "=", place),
            Where("lane_id", "=", validate.validate_lane_id(lane_id)),
            Where("purge_at", "set"),
        )
        purged, after, now = 0, None, await self.runtime.retry_while_unavailable(self.runtime.store.ping)
        while purged < wanted:
            scan = Scan(Execution, where, ("purge_at", "execution_id"), after, PAGE_SIZE)
            rows: list[Execution] = await self.runtime.scan(scan)
            over = [row for row in rows if accepted.accepts(row) and retention.is_retention_over(row, now, default)]
            while over and purged < wanted:
                due, over = over[: wanted - purged], over[wanted - purged :]
                purged += sum(await asyncio.gather(*(self._purge(row.execution_id, default) for row in due)))
            if len(rows) < PAGE_SIZE:
                break
            after = rows[-1].purge_at, rows[-1].execution_id
        return purged

    async def _purge(self, execution_id: str, default_ms: int | None) -> bool:
        try:
            return await self.purger.purge_execution(execution_id, default_retention_ms=default_ms)
        except Exception:  # whatever it is, the others can go
            logger.exception("%s could not be purged, and is left", execution_id)
            return False

    async def seed_waitpoint_hmac_secret(
        self, kid: str, secret_hex: str
    ) -> keystore.KeySeeded | keystore.KeyAlreadySeeded:
        """Install the first signing key; call it on every start, it never overwrites."""
        name = validation.text("kid", kid, limit=validation.MAX_NAME_BYTES)
        secret = validation.text("secret_hex", secret_hex)
        answer: Any = await self.runtime.decide_and_commit(
            KEYSTORE,
            lambda rows, _: self.signing_keys.decided(
                rows, keystore.seed_key(self.signing_keys.unseal_loaded_keys(rows[1]), name, secret)
            ),
        )
        return answer  # type: ignore[no-any-return]

    async def rotate_waitpoint_hmac_secret_all(
        self, new_kid: str, new_secret_hex: str, grace_ms: int
    ) -> list[PartitionRotation]:
        """Let another key sign; the one before verifies for `grace_ms` more."""
        name = validation.text("new_kid", new_kid, limit=validation.MAX_NAME_BYTES)
        secret = validation.text("new_secret_hex", new_secret_hex)
        if refused := keystore.check_rotation(name, secret, grace_ms):
            raise refused
        try:
            result: Any = await self.runtime.decide_and_commit(
                KEYSTORE,
                lambda rows, now: self.signing_keys.decided(
                    rows,
                    keystore.rotate_key(self.signing_keys.unseal_loaded_keys(rows[1]), name, secret, grace_ms, now),
                ),
            )
        except errors.RotationConflict as conflict:
            result = conflict
        return [PartitionRotation(0, result)]

    async def ensure_signing_key(self, secret_hex: str) -> keystore.KeySeeded | keystore.KeyAlreadySeeded:
        """Put this secret into an empty keystore as its first key; an existing key stays."""
        answer: Any = await self.runtime.decide_and_commit(
            KEYSTORE,
            lambda rows, _: self.signing_keys.decided(
                rows, keystore.install_configured_key(self.signing_keys.unseal_loaded_keys(rows[1]), secret_hex)
            ),
        )
        return answer  # type: ignore[no-any-return]

    async def list_waitpoint_hmac_kids(self) -> keystore.KeyIds:
        """Which keys sign and which still verify."""
        loaded = await self.runtime.load(KEYSTORE)
        return keystore.list_kids(tuple(loaded.rows[1]), loaded.now)


def _wants(token_id: str) -> tuple[Read, ...]:
    return (Read(ApiToken, (token_id,)),)


def _made(token_id: str, secret: str) -> ApiTokenCreated:
    return ApiTokenCreated(token_id, f"ff_{token_id.replace('-', '')}_{secret}")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _scope(value: object) -> ApiScope:
    try:
        return ApiScope(validation.text("scopes", value))
    except ValueError:
        raise errors.InvalidInput(f"scopes: {validation.preview(value)} is none of {', '.join(ApiScope)}") from None


def _namespace(value: object) -> str:
    return validation.text("namespaces", value, limit=validation.MAX_NAME_BYTES)
