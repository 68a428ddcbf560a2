"""Capabilities: what an execution requires of the worker that runs it.

A capability is an opaque, case-sensitive token. Matching is set inclusion, so an execution without requirements fits
every worker. Requirements are stored as text: sorted, joined by commas, without duplicates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from functools import lru_cache
from typing import Final

from flowfabric.errors import InvalidCapabilities, InvalidInput, InvalidPolicyJson
from flowfabric.ids import has_blank_or_control

MAX_TOKENS: Final = 256
MAX_BYTES: Final = 4096


# ---------------------------------------------------------------------------------------------------------------
# Requirements of executions


def required_capabilities(policy: Mapping[str, object]) -> str:
    """Return the requirement of a policy document in its stored form; empty if it has none.

    Raises `InvalidPolicyJson` or `InvalidCapabilities` for the first error.
    """
    routing = policy.get("routing_requirements")
    if routing is None:
        return ""
    if not isinstance(routing, Mapping):
        raise InvalidPolicyJson("routing_requirements:not_object")
    required = routing.get("required_capabilities")
    if required is None:
        return ""
    if not isinstance(required, list | tuple):
        raise InvalidCapabilities("required:not_array")
    for token in required:
        if fault := _token_fault(token):
            raise InvalidCapabilities(f"required:{fault}")
    if len(required) > MAX_TOKENS:
        raise InvalidCapabilities("required:too_many_tokens")
    if _joined_bytes(required) > MAX_BYTES:
        raise InvalidCapabilities("required:too_many_bytes")
    return ",".join(sorted(set(required)))  # by code point, which is also the order of the UTF-8 bytes


def _token_fault(token: object) -> str | None:
    if not isinstance(token, str):
        return "non_string_token"
    if not token:
        return "empty_token"
    if "," in token:
        return "comma_in_token"
    if any(character <= " " or character == "\x7f" for character in token):
        return "control_or_whitespace"
    if any("\ud800" <= character <= "\udfff" for character in token):
        return "not_utf8"
    return None


# ---------------------------------------------------------------------------------------------------------------
# Pinned executions: those that require the version of the code they began with

VERSION_PREFIX: Final = "ff.version="


def version_token(version: str) -> str:
    """Return the capability that a worker with this version of the code offers."""
    return f"{VERSION_PREFIX}{version}"


def pinned_version(required: str | None) -> str | None:
    """Return the version that an execution requires; None if it is not pinned."""
    tokens = sorted(token for token in split_tokens(required or "") if token.startswith(VERSION_PREFIX))
    return tokens[0].removeprefix(VERSION_PREFIX) if tokens else None


def with_version(required: str | None, version: str | None) -> str | None:
    """Return a requirement with this version in place of the one that it names; None if nothing is required."""
    tokens = {token for token in split_tokens(required or "") if not token.startswith(VERSION_PREFIX)}
    if version is not None:
        tokens.add(version_token(version))
    return ",".join(sorted(tokens)) or None


# ---------------------------------------------------------------------------------------------------------------
# Capabilities of workers


def check_offer(tokens: Collection[str]) -> InvalidInput | None:
    """Return what is wrong with the capabilities that a worker registers or claims with; None if nothing is."""
    for token in tokens:
        if not token:
            return InvalidInput("capabilities: empty token")
        if "," in token:
            return InvalidInput(f"capabilities: comma in token: {token!r}")
        if has_blank_or_control(token):
            return InvalidInput(f"capabilities: control or whitespace character in token: {token!r}")
    if len(tokens) > MAX_TOKENS:
        return InvalidInput(f"capabilities: more than {MAX_TOKENS} tokens")
    if _joined_bytes(tokens) > MAX_BYTES:
        return InvalidInput(f"capabilities: more than {MAX_BYTES} bytes")
    return None


def check_presented(capabilities: str | Collection[str]) -> InvalidCapabilities | None:
    """Return whether a worker's list is too large for a grant request, given joined or as tokens.

    Empty tokens from stray commas are not counted.
    """
    joined = capabilities if isinstance(capabilities, str) else ",".join(capabilities)
    if len(joined.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        return InvalidCapabilities("worker:too_many_bytes")
    if len(split_tokens(joined)) > MAX_TOKENS:
        return InvalidCapabilities("worker:too_many_tokens")
    return None


@lru_cache(maxsize=1024)
def tokens_of(capabilities: str) -> frozenset[str]:
    """Return the tokens of a comma-joined list, without empty ones from stray commas."""
    return frozenset(split_tokens(capabilities))


def split_tokens(capabilities: str) -> list[str]:
    """Split a comma-joined list into tokens as written, without empty ones."""
    # Only ordinary spaces count as blank: requirements may contain other Unicode spaces.
    return [token for token in capabilities.split(",") if token.strip(" ")]


def _joined_bytes(tokens: Collection[str]) -> int:
    return len(",".join(tokens).encode("utf-8", "surrogatepass"))


# ---------------------------------------------------------------------------------------------------------------
# Matching


def covers(required: str | None, offered: Set[str]) -> bool:
    """True if a worker with these capabilities can run an execution with this requirement."""
    return not required or tokens_of(required) <= offered


def missing(required: str | None, offered: Set[str]) -> str:
    """Return what a worker lacks, sorted and comma-joined; empty if it lacks nothing."""
    return ",".join(sorted(tokens_of(required) - offered)) if required else ""
