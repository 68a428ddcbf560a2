"""Administration: signing keys, API tokens, retention and partitions."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.operations.bulk import DEFAULT_CEILING, BulkOperator, BulkPage, BulkPreview
from flowfabric.engine.retention.purger import Purger
from flowfabric.engine.runtime.lane_spread_cache import LaneSpreads
from flowfabric.engine.runtime.read_set import ReadSet, decide_row, load_one
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.signing_keys import KEYS, KEYSTORE, SigningKeys
from flowfabric.engine.validation import execution as validate
from flowfabric.model.bulk_operation import BulkVerb
from flowfabric.model.deployment import Deployment
from flowfabric.model.execution import Execution
from flowfabric.model.scheduling.lane import Lane, LaneSpread
from flowfabric.model.security.api_token import ApiScope, ApiToken, ApiTokenCreated, TokenView
from flowfabric.rules import deployment, retention, validation
from flowfabric.rules.bulk_operation import BulkStatus
from flowfabric.rules.decision import Decision
from flowfabric.rules.feed import Filter
from flowfabric.rules.scheduling import lane_spread
from flowfabric.rules.security import api_tokens, keystore, sessions
from flowfabric.stores.queries import Scan, Where

A = TypeVar("A")
MAX_LISTED = 1000
_TOKEN_FORMAT = re.compile(r"(ff[sl]?)_([0-9a-f]{32})_([A-Za-z0-9_-]{43})").fullmatch
TOKEN, SESSION, LOGIN = "ff", "ffs", "ffl"  # prefixes: an API token, a session of the console, a link that opens one
LOGIN_MS = 5 * 60 * 1000
ENDED_SESSIONS_PER_LOGIN = 20
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

    bulk_operator: BulkOperator
    runtime: Runtime
    purger: Purger
    signing_keys: SigningKeys
    lane_spreads: LaneSpreads

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
        label = validation.name("name", name)
        granted = _parse_scopes(scopes)
        if not granted:
            raise errors.InvalidInput("scopes: empty")
        bound_to = _parse_namespaces(namespaces)
        valid_ms = None if expires_in_ms is None else validation.duration_ms("expires_in_ms", expires_in_ms)
        return await self._create_token(TOKEN, label, granted, bound_to, valid_ms)

    async def rotate_api_token(self, token_id: str, *, grace_ms: int = 0) -> ApiTokenCreated:
        """Replace the secret of a token and return it, once; the previous one stays valid for `grace_ms`."""
        known, secret = validate.parse_uuid("token_id", token_id), secrets.token_urlsafe(32)
        grace = validation.duration_ms("grace_ms", grace_ms, least=0)
        await self._decide_token(known, lambda row, _: api_tokens.rotate(row, _digest(secret), grace))
        return _format_token(known, secret)

    async def revoke_api_token(self, token_id: str) -> bool:
        """Revoke a token; True if it was valid."""
        return await self._decide_token(
            validate.parse_uuid("token_id", token_id), lambda row, _: api_tokens.revoke(row)
        )

    async def list_api_tokens(
        self, *, cursor: str | None = None, limit: int = 100, sessions: bool = False
    ) -> list[TokenView]:
        """List tokens by id, without their secrets; with `sessions`, the sessions of the console instead."""
        after = None if cursor is None else (validate.parse_uuid("cursor", cursor),)
        size = min(validation.integer("limit", limit, least=1), MAX_LISTED)
        where = (Where("parent", "set" if sessions else "unset"),)
        rows: list[ApiToken] = await self.runtime.scan(Scan(ApiToken, where, ("token_id",), after, size))
        return [api_tokens.view(row) for row in rows]

    async def authenticate_token(self, token: str) -> VerifiedToken | None:
        """Return the bearer of this token; None if it is not valid."""
        found = await self._verify(token, TOKEN)
        return None if found is None or found[0].parent is not None else _bearer(found[0])

    async def open_session(
        self,
        *,
        parent: str,
        name: str,
        scopes: Iterable[str],
        namespaces: Iterable[str] | None = None,
        is_link: bool = False,
    ) -> ApiTokenCreated:
        """Open a session of the console below a token, or make a link that opens one; return its secret, once.

        Sessions that have ended are deleted here, some at a time, so that the table does not grow with every login.
        """
        label = validation.name("name", name)
        granted = _parse_scopes(scopes)
        bound_to = _parse_namespaces(namespaces)
        above = validation.name("parent", parent)
        await self._delete_ended_sessions()
        if is_link:
            return await self._create_token(LOGIN, label, granted, bound_to, LOGIN_MS, above)
        return await self._create_token(SESSION, label, granted, bound_to, sessions.SESSION_MS, above)

    async def authenticate_session(self, secret: str, roots: Collection[str] = ()) -> VerifiedToken | None:
        """Return the bearer of a session and move its end; None if it or the token that opened it is not valid.

        `roots` are the parents that are no tokens of the store, as the server knows them.
        """
        found = await self._verify(secret, SESSION)
        if found is None or not await self._is_parent_valid(found[0], found[1], roots):
            return None
        row, now = found
        if sessions.session_end(row, now) is not None:
            await self._decide_token(row.token_id, sessions.extend_session)
        return _bearer(row)

    async def redeem_login_link(self, secret: str, roots: Collection[str] = ()) -> ApiTokenCreated | None:
        """Open the session of a link, once; None if the link is not valid or was used."""
        found = await self._verify(secret, LOGIN)
        if found is None or not await self._is_parent_valid(found[0], found[1], roots):
            return None
        row = found[0]
        if not await self.revoke_api_token(row.token_id):  # it was redeemed before
            return None
        return await self.open_session(
            parent=row.parent or "",
            name=row.name,
            scopes=api_tokens.scopes_of(row),
            namespaces=api_tokens.namespaces_of(row),
        )

    async def _create_token(
        self,
        kind: str,
        name: str,
        scopes: frozenset[ApiScope],
        namespaces: frozenset[str] | None,
        expires_in_ms: int | None,
        parent: str | None = None,
    ) -> ApiTokenCreated:
        token_id, secret = self.runtime.minter.uuid(), secrets.token_urlsafe(32)
        await self._decide_token(
            token_id,
            lambda row, _: api_tokens.create(
                row,
                token_id=token_id,
                name=name,
                scopes=scopes,
                namespaces=namespaces,
                digest=_digest(secret, kind),
                expires_in_ms=expires_in_ms,
                parent=parent,
            ),
        )
        return _format_token(token_id, secret, kind)

    async def _verify(self, token: str, kind: str) -> tuple[ApiToken, int] | None:
        """Return the row of a valid secret of this kind, and the store's time."""
        if not isinstance(token, str):
            raise errors.InvalidInput("token: not text")
        found = _TOKEN_FORMAT(token)
        if found is None or found[1] != kind:
            return None
        reads = ReadSet()
        stored = reads.one(ApiToken, ids.parse_uuid(found[2]))
        loaded = await self.runtime.load(reads)
        row = stored(loaded.rows)
        if row is None or not api_tokens.is_valid(row, _digest(found[3], kind), loaded.now):
            return None
        return row, loaded.now

    async def _is_parent_valid(self, row: ApiToken, now: int, roots: Collection[str]) -> bool:
        if row.parent is None:
            return False
        if row.parent in roots:
            return True
        try:
            parent_id = ids.parse_uuid(row.parent)
        except errors.InvalidInput:  # a root that this server does not have any more
            return False
        parent = await load_one(self.runtime, ApiToken, parent_id)
        return parent is not None and api_tokens.is_active(parent, now)

    async def _delete_ended_sessions(self) -> None:
        now = await self.runtime.retry_while_unavailable(self.runtime.store.ping)
        where = (Where("parent", "set"), Where("expires_at", "<=", now))
        rows: list[ApiToken] = await self.runtime.scan(
            Scan(ApiToken, where, ("token_id",), None, ENDED_SESSIONS_PER_LOGIN)
        )
        for row in rows:
            await self._decide_token(row.token_id, sessions.delete_ended_session)

    async def _decide_token(self, token_id: str, decide: Callable[[ApiToken | None, int], Decision[A]]) -> A:
        return await decide_row(self.runtime, ApiToken, (token_id,), decide)

    async def ensure_partitions(self) -> None:
        """Check that this engine has the partition counts of the deployment; `PartitionMismatch` otherwise."""
        await decide_row(
            self.runtime,
            Deployment,
            (deployment.DEPLOYMENT_ID,),
            lambda row, _: deployment.ensure_partitions(row, self.runtime.partitions),
        )

    async def set_lane_spread(self, lane_id: str, spread: int) -> LaneSpread:
        """Spread the new executions of a lane over this many partitions; it takes effect some seconds later.

        The same value again changes nothing. A lane stays where it is until an earlier change is in effect.
        """
        lane = validate.validate_lane_id(lane_id)
        wanted = validation.integer("spread", spread)
        answer = await decide_row(
            self.runtime,
            Lane,
            (lane,),
            lambda row, now: lane_spread.set_spread(row, lane, wanted, self.runtime.partitions, now),
        )
        await self.lane_spreads.refresh()
        return answer

    async def read_lane(self, lane_id: str) -> LaneSpread:
        """Return the spread of a lane, and the one that follows if a change is not yet in effect."""
        lane = validate.validate_lane_id(lane_id)
        reads = ReadSet()
        row = reads.one(Lane, lane)
        loaded = await self.runtime.load(reads)
        return lane_spread.view(row(loaded.rows), lane, loaded.now)

    async def refresh_lanes(self) -> None:
        """Read the spreads of all lanes now; otherwise it is done every few seconds while this process creates."""
        await self.lane_spreads.refresh()

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
        name = validation.name("kid", kid)
        secret = validation.text("secret_hex", secret_hex)
        return await self.signing_keys.change(lambda keys, _: keystore.seed_key(keys, name, secret))

    async def rotate_waitpoint_hmac_secret_all(
        self, new_kid: str, new_secret_hex: str, grace_ms: int
    ) -> list[PartitionRotation]:
        """Install a new signing key; the previous one verifies for another `grace_ms`."""
        name = validation.name("new_kid", new_kid)
        secret = validation.text("new_secret_hex", new_secret_hex)
        if refused := keystore.check_rotation(name, secret, grace_ms):
            raise refused
        try:
            result = await self.signing_keys.change(
                lambda keys, now: keystore.rotate_key(keys, name, secret, grace_ms, now)
            )
        except errors.RotationConflict as conflict:
            return [PartitionRotation(0, conflict)]
        return [PartitionRotation(0, result)]

    async def ensure_signing_key(self, secret_hex: str) -> keystore.KeySeeded | keystore.KeyAlreadySeeded:
        """Install this secret as the first key of an empty keystore; existing keys do not change."""
        return await self.signing_keys.change(lambda keys, _: keystore.install_configured_key(keys, secret_hex))

    async def list_waitpoint_hmac_kids(self) -> keystore.KeyIds:
        """List the id of the key that signs and of those that still verify."""
        loaded = await self.runtime.load(KEYSTORE)
        return keystore.list_kids(KEYS(loaded.rows), loaded.now)

    async def preview_operation(self, verb: BulkVerb | str, criteria: dict[str, Any]) -> BulkPreview:
        """Count what a bulk operation would act on, and show some of it; nothing is changed."""
        return await self.bulk_operator.preview_operation(verb, criteria)

    async def start_operation(
        self,
        verb: BulkVerb | str,
        criteria: dict[str, Any],
        *,
        reason: str,
        ceiling: int = DEFAULT_CEILING,
        priority: int | None = None,
        requested_by: str = "",
        operation_id: str | None = None,
    ) -> BulkStatus:
        """Start a bulk operation on the executions that a filter finds; the same request again changes nothing.

        `criteria` are the filters of `search_executions`. At least one is needed. `ceiling` is the largest number of
        executions to act on.
        """
        return await self.bulk_operator.start_operation(
            verb,
            criteria,
            reason=reason,
            ceiling=ceiling,
            priority=priority,
            requested_by=requested_by,
            operation_id=operation_id,
        )

    async def read_operation(self, operation_id: str) -> BulkStatus:
        """Return a bulk operation and its progress."""
        return await self.bulk_operator.read_operation(operation_id)

    async def list_operations(self, *, cursor: str | None = None, limit: int = 50) -> BulkPage:
        """List bulk operations, newest first, after the cursor."""
        return await self.bulk_operator.list_operations(cursor=cursor, limit=limit)

    async def cancel_operation(self, operation_id: str) -> BulkStatus:
        """Cancel a bulk operation: what was done stays done, and no further page is begun. Idempotent."""
        return await self.bulk_operator.cancel_operation(operation_id)


def _bearer(row: ApiToken) -> VerifiedToken:
    return VerifiedToken(row.token_id, row.name, api_tokens.scopes_of(row), api_tokens.namespaces_of(row))


def _format_token(token_id: str, secret: str, kind: str = TOKEN) -> ApiTokenCreated:
    return ApiTokenCreated(token_id, f"{kind}_{token_id.replace('-', '')}_{secret}")


def _digest(secret: str, kind: str = TOKEN) -> str:
    """Return the digest of a secret; that of a session or a link includes its kind, so that neither is the other."""
    return hashlib.sha256((secret if kind == TOKEN else f"{kind}:{secret}").encode()).hexdigest()


def _parse_scopes(scopes: object) -> frozenset[ApiScope]:
    names = validate.validate_iterable("scopes", scopes)
    return frozenset(validation.choice(ApiScope, "scopes", validation.text("scopes", name)) for name in names)


def _parse_namespaces(namespaces: object) -> frozenset[str] | None:
    if namespaces is None:
        return None
    names = validate.validate_iterable("namespaces", namespaces)
    return frozenset(validation.name("namespaces", name) for name in names)
