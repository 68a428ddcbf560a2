"""Parameter encoding: a column is sent as one value if all rows agree, else as a list, and this choice is remembered.

A column that once differed within a batch is a list from then on, and a column that was once set is always sent. So the
shapes of statements only grow, soon stay the same, and each statement is prepared once.

Lists of texts and of integers are sent as one text that the server splits. The driver needs 75 µs for an array of a
hundred texts and 2 µs for one text of the same length; the server needs about the same for both. A list with a text
that contains a separator is sent as an array, and so is its column from then on.

A change that is committed alone has shapes of its own. It has mostly one row per shape, so none of its columns has to
be a list, however different the rows of larger batches are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import count
from operator import ne
from typing import Any

from flowfabric.model.instant import FromNow
from flowfabric.stores.codec import STORED_AS_IS, QueueEncoder, encode
from flowfabric.stores.postgres.sql import ParameterNumbering
from flowfabric.stores.verdicts import Unstorable

# The encoding of a column is a set of these flags; 0 if no row sets the column.
HAS_VALUES = 1  # some rows hold values
HAS_OFFSETS = 2  # some rows hold offsets from the store's time
IS_LIST = 4  # the rows differ
AS_ARRAY = 8  # the list cannot be sent as one text

VALUE_LIST = HAS_VALUES | IS_LIST
CHANGE_NUMBERS = VALUE_LIST

_INTEGER_TYPES = frozenset({"smallint", "int", "integer", "bigint"})
_SEPARATOR, _NULL = "\x1f", "\x1e"
_NO_VALUE = frozenset({FromNow, type(None)})


def list_parameter(parameters: ParameterNumbering, kind: str, encoding: int) -> str:
    """Return the SQL expression for the array of a list that is sent as the next parameter."""
    if kind in _INTEGER_TYPES or (kind == "text" and not encoding & AS_ARRAY):
        return array_from_text(kind, parameters.add("text"))
    return parameters.add(f"{kind}[]")


def array_from_text(kind: str, text: str) -> str:
    """Return the SQL expression that splits a text into an array of texts or integers."""
    if kind == "text":
        return f"string_to_array({text}, E'\\x1f', E'\\x1e')"
    return f"string_to_array({text}, ' ', '-')::{kind}[]"


def encode_list(kind: str, values: Sequence[Any]) -> tuple[int, Any]:
    """Encode a list without nulls; return its encoding and the parameter's value."""
    if kind in _INTEGER_TYPES:
        return VALUE_LIST, " ".join(map(str, values))
    text = join_texts(values) if kind == "text" else None
    return (VALUE_LIST | AS_ARRAY, values) if text is None else (VALUE_LIST, text)


class MixedTimeEncoding(Exception):
    """A shared column of a bulk insert holds an instant now and held an offset before, or the other way round."""


class ParameterShapes:
    """Remembers the encodings of the columns of each shape."""

    def __init__(self, encode_queue: QueueEncoder, *, single: bool = False) -> None:
        """`single` shapes are for changes that are committed alone."""
        self._encode_queue = encode_queue
        self._is_single = single
        self._encodings: dict[Any, list[int]] = {}

    @cached_property
    def single(self) -> ParameterShapes:
        """The shapes of changes that are committed alone."""
        return ParameterShapes(self._encode_queue, single=True)

    def encode_columns(
        self,
        shape: Any,
        kinds: Sequence[str],
        numbers: Sequence[int],
        columns: Iterable[Sequence[Any]],
        *,
        always_list: int | None = 0,
    ) -> tuple[bool, tuple[int, ...], list[Any]]:
        """Encode rows; return whether change numbers are implicit, the encodings, and the values (single, then lists).

        `numbers` are the change numbers of the rows. The column `always_list` is a list even if its values agree,
        because one list has to determine the number of rows; None if the change numbers are that list. A change that is
        committed alone does not need it: one row needs no list, and several rows send their change numbers.
        """
        encodings = self._encodings.get(shape)
        if encodings is None:
            encodings = self._encodings[shape] = [0] * (1 + len(kinds))
            if not self._is_single:
                encodings[0 if always_list is None else always_list + 1] = (
                    CHANGE_NUMBERS if always_list is None else IS_LIST
                )
        single: list[Any] = []
        lists: list[Any] = []
        if encodings[0] or any(map(ne, numbers, count(1))):
            encodings[0] = CHANGE_NUMBERS
            lists.append(" ".join(map(str, numbers)))
        one_row = len(numbers) == 1
        for index, values in enumerate(columns, start=1):
            encoding = encodings[index]
            first = values[0]
            if one_row and encoding < IS_LIST:  # a fast path: most columns of most changes at low load
                if first is None:
                    if encoding:
                        single.append(None)
                    continue
                if encoding == HAS_VALUES and type(first) in STORED_AS_IS:
                    single.append(first)
                    continue
            if not encoding & IS_LIST and values.count(first) == len(values):
                if first is None:
                    if encoding:
                        single.append(None)
                    continue
                encoding |= HAS_OFFSETS if type(first) is FromNow else HAS_VALUES
                if encoding != HAS_OFFSETS | HAS_VALUES:
                    encodings[index] = encoding
                    single.append(self._encode(first))
                    continue
            # The rows differ, or they hold a value now and held an offset before.
            encodings[index] = self._append_list(kinds[index - 1], encoding | IS_LIST, values, lists)
        return not encodings[0], tuple(encodings[1:]), single + lists

    def encode_bulk_insert(
        self, shape: Any, kinds: Sequence[str], columns: Iterable[Sequence[Any]], listed: frozenset[int]
    ) -> tuple[tuple[int, ...], list[Any]]:
        """Encode a bulk insert; return the encodings of its columns and the values (single, then lists).

        The columns at the indexes `listed` are lists, the others hold one value each. Raises `MixedTimeEncoding` if
        such a value is an instant and was an offset before, or the other way round.
        """
        encodings = self._encodings.setdefault(shape, [0] * len(kinds))
        single: list[Any] = []
        lists: list[Any] = []
        for index, values in enumerate(columns):
            encoding = encodings[index]
            if index in listed:
                encodings[index] = self._append_list(kinds[index], encoding | IS_LIST, values, lists)
            elif (value := values[0]) is not None:
                encoding |= HAS_OFFSETS if type(value) is FromNow else HAS_VALUES
                if encoding == HAS_OFFSETS | HAS_VALUES:
                    raise MixedTimeEncoding
                encodings[index] = encoding
                single.append(self._encode(value))
            elif encoding:
                single.append(None)
        return tuple(encodings), single + lists

    def _append_list(self, kind: str, encoding: int, values: Sequence[Any], lists: list[Any]) -> int:
        """Append the encoded values to `lists`; return the column's new encoding."""
        if kind == "text":
            encoding |= HAS_VALUES
            if not encoding & AS_ARRAY:
                text = join_texts(values)
                if text is not None:
                    lists.append(text)
                    return encoding
                encoding |= AS_ARRAY
            lists.append(values)
            return encoding
        if kind not in _INTEGER_TYPES:
            lists.append(values)
            return encoding | HAS_VALUES
        types = set(map(type, values))
        if FromNow in types:
            encoding |= HAS_OFFSETS
        if types - _NO_VALUE:
            encoding |= HAS_VALUES
        if not types.isdisjoint(_NON_INTEGERS):
            raise Unstorable("an integer column accepts integers only")
        if types <= _INTEGERS:
            lists.append(" ".join(map(str, values)))
        else:
            lists.append(" ".join(["-" if value is None else str(self._encode(value)) for value in values]))
        if encoding & HAS_OFFSETS and encoding & HAS_VALUES:
            lists.append([type(value) is FromNow for value in values])
        return encoding

    def _encode(self, value: Any) -> Any:
        """Encode one value; `FromNow` becomes its offset, to which the server adds its time."""
        return value.offset if type(value) is FromNow else encode(value, self._encode_queue)


_INTEGERS = frozenset({int})
_NON_INTEGERS = frozenset({str, bytes, float, bool})


def join_texts(values: Sequence[Any]) -> str | None:
    """Join texts into one that the server can split; None if one of them contains a separator."""
    nulls = values.count(None)
    try:
        text = _SEPARATOR.join([_NULL if value is None else value for value in values] if nulls else values)
    except TypeError as error:
        raise Unstorable("a text column accepts texts only") from error
    if text.count(_SEPARATOR) != len(values) - 1 or text.count(_NULL) != nulls or not text:
        return None
    return text
