"""Encodings that several schemas share: integers, bytes, identifiers, handles, names of variants.

A response that can be one of several structs is sent as an object with one key, the name of the variant, or as the bare
name if the struct has no fields.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from flowfabric import errors, ids
from flowfabric.handles import SIGNATURE_BYTES, Handle, HandleKind, decode_handle

MAX_WAIT_MS = 30_000  # the longest long poll

# Largest request bodies in bytes.
CREATE_LIMIT = 1_048_576
WORK_LIMIT = 4 * 1_048_576  # results and batches of frames
BULK_LIMIT = 16 * 1_048_576

Octet = Annotated[int, Meta(ge=0, le=255)]
Octets = list[Octet]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
U16 = Annotated[int, Meta(ge=0, le=2**16 - 1)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
I64 = Annotated[int, Meta(ge=-(2**63) + 1, le=2**63 - 1)]


class RedactedRepr:
    """Prints only the class name, for structs that carry a token or a secret."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class RequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request body. Unknown fields are ignored, and so is the caller's clock (`now`).

    A malformed identifier is refused when the body is decoded, and so are bytes that are sent in both ways.
    """

    uuid_fields: ClassVar[tuple[str, ...]] = ()
    execution_id_fields: ClassVar[tuple[str, ...]] = ()
    octets_field: ClassVar[str | None] = None  # bytes that may be sent as numbers, or under its name with `_b64`

    def __post_init__(self) -> None:
        check_ids(ids.parse_uuid, *(getattr(self, name) for name in self.uuid_fields))
        check_ids(ids.parse_execution_id, *(getattr(self, name) for name in self.execution_id_fields))
        if (name := self.octets_field) is not None:
            decode_octets(name, getattr(self, name), getattr(self, f"{name}_b64"))

    def to_kwargs(self, *excluded: str) -> dict[str, Any]:
        """Return the fields by name, as keywords for an engine operation with the same names."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name != "now" and name not in excluded}


def check_ids(parse: Callable[[str], Any], *texts: str | None) -> None:
    """Raise ValueError if an identifier is malformed; the server answers 422, as for any other wrong shape."""
    for text in texts:
        if text is not None:
            try:
                parse(text)
            except errors.InvalidInput as fault:
                raise ValueError(fault.detail) from None


def decode_octets(name: str, octets: list[int] | UnsetType | None, encoded: bytes | None) -> bytes | None:
    """Return bytes that were sent as numbers or in base64; raise ValueError if both were sent."""
    if encoded is not None:
        if octets is not UNSET and octets is not None:
            raise ValueError(f"{name} is given twice")
        return encoded
    return None if octets is UNSET or octets is None else bytes(octets)


HANDLE_NOT_OURS = "handle: not a handle of this system"


def handle_to_text(handle: Handle, signature: bytes) -> str:
    """Encode a handle: its kind, a dot, then its bytes and signature in base64."""
    return f"{handle.kind.value}.{base64.urlsafe_b64encode(handle.opaque + signature).decode()}"


def handle_from_text(text: str) -> Handle:
    """Decode a handle; the backend is taken from its bytes. The signature is not verified here."""
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
    """A request by the holder of a lease. The server verifies the handle before the route runs (`Request.handle`)."""

    handle: str


def variant_name(kind: type) -> str:
    """Return the name that is sent for a variant: `variant` of the class, or else the name of the class."""
    name: str = getattr(kind, "variant", kind.__name__)
    return name
