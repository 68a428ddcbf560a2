"""Capabilities: what an execution requires of the worker that runs it.

A capability is an opaque, case-sensitive token. Matching is set inclusion, so an execution that requires nothing fits
every worker. Requirements are kept as text: sorted, joined by commas, each token once.
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
# What an execution requires


def required_capabilities(policy: Mapping[str, object]) -> str:
    """The requirement named by a policy document, ready to be stored; empty when it names none.

    Raises `InvalidPolicyJson` or `InvalidCapabilities` for the first thing that is wrong with it.
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
        if wrong := _fault(token):
            raise InvalidCapabilities(f"required:{wrong}")
    if len(required) > MAX_TOKENS:
        raise InvalidCapabilities("required:too_many_tokens")
    if _joined_bytes(required) > MAX_BYTES:
        raise InvalidCapabilities("required:too_many_bytes")
    return ",".join(sorted(set(required)))  # by code point, which is the order of the UTF-8 bytes too


def _fault(token: object) -> str | None:
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
# What a worker offers


def check_offer(tokens: Collection[str]) -> InvalidInput | None:
    """What is wrong with the capabilities a worker connects or asks for work with; None when nothing is."""
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
    """What is wrong with the size of a worker's list when a grant is asked for, joined by commas or still apart.

    The blanks that stray commas leave behind are not counted.
    """
    joined = capabilities if isinstance(capabilities, str) else ",".join(capabilities)
    if len(joined.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        return InvalidCapabilities("worker:too_many_bytes")
    if len(split_tokens(joined)) > MAX_TOKENS:
        return InvalidCapabilities("worker:too_many_tokens")
    return None


@lru_cache(maxsize=1024)
def tokens_of(capabilities: str) -> frozenset[str]:
    """The tokens of a comma-joined list; the blanks that stray commas leave behind are no tokens."""
    return frozenset(split_tokens(capabilities))


def split_tokens(capabilities: str) -> list[str]:
    """The tokens of a comma-joined list as they stand there, without the blanks."""
    # Only ordinary spaces are blank here: a rarer one is a character like any other in what an execution requires.
    return [token for token in capabilities.split(",") if token.strip(" ")]


def _joined_bytes(tokens: Collection[str]) -> int:
    return len(",".join(tokens).encode("utf-8", "surrogatepass"))


# ---------------------------------------------------------------------------------------------------------------
# Matching


def covers(required: str | None, offered: Set[str]) -> bool:
    """Whether a worker with these capabilities can run an execution with this requirement."""
    return not required or tokens_of(required) <= offered


def missing(required: str | None, offered: Set[str]) -> str:
    """What a worker lacks, sorted and comma-joined; empty when it lacks nothing."""
    return ",".join(sorted(tokens_of(required) - offered)) if required else ""
