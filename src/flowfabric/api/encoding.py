"""Shapes of the wire that several routes share: identifiers, bytes, handles, variants."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from flowfabric import errors
from flowfabric.handles import SIGNATURE_BYTES, Handle, HandleKind, decode_handle
from flowfabric.server.routing import QueryParam

MAX_WAIT_MS = 30_000  # how long a request may wait on purpose

Octet = Annotated[int, Meta(ge=0, le=255)]
Octets = list[Octet]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
U16 = Annotated[int, Meta(ge=0, le=2**16 - 1)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
I64 = Annotated[int, Meta(ge=-(2**63) + 1, le=2**63 - 1)]

CURSOR_PARAM = QueryParam("cursor", {"type": "string"})
LIMIT_PARAM = QueryParam("limit", {"type": "integer", "minimum": 0})
NAMESPACE_PARAM = QueryParam("namespace", {"type": "string"})


class RedactedRepr:
    """For what carries a token or a secret: printed, it tells its name and nothing else."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class RequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request's body. Unknown fields are passed over, and what a caller's clock says (`now`) decides nothing."""

    def to_kwargs(self, *but: str) -> dict[str, Any]:
        """The fields by name, for a verb that calls them the same."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name != "now" and name not in but}


def check_ids(parse: Callable[[str], Any], *texts: str | None) -> None:
    """Refuse a body with an identifier that is none (422, as any other wrong shape)."""
    for text in texts:
        if text is not None:
            try:
                parse(text)
            except errors.InvalidInput as fault:
                raise ValueError(fault.detail) from None


def decode_octets(name: str, given: list[int] | UnsetType | None, base64_form: bytes | None) -> bytes | None:
    """Bytes given as numbers, or in base64 beside them; not both."""
    if base64_form is not None:
        if given is not UNSET and given is not None:
            raise ValueError(f"{name} is given twice")
        return base64_form
    return None if given is UNSET or given is None else bytes(given)


# ---------------------------------------------------------------------------------------------------------------
# Handles

HANDLE_NOT_OURS = "handle: not one of ours"


def handle_to_text(handle: Handle, signature: bytes) -> str:
    """A handle as text: its kind, then its bytes and the signature in base64."""
    return f"{handle.kind.value}.{base64.urlsafe_b64encode(handle.opaque + signature).decode()}"


def handle_from_text(text: str) -> Handle:
    """A handle from its text; its backend is the one in its bytes. Its signature is not checked here."""
    kind, dot, rest = text.partition(".")
    try:
        if not dot:
            raise ValueError("no kind")
        signed = base64.b64decode(rest, altchars=b"-_", validate=True)
        opaque, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
        return Handle(decode_handle(opaque)[0], HandleKind(kind), opaque, signature)
    except (ValueError, binascii.Error, errors.Corruption):
        raise errors.Corruption(HANDLE_NOT_OURS) from None


class HolderRequest(RequestBody, frozen=True):
    """What the holder of a lease says. The server checks the handle before a route sees the request (`Ask.holder`)."""

    handle: str


# ---------------------------------------------------------------------------------------------------------------
# Variants, for the documents


class VariantSchema(msgspec.Struct, frozen=True):
    """One of several answers, each an object with one key, its name, or the bare name of one without fields."""

    variants: tuple[tuple[str, Any], ...]


def variant_name(kind: type) -> str:
    """Return the name of a variant on the wire: `variant` of the class, or the name of the class."""
    name: str = getattr(kind, "variant", kind.__name__)
    return name


def one_of(*types: Any, **named: Any) -> VariantSchema:
    """Variants by the names of their types, or by others."""
    return VariantSchema((*((variant_name(each), each) for each in types), *named.items()))
