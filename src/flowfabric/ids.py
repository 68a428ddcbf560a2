"""Identifiers: small types, parsed once at the edge and trusted inside; and the partitions they belong to.

An execution id carries its partition as a prefix, `{fp:173}:550e8400-e29b-41d4-a716-446655440000`, so that nobody has
to hash it again: an execution stays on the partition where it was created, and members stay with their flow.
"""

from __future__ import annotations

import binascii
import hashlib
import os
import random
import re
import struct
import time
import weakref
from enum import StrEnum
from functools import lru_cache
from typing import Final, NewType, Protocol

import msgspec

from flowfabric.errors import InvalidInput

ExecutionId = NewType("ExecutionId", str)
FlowId = NewType("FlowId", str)
LeaseId = NewType("LeaseId", str)
AttemptId = NewType("AttemptId", str)
LaneId = NewType("LaneId", str)
WorkerId = NewType("WorkerId", str)
WorkerInstanceId = NewType("WorkerInstanceId", str)
BudgetId = NewType("BudgetId", str)
QuotaPolicyId = NewType("QuotaPolicyId", str)
PartitionKey = NewType("PartitionKey", str)

MAX_LANE_BYTES: Final = 64
MAX_WORKER_BYTES: Final = 256

_CANONICAL_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").fullmatch
_CANONICAL_EXECUTION = re.compile(
    r"\{fp:(?:0|[1-9][0-9]{0,3})\}:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
).fullmatch  # the common form, with up to 10,000 partitions
# Braces are optional, because a shell would need them quoted.
_SHORT_EXECUTION = re.compile(r"(?:(?:\{?fp:)?(?P<partition>[0-9]+)\}?:)?(?P<uuid>[0-9a-fA-F-]*)").fullmatch
_ANY_UUID = re.compile(r"[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}").fullmatch
_WRAPPED_UUID = re.compile(r"urn:uuid:([0-9a-fA-F-]{36})|\{([0-9a-fA-F-]{36})\}").fullmatch
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,4}").fullmatch
_BLANK_OR_CONTROL = re.compile(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff]").search  # includes lone surrogates


# ---------------------------------------------------------------------------------------------------------------
# UUIDs and execution ids


class InvalidUuid(InvalidInput):
    """This is not a UUID."""

    explained_by_detail = True


class MissingTag(InvalidInput):
    """An execution id begins with its partition, as in {fp:7}:…"""


class InvalidPartitionIndex(InvalidInput):
    """A partition is a plain decimal number from 0 to 65535."""


def parse_uuid(text: str, field: str = "uuid") -> str:
    """Return the UUID in lowercase hyphenated form, or raise `InvalidUuid`.

    Either case is accepted, with or without hyphens, in braces, or as `urn:uuid:…`.
    """
    if _CANONICAL_UUID(text):
        return text
    wrapped = _WRAPPED_UUID(text)
    bare = text if wrapped is None else wrapped[1] or wrapped[2]
    if not _ANY_UUID(bare):
        raise InvalidUuid(f"{field}: not a UUID: {text!r}", field=field)
    return _hyphenated(bare.replace("-", "").lower())


def parse_execution_id(text: str) -> ExecutionId:
    """Return the id exactly as given, or raise `MissingTag`, `InvalidPartitionIndex` or `InvalidUuid`."""
    if _CANONICAL_EXECUTION(text):
        return ExecutionId(text)
    close = text.find("}:", 4) if text.startswith("{fp:") else -1
    if close < 0:
        raise MissingTag(f"execution_id is missing the `{{fp:N}}:` hash-tag prefix: {text}")
    if _parse_u16(text[4:close]) is None:
        raise InvalidPartitionIndex(f"execution_id partition index is not a valid u16: {text}")
    if not _ANY_UUID(text, close + 2):
        raise InvalidUuid(f"execution_id UUID suffix is not a valid UUID: {text}", field="execution_id")
    return ExecutionId(text)


class NotAShortId(InvalidInput):
    """A shortened execution id is its beginning: {fp:86}:019a9f3c, 86:019a9f3c or 019a9f3c."""


def id_prefixes(text: str, counts: PartitionCounts) -> list[str]:
    """Return the prefixes of execution ids that a shortened id may stand for, or raise `NotAShortId`.

    With a partition there is one prefix; without one, one per flow partition.
    """
    short = _SHORT_EXECUTION(text.strip())
    digits = "" if short is None else short["uuid"].replace("-", "").lower()
    if short is None or len(digits) > 32 or not (digits or short["partition"]):
        raise NotAShortId(f"execution_id: {text!r} is no id and no beginning of one")
    if short["partition"] and _parse_u16(short["partition"]) is None:
        raise InvalidPartitionIndex(f"execution_id partition index is not a valid u16: {text}")
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    prefix = "-".join(part for part in parts if part)
    if short["partition"]:
        return [f"{{fp:{short['partition']}}}:{prefix}"]
    return [f"{{fp:{partition}}}:{prefix}" for partition in range(counts.flow)]


def is_canonical_execution_id(text: str) -> bool:
    """True if this is an execution id in the form that we mint."""
    return _CANONICAL_EXECUTION(text) is not None


def partition_of(execution_id: ExecutionId) -> int:
    """Return the partition of an execution, read from its parsed id."""
    return int(execution_id[4 : execution_id.index("}")])


def uuid_of(execution_id: ExecutionId) -> str:
    """Return the bare UUID of an execution id, as it was given."""
    return execution_id[execution_id.index("}") + 2 :]


def _parse_u16(text: str) -> int | None:
    """Parse a canonical unsigned 16-bit decimal; None if it is not one."""
    number = int(text) if _DECIMAL(text) else None
    return number if number is not None and number <= 0xFFFF else None


def _hyphenated(digits: str) -> str:
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


# ---------------------------------------------------------------------------------------------------------------
# Names chosen by people


class LaneIdEmpty(InvalidInput):
    """A lane needs a name."""


class LaneIdTooLong(InvalidInput):
    """A lane's name has at most 64 bytes."""

    length: int


class LaneIdNonPrintable(InvalidInput):
    """A lane's name consists of printable ASCII characters."""

    index: int


def parse_lane_id(text: str) -> LaneId:
    """Return a lane of 1 to 64 printable ASCII bytes, or raise the error that says what is wrong."""
    if text.isascii() and text.isprintable() and 0 < len(text) <= MAX_LANE_BYTES:
        return LaneId(text)
    if not text:
        raise LaneIdEmpty("lane_id: empty")
    length = len(text.encode("utf-8", "surrogatepass"))
    if length > MAX_LANE_BYTES:
        raise LaneIdTooLong(f"lane_id: too long: {length} bytes", length=length)
    # Everything before the first bad character is ASCII, so its character index equals its byte index.
    index = next(index for index, character in enumerate(text) if not " " <= character <= "~")
    raise LaneIdNonPrintable(f"lane_id: non-printable byte at index {index}", index=index)


def parse_worker_id(text: str) -> WorkerId:
    """Return a worker name of 1 to 256 bytes without control or whitespace characters, or raise `InvalidInput`."""
    return WorkerId(_plain_name(text, "worker_id"))


def parse_worker_instance_id(text: str) -> WorkerInstanceId:
    """Return the name of one worker process; the rule is the same as for worker names."""
    return WorkerInstanceId(_plain_name(text, "worker_instance_id"))


def _plain_name(text: str, field: str) -> str:
    if not text:
        raise InvalidInput(f"{field}: empty", field=field)
    if len(text.encode("utf-8", "surrogatepass")) > MAX_WORKER_BYTES:
        raise InvalidInput(f"{field}: more than {MAX_WORKER_BYTES} bytes", field=field)
    if has_blank_or_control(text):
        raise InvalidInput(f"{field}: control or whitespace character", field=field)
    return text


def has_blank_or_control(text: str) -> bool:
    """True if any character is whitespace, a control character in the Unicode sense, or a lone surrogate."""
    return _BLANK_OR_CONTROL(text) is not None


# ---------------------------------------------------------------------------------------------------------------
# Partitions


class PartitionFamily(StrEnum):
    """What a partition holds. Executions are on flow partitions."""

    FLOW = "fp"
    BUDGET = "b"
    QUOTA = "q"


class MissingBraces(InvalidInput):
    """A partition key is enclosed in braces."""


class MalformedBody(InvalidInput):
    """A partition key has a family and an index with a colon between them."""


class UnknownFamilyPrefix(InvalidInput):
    """The partition key's family is none of fp, b and q."""


class InvalidIndex(InvalidInput):
    """A partition key's index is a plain decimal number from 0 to 65535."""


class Partition(msgspec.Struct, frozen=True):
    """One partition of a family."""

    family: PartitionFamily
    index: int

    @property
    def key(self) -> PartitionKey:
        """The opaque key that grants carry, e.g. `{fp:7}`."""
        return PartitionKey(f"{{{self.family.value}:{self.index}}}")


def parse_partition_key(text: str) -> Partition:
    """Parse a partition key, or raise the error that says what is wrong."""
    if len(text) < 2 or text[0] != "{" or text[-1] != "}":
        raise MissingBraces(f"partition_key: missing braces: {text!r}")
    prefix, colon, number = text[1:-1].partition(":")
    if not colon:
        raise MalformedBody(f"partition_key: malformed body: {text!r}")
    if prefix not in _FAMILIES:
        raise UnknownFamilyPrefix(f"partition_key: unknown family prefix: {text!r}")
    index = _parse_u16(number)
    if index is None:
        raise InvalidIndex(f"partition_key: invalid index: {text!r}")
    return Partition(_FAMILIES[prefix], index)


_FAMILIES = {family.value: family for family in PartitionFamily}


class PartitionCounts(msgspec.Struct, frozen=True):
    """The numbers of partitions of a deployment; they never change, because ids contain their partition."""

    flow: int = 256
    budget: int = 32
    quota: int = 32

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise InvalidInput(f"num_{name}_partitions: must be greater than 0", field=f"num_{name}_partitions")


DEFAULT_PARTITIONS: Final = PartitionCounts()


def crc16(data: bytes) -> int:
    """Return the CRC-16/XMODEM: polynomial 0x1021, initial value 0, not reflected, not inverted."""
    return binascii.crc_hqx(data, 0)


def flow_partition(flow_id: FlowId, counts: PartitionCounts) -> int:
    """Return the partition of a flow and all its members."""
    return crc16(_uuid_bytes(flow_id)) % counts.flow


def solo_partition(lane: LaneId, counts: PartitionCounts) -> int:
    """Return the partition of executions without a flow, which follows from their lane."""
    return _solo_partition(lane, counts.flow)


@lru_cache(maxsize=1024)
def _solo_partition(lane: LaneId, flow_partitions: int) -> int:
    return crc16(lane.encode()) % flow_partitions


def lane_partitions(lane: LaneId, spread: int, counts: PartitionCounts) -> tuple[int, ...]:
    """Return the partitions of a lane with this spread; those of a smaller spread are among them, in the same order."""
    return _lane_partitions(lane, counts.flow)[:spread]


_SLOTS = 16384  # slots of a Valkey cluster


@lru_cache(maxsize=256)
def _lane_partitions(lane: LaneId, flow_partitions: int) -> tuple[int, ...]:
    # The partitions form a ring in the order of their slots on a cluster of Valkey. First comes the one of a lane of
    # spread 1, then the opposite one, then those halfway between: so any number of them is on all nodes evenly.
    ring = sorted(range(flow_partitions), key=lambda partition: crc16(f"fp:{partition}".encode()) % _SLOTS)
    start = ring.index(_solo_partition(lane, flow_partitions))
    bits = (flow_partitions - 1).bit_length()
    reversed_bits = (int(f"{number:0{bits}b}"[::-1], 2) if bits else 0 for number in range(1 << bits))
    return tuple(ring[(start + step) % flow_partitions] for step in reversed_bits if step < flow_partitions)


def key_partition(lane: LaneId, spread: int, counts: PartitionCounts, key: str) -> int:
    """Return the partition of a run with this idempotency key in a lane with this spread."""
    if spread == 1:
        return solo_partition(lane, counts)
    partitions = lane_partitions(lane, spread, counts)
    return partitions[hash_number(key) % len(partitions)]


def budget_partition(budget_id: BudgetId, counts: PartitionCounts) -> int:
    """Return the partition of a budget. It does not depend on the namespace, so an id and its shared namesake are
    together."""
    return crc16(_uuid_bytes(budget_id)) % counts.budget


def quota_partition(quota_policy_id: QuotaPolicyId, counts: PartitionCounts) -> int:
    """Return the partition of a quota policy. It does not depend on the namespace."""
    return crc16(_uuid_bytes(quota_policy_id)) % counts.quota


def _uuid_bytes(uuid: str) -> bytes:
    return bytes.fromhex(uuid.replace("-", ""))


# ---------------------------------------------------------------------------------------------------------------
# Minting


class Minter(Protocol):
    """A source of new identifiers."""

    def uuid(self) -> str:
        """Return a new version 4 UUID."""

    def ordered_uuid(self) -> str:
        """Return a UUID that sorts by the time it was minted, which keeps index inserts in few pages."""

    def change_id(self) -> int:
        """Return a positive 63-bit number that no other change has."""


class RandomMinter:
    """Identifiers from the system's randomness, fetched in batches.

    Thread-safe: popping from a list is atomic. Fork-safe: a child process starts with an empty stock.
    """

    _uuids: list[str]
    _numbers: list[int]
    _prefix: tuple[int, str] = (0, "")  # the last millisecond and the prefix of its identifiers

    def __init__(self) -> None:
        self.forget()
        _MINTERS.add(self)

    def uuid(self) -> str:
        """Return a new version 4 UUID."""
        try:
            return self._uuids.pop()
        except IndexError:
            self._uuids = _versions_4(os.urandom(16 * _STOCK))
            return _version_4(os.urandom(16).hex())

    def ordered_uuid(self) -> str:
        """Return a version 7 UUID: the time in milliseconds, then the random part of a version 4."""
        now = time.time_ns() // 1_000_000
        at, prefix = self._prefix
        if now != at:  # many are minted per millisecond
            digits = f"{now:012x}"
            prefix = f"{digits[:8]}-{digits[8:]}-7"
            self._prefix = (now, prefix)
        return prefix + self.uuid()[15:]

    def change_id(self) -> int:
        """Return a positive 63-bit number that no other change has."""
        try:
            return self._numbers.pop()
        except IndexError:
            self._numbers = [number >> 1 or 1 for number in struct.unpack(f"<{_STOCK}Q", os.urandom(8 * _STOCK))]
            return int.from_bytes(os.urandom(8)) >> 1 or 1

    def forget(self) -> None:
        """Discard everything that was fetched."""
        self._uuids, self._numbers = [], []


_STOCK: Final = 256
_MINTERS: Final[weakref.WeakSet[RandomMinter]] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A fork hook, because comparing process ids would take longer than minting.
    for minter in _MINTERS:
        minter.forget()


os.register_at_fork(after_in_child=_forget_in_child)


class SeededMinter:
    """Mints the same identifiers in the same order for the same seed, for tests and simulations."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def uuid(self) -> str:
        return _version_4(f"{self._random.getrandbits(128):032x}")

    def ordered_uuid(self) -> str:
        return self.uuid()  # not ordered by time

    def change_id(self) -> int:
        return self._random.getrandbits(63) or 1


_VARIANT: Final = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def _version_4(digits: str) -> str:
    # Formatted by hand, which takes half the time of uuid.UUID; this runs twice per claim.
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{_VARIANT[digits[16]]}{digits[17:20]}-{digits[20:]}"


def _versions_4(data: bytes) -> list[str]:
    """Return many version 4 UUIDs, assembled as bytes in a third of the time of one by one."""
    drawn = bytearray(data)
    drawn[6::16] = drawn[6::16].translate(_AS_VERSION)
    drawn[8::16] = drawn[8::16].translate(_AS_VARIANT)
    return b" ".join(map(b"-".join, _GROUPS.iter_unpack(drawn.hex().encode()))).decode().split(" ")


_GROUPS: Final = struct.Struct("8s4s4s4s12s")
_AS_VERSION: Final = bytes(byte & 0x0F | 0x40 for byte in range(256))
_AS_VARIANT: Final = bytes(byte & 0x3F | 0x80 for byte in range(256))


def mint_for_flow(flow_id: FlowId, counts: PartitionCounts, minter: Minter) -> ExecutionId:
    """Mint an id for a member of a flow."""
    return ExecutionId(f"{{fp:{flow_partition(flow_id, counts)}}}:{minter.ordered_uuid()}")


def mint_solo(
    lane: LaneId, counts: PartitionCounts, minter: Minter, *, spread: int = 1, key: str | None = None
) -> ExecutionId:
    """Mint an id for an execution without a flow: on the partition of its key, or on any partition of its lane."""
    uuid = minter.ordered_uuid()
    if key:
        partition = key_partition(lane, spread, counts, key)
    elif spread == 1:
        partition = solo_partition(lane, counts)
    else:
        partitions = lane_partitions(lane, spread, counts)
        partition = partitions[int(uuid[-8:], 16) % len(partitions)]  # the random part of the UUID
    return ExecutionId(f"{{fp:{partition}}}:{uuid}")


def execution_id_for_flow(flow_id: FlowId, counts: PartitionCounts, uuid: str) -> ExecutionId:
    """Return the id of a flow's member with a given UUID; stable while the partition count is."""
    return ExecutionId(f"{{fp:{flow_partition(flow_id, counts)}}}:{parse_uuid(uuid)}")


def execution_id_for_lane(lane: LaneId, counts: PartitionCounts, uuid: str) -> ExecutionId:
    """Return the id of an execution without a flow with a given UUID; stable while the partition count is."""
    return ExecutionId(f"{{fp:{solo_partition(lane, counts)}}}:{parse_uuid(uuid)}")


# ---------------------------------------------------------------------------------------------------------------
# Hashing


def fnv1a_64(data: bytes) -> int:
    """Return the 64-bit FNV-1a hash: fast and well distributed, but not cryptographic."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def hash_number(text: str) -> int:
    """Return a well distributed 64-bit number that is the same in every process and release."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8])


def scan_jitter(name: str, modulus: int) -> int:
    """Return the start offset of a scanner among `modulus` slots, so that scanners do not run in lockstep."""
    return (fnv1a_64(name.encode()) & 0xFFFF) % modulus if modulus > 0 else 0


def digest8(text: str) -> str:
    """Return eight hex digits that identify a text in names and logs."""
    value = fnv1a_64(text.encode())
    return f"{(value & 0xFFFFFFFF) ^ (value >> 32):08x}"
