"""Identifiers: small types, parsed once at the edge and trusted inside; and the partitions they live on.

An execution id carries its partition in front, `{fp:173}:550e8400-e29b-41d4-a716-446655440000`, so that nobody ever
has to hash it again: an execution stays where it was created, and a flow's members stay with their flow.
"""

from __future__ import annotations

import binascii
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
).fullmatch  # the usual form with a usual number of partitions
_SHORT_EXECUTION = re.compile(
    r"(?:(?:\{?fp:)?(?P<partition>[0-9]+)\}?:)?(?P<uuid>[0-9a-fA-F-]*)"
).fullmatch  # the braces may be left out: a shell would want them quoted
_ANY_UUID = re.compile(r"[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}").fullmatch
_DRESSED_UUID = re.compile(r"urn:uuid:([0-9a-fA-F-]{36})|\{([0-9a-fA-F-]{36})\}").fullmatch
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,4}").fullmatch
_BLANK_OR_CONTROL = re.compile(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff]").search  # half a character is no character


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
    """The UUID in lowercase hyphenated form; `InvalidUuid` when it is none.

    It may be given in either case, with or without hyphens, in braces, or as `urn:uuid:…`.
    """
    if _CANONICAL_UUID(text):
        return text
    dressed = _DRESSED_UUID(text)
    bare = text if dressed is None else dressed[1] or dressed[2]
    if not _ANY_UUID(bare):
        raise InvalidUuid(f"{field}: not a UUID: {text!r}", field=field)
    return _hyphenated(bare.replace("-", "").lower())


def parse_execution_id(text: str) -> ExecutionId:
    """The id, letter for letter as given; `MissingTag`, `InvalidPartitionIndex` or `InvalidUuid` otherwise."""
    if _CANONICAL_EXECUTION(text):
        return ExecutionId(text)
    close = text.find("}:", 4) if text.startswith("{fp:") else -1
    if close < 0:
        raise MissingTag(f"execution_id is missing the `{{fp:N}}:` hash-tag prefix: {text}")
    if _index(text[4:close]) is None:
        raise InvalidPartitionIndex(f"execution_id partition index is not a valid u16: {text}")
    if not _ANY_UUID(text, close + 2):
        raise InvalidUuid(f"execution_id UUID suffix is not a valid UUID: {text}", field="execution_id")
    return ExecutionId(text)


class NotAShortId(InvalidInput):
    """A shortened execution id is its beginning: {fp:86}:019a9f3c, 86:019a9f3c or 019a9f3c."""


def id_prefixes(text: str, counts: PartitionCounts) -> list[str]:
    """How execution ids begin that a shortened id may stand for; `NotAShortId` when it is none.

    With a partition that is one prefix, without one it is one for each partition of flows.
    """
    short = _SHORT_EXECUTION(text.strip())
    digits = "" if short is None else short["uuid"].replace("-", "").lower()
    if short is None or len(digits) > 32 or not (digits or short["partition"]):
        raise NotAShortId(f"execution_id: {text!r} is no id and no beginning of one")
    if short["partition"] and _index(short["partition"]) is None:
        raise InvalidPartitionIndex(f"execution_id partition index is not a valid u16: {text}")
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    begins = "-".join(part for part in parts if part)
    if short["partition"]:
        return [f"{{fp:{short['partition']}}}:{begins}"]
    return [f"{{fp:{partition}}}:{begins}" for partition in range(counts.flow)]


def is_canonical_execution_id(text: str) -> bool:
    """Whether this is an execution id as we write them ourselves."""
    return _CANONICAL_EXECUTION(text) is not None


def partition_of(execution_id: ExecutionId) -> int:
    """The partition an execution lives on, read from its id (which has been parsed before)."""
    return int(execution_id[4 : execution_id.index("}")])


def uuid_of(execution_id: ExecutionId) -> str:
    """The bare UUID of an execution id, as it was given."""
    return execution_id[execution_id.index("}") + 2 :]


def _index(text: str) -> int | None:
    """An unsigned 16-bit number in the one way to write it, else None."""
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
    """1 to 64 printable ASCII bytes; else `LaneIdEmpty`, `LaneIdTooLong` or `LaneIdNonPrintable`."""
    if text.isascii() and text.isprintable() and 0 < len(text) <= MAX_LANE_BYTES:
        return LaneId(text)
    if not text:
        raise LaneIdEmpty("lane_id: empty")
    length = len(text.encode("utf-8", "surrogatepass"))
    if length > MAX_LANE_BYTES:
        raise LaneIdTooLong(f"lane_id: too long: {length} bytes", length=length)
    # Everything before the first offender is ASCII, so its place among the characters is its place among the bytes.
    place = next(place for place, character in enumerate(text) if not " " <= character <= "~")
    raise LaneIdNonPrintable(f"lane_id: non-printable byte at index {place}", index=place)


def parse_worker_id(text: str) -> WorkerId:
    """A worker's name: 1 to 256 bytes without control or whitespace characters; else `InvalidInput`."""
    return WorkerId(_plain_name(text, "worker_id"))


def parse_worker_instance_id(text: str) -> WorkerInstanceId:
    """The name of one incarnation of a worker, under the same rule as the worker's own."""
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
    """Whether any character is whitespace or a control character, in Unicode's sense, or half a surrogate pair."""
    return _BLANK_OR_CONTROL(text) is not None


# ---------------------------------------------------------------------------------------------------------------
# Partitions


class PartitionFamily(StrEnum):
    """What a partition holds. Executions live on the partitions of flows."""

    FLOW = "fp"
    BUDGET = "b"
    QUOTA = "q"


class MissingBraces(InvalidInput):
    """A partition key stands in braces."""


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
        """The opaque tag that travels in grants, e.g. `{fp:7}`."""
        return PartitionKey(f"{{{self.family.value}:{self.index}}}")


def parse_partition_key(text: str) -> Partition:
    """Read a tag; `MissingBraces`, `MalformedBody`, `UnknownFamilyPrefix` or `InvalidIndex` otherwise."""
    if len(text) < 2 or text[0] != "{" or text[-1] != "}":
        raise MissingBraces(f"partition_key: missing braces: {text!r}")
    prefix, colon, number = text[1:-1].partition(":")
    if not colon:
        raise MalformedBody(f"partition_key: malformed body: {text!r}")
    if prefix not in _FAMILIES:
        raise UnknownFamilyPrefix(f"partition_key: unknown family prefix: {text!r}")
    index = _index(number)
    if index is None:
        raise InvalidIndex(f"partition_key: invalid index: {text!r}")
    return Partition(_FAMILIES[prefix], index)


_FAMILIES = {family.value: family for family in PartitionFamily}


class PartitionCounts(msgspec.Struct, frozen=True):
    """How many partitions a deployment has; fixed for its life, since ids remember the partition they were given."""

    flow: int = 256
    budget: int = 32
    quota: int = 32

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise InvalidInput(f"num_{name}_partitions: must be greater than 0", field=f"num_{name}_partitions")


def crc16(data: bytes) -> int:
    """CRC-16/XMODEM: polynomial 0x1021, starting from 0, nothing reflected, nothing inverted."""
    return binascii.crc_hqx(data, 0)


def flow_partition(flow_id: FlowId, counts: PartitionCounts) -> int:
    """Where a flow and all its members live."""
    return crc16(_uuid_bytes(flow_id)) % counts.flow


def solo_partition(lane: LaneId, counts: PartitionCounts) -> int:
    """Where executions without a flow live: with their lane."""
    return _solo_partition(lane, counts.flow)


@lru_cache(maxsize=1024)
def _solo_partition(lane: LaneId, flow_partitions: int) -> int:
    return crc16(lane.encode()) % flow_partitions


def budget_partition(budget_id: BudgetId, counts: PartitionCounts) -> int:
    """Where a budget lives, whichever namespace owns it: an id and its shared namesake are always together."""
    return crc16(_uuid_bytes(budget_id)) % counts.budget


def quota_partition(quota_policy_id: QuotaPolicyId, counts: PartitionCounts) -> int:
    """Where a quota policy lives, whichever namespace owns it."""
    return crc16(_uuid_bytes(quota_policy_id)) % counts.quota


def _uuid_bytes(uuid: str) -> bytes:
    return bytes.fromhex(uuid.replace("-", ""))


# ---------------------------------------------------------------------------------------------------------------
# Minting


class Minter(Protocol):
    """Where fresh identifiers come from."""

    def uuid(self) -> str:
        """A version 4 UUID that nobody has seen before."""

    def ordered_uuid(self) -> str:
        """One that also sorts by when it was minted: keys that grow keep an index in few pages."""

    def change_id(self) -> int:
        """A positive 63-bit number that no other change carries."""


class RandomMinter:
    """Identifiers from the system's randomness, fetched many at a time.

    Safe in threads: taking from the end of a list is one step. Safe after a fork: a child begins with none in stock.
    """

    _uuids: list[str]
    _numbers: list[int]
    _begins: tuple[int, str] = (0, "")  # the last millisecond, and how its identifiers begin

    def __init__(self) -> None:
        self.forget()
        _MINTERS.add(self)

    def uuid(self) -> str:
        """A version 4 UUID that nobody has seen before."""
        try:
            return self._uuids.pop()
        except IndexError:
            self._uuids = _versions_4(os.urandom(16 * _STOCK))
            return _version_4(os.urandom(16).hex())

    def ordered_uuid(self) -> str:
        """A version 7 UUID: the time in milliseconds, then the randomness of a version 4."""
        now = time.time_ns() // 1_000_000
        at, begins = self._begins
        if now != at:  # many are minted within one
            digits = f"{now:012x}"
            begins = f"{digits[:8]}-{digits[8:]}-7"
            self._begins = (now, begins)
        return begins + self.uuid()[15:]

    def change_id(self) -> int:
        """A positive 63-bit number that no other change carries."""
        try:
            return self._numbers.pop()
        except IndexError:
            self._numbers = [number >> 1 or 1 for number in struct.unpack(f"<{_STOCK}Q", os.urandom(8 * _STOCK))]
            return int.from_bytes(os.urandom(8)) >> 1 or 1

    def forget(self) -> None:
        """Give nothing out that was fetched before."""
        self._uuids, self._numbers = [], []


_STOCK: Final = 256
_MINTERS: Final[weakref.WeakSet[RandomMinter]] = weakref.WeakSet()


def _forget_in_child() -> None:
    # Told by the system rather than by asking for the process id: that takes longer than minting.
    for minter in _MINTERS:
        minter.forget()


os.register_at_fork(after_in_child=_forget_in_child)


class SeededMinter:
    """The same identifiers in the same order for the same seed, for tests and simulated worlds."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def uuid(self) -> str:
        return _version_4(f"{self._random.getrandbits(128):032x}")

    def ordered_uuid(self) -> str:
        return self.uuid()  # its order is that of the seed, not of time

    def change_id(self) -> int:
        return self._random.getrandbits(63) or 1


_VARIANT: Final = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def _version_4(digits: str) -> str:
    # Formatted by hand: half the time of uuid.UUID, and this runs twice per claim.
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{_VARIANT[digits[16]]}{digits[17:20]}-{digits[20:]}"


def _versions_4(data: bytes) -> list[str]:
    """The same for many, put together as bytes: a third of the time of one after the other."""
    drawn = bytearray(data)
    drawn[6::16] = drawn[6::16].translate(_AS_VERSION)
    drawn[8::16] = drawn[8::16].translate(_AS_VARIANT)
    return b" ".join(map(b"-".join, _GROUPS.iter_unpack(drawn.hex().encode()))).decode().split(" ")


_GROUPS: Final = struct.Struct("8s4s4s4s12s")
_AS_VERSION: Final = bytes(byte & 0x0F | 0x40 for byte in range(256))
_AS_VARIANT: Final = bytes(byte & 0x3F | 0x80 for byte in range(256))


def mint_for_flow(flow_id: FlowId, counts: PartitionCounts, minter: Minter) -> ExecutionId:
    """A new id for a member of a flow."""
    return ExecutionId(f"{{fp:{flow_partition(flow_id, counts)}}}:{minter.ordered_uuid()}")


def mint_solo(lane: LaneId, counts: PartitionCounts, minter: Minter) -> ExecutionId:
    """A new id for an execution without a flow."""
    return ExecutionId(f"{{fp:{solo_partition(lane, counts)}}}:{minter.ordered_uuid()}")


def execution_id_for_flow(flow_id: FlowId, counts: PartitionCounts, uuid: str) -> ExecutionId:
    """The id of a flow's member with a UUID of the caller's choice; stable while the partition count is."""
    return ExecutionId(f"{{fp:{flow_partition(flow_id, counts)}}}:{parse_uuid(uuid)}")


def execution_id_for_lane(lane: LaneId, counts: PartitionCounts, uuid: str) -> ExecutionId:
    """The id of a solo execution with a UUID of the caller's choice; stable while the partition count is."""
    return ExecutionId(f"{{fp:{solo_partition(lane, counts)}}}:{parse_uuid(uuid)}")


# ---------------------------------------------------------------------------------------------------------------
# Spreading


def fnv1a_64(data: bytes) -> int:
    """FNV-1a in 64 bits: quick and well spread, no secret kept by it."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def scan_jitter(name: str, modulus: int) -> int:
    """Where a scanner of this name starts among `modulus` places, so that scanners do not march in step."""
    return (fnv1a_64(name.encode()) & 0xFFFF) % modulus if modulus > 0 else 0


def digest8(text: str) -> str:
    """Eight hex digits that stand for a text in names and logs."""
    value = fnv1a_64(text.encode())
    return f"{(value & 0xFFFFFFFF) ^ (value >> 32):08x}"
