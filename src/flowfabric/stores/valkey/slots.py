"""Hash slots: which slot a key belongs to, and which node serves each slot."""

from __future__ import annotations

from binascii import crc_hqx
from typing import TypeAlias

from flowfabric.stores.valkey.session import Reply

SLOTS = 16384

Location: TypeAlias = tuple[str, int]  # host and port
SlotRange: TypeAlias = tuple[int, int, Location]  # first and last slot, and the primary that serves them


def slot_of(key: str | bytes) -> int:
    """Return the slot of a key: of the text in its first braces, if there is any, else of all of it."""
    data = key.encode() if isinstance(key, str) else key
    start = data.find(b"{")
    if start >= 0:
        end = data.find(b"}", start + 1)
        if end > start + 1:
            data = data[start + 1 : end]
    return crc_hqx(data, 0) % SLOTS


def barrier_key(tag: str | bytes) -> bytes:
    """Return a key of the same slot as a tag or key, for a write that only serves to be confirmed."""
    data = tag.encode() if isinstance(tag, str) else tag
    start, end = data.find(b"{"), data.find(b"}")
    return (data[start : end + 1] if 0 <= start < end else b"{%s}" % data) + b":barrier"


def parse_slot_map(reply: Reply, asked: Location) -> list[SlotRange]:
    """Return the ranges of CLUSTER SLOTS; a node that does not know its own host is the one that was asked."""
    ranges: list[SlotRange] = []
    for first, last, primary, *_ in reply:
        host = (primary[0] or b"").decode()
        ranges.append((first, last, (asked[0] if host in ("", "?") else host, primary[1])))
    return ranges


def parse_redirect(text: str, asked: Location) -> tuple[int, Location]:
    """Return slot and target of `MOVED 3999 127.0.0.1:6381`; without a host it is that of the node that replied."""
    _, slot, address = text.split(" ")[:3]
    host, _, port = address.rpartition(":")
    return int(slot), (host.strip("[]") or asked[0], int(port))
