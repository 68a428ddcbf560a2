"""Schemas of administration: signing keys, API tokens, health and the store behind the server."""

from __future__ import annotations

import msgspec

from flowfabric import ids
from flowfabric.api.encoding import Natural, RedactedRepr, RequestBody
from flowfabric.model.security.api_token import ApiScope, TokenView


class RotateWaitpointSecretRequest(RedactedRepr, RequestBody, frozen=True):
    new_kid: str
    new_secret_hex: str


class RotateWaitpointSecretResponse(msgspec.Struct, frozen=True):
    rotated: int
    failed: list[int]
    new_kid: str


class CreateTokenRequest(RequestBody, frozen=True):
    """A new API token; without namespaces it is valid in all of them."""

    name: str
    scopes: list[ApiScope]
    namespaces: list[str] | None = None
    expires_in_ms: Natural | None = None


class ListTokensResponse(msgspec.Struct, frozen=True):
    tokens: list[TokenView]


class RotateTokenRequest(RequestBody, frozen=True):
    grace_ms: Natural = 0


class RevokeTokenResponse(msgspec.Struct, frozen=True):
    revoked: bool


class StoreInfo(msgspec.Struct, frozen=True):
    """The store behind the server (kind, schema version, partitions, clock) and the release of the server."""

    backend: str
    partitions: ids.PartitionCounts
    now: int  # milliseconds since the epoch
    schema_version: int = 0
    release: str = ""
    spreads: dict[str, int] = {}  # the spread of each lane that has one other than 1


class SetLaneSpreadRequest(RequestBody, frozen=True):
    """The number of partitions that new executions of a lane are spread over."""

    spread: int


class WhoAmI(msgspec.Struct, frozen=True):
    """The caller of the request; `namespaces` is null for a token that is bound to none."""

    name: str
    scopes: list[ApiScope]
    namespaces: list[str] | None


class HealthStatus(msgspec.Struct, frozen=True):
    status: str
