"""How columns travel: one value for all rows where they agree, else a list; and what is remembered of that.

A column that once differed within a batch is a list from then on, and one that was once set is always sent. So the
shapes of statements only grow, soon stay the same, and each statement is prepared once.

Lists of texts and of whole numbers travel as one text that the server splits. The driver needs 75 µs for an array of a
hundred texts and 2 µs for one text as long as all of them; the server needs about the same for both. A list with a
text that contains a separator travels as an array, and so does its column from then on.

A change that is written alone has habits of its own. Its rows are mostly one of a kind, so that nothing of them has to
be a list, however different the rows of larger batches are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import count
from operator import ne
from typing import Any

from flowfabric.model.change import FromNow
from flowfabric.stores.codec import STORED_AS_IS, QueueEncoder, encode
from flowfabric.stores.port import Unstorable
from flowfabric.stores.postgres.sql import ParameterNumbering

# The habit of a column is a sum of these; nothing at all when no row sets it.
HAS_VALUES = 1  # some are values
HAS_OFFSETS = 2  # some are offsets from the store's now
IS_LIST = 4  # they are not all the same
AS_ARRAY = 8  # they cannot travel as one text

VALUE_LIST = HAS_VALUES | IS_LIST
CHANGE_NUMBERS = VALUE_LIST

_WHOLE = frozenset({"smallint", "int", "integer", "bigint"})
_SEPARATOR, _UNSET = "\x1f", "\x1e"
_NO_VALUE = frozenset({FromNow, type(None)})


def list_parameter(parameters: ParameterNumbering, kind: str, habit: int) -> str:
    """The array that a list becomes, in the words of the server."""
    if kind in _WHOLE or (kind == "text" and not habit & AS_ARRAY):
        return array_from_text(kind, parameters.add("text"))
    return parameters.add(f"{kind}[]")


def array_from_text(kind: str, text: str) -> str:
    """The array of texts or whole numbers that a text stands for."""
    if kind == "text":
        return f"string_to_array({text}, E'\\x1f', E'\\x1e')"
    return f"string_to_array({text}, ' ', '-')::{kind}[]"


def encode_list(kind: str, values: Sequence[Any]) -> tuple[int, Any]:
    """A list of values without gaps as it travels, and the habit that says so."""
    if kind in _WHOLE:
        return VALUE_LIST, " ".join(map(str, values))
    text = join_texts(values) if kind == "text" else None
    return (VALUE_LIST | AS_ARRAY, values) if text is None else (VALUE_LIST, text)


class MixedTimeEncoding(Exception):
    """A column of copies is an instant now and was an offset before, or the other way round."""


class ParameterShapes:
    """What is known of the columns of each shape."""

    def __init__(self, line_of: QueueEncoder, *, single: bool = False) -> None:
        """`alone` are the habits of changes that are written alone."""
        self._line_of = line_of
        self._alone = single
        self._known: dict[Any, list[int]] = {}

    @cached_property
    def single(self) -> ParameterShapes:
        """The habits of changes that are written alone."""
        return ParameterShapes(self._line_of, single=True)

    def encode_columns(
        self,
        shape: Any,
        kinds: Sequence[str],
        numbers: Sequence[int],
        columns: Iterable[Sequence[Any]],
        *,
        always_list: int | None = 0,
    ) -> tuple[bool, tuple[int, ...], list[Any]]:
        """Whether rows are counted, the habits of the columns, and their values: the single ones, then the lists.

        `numbers` say to which change each row belongs. The column `listed` is a list even where its values agree, so
        that there is one to count the rows by; None when the numbers are to be that list. The one row of a change that
        is written alone needs no counting, and several have their numbers.
        """
        known = self._known.get(shape)
        if known is None:
            known = self._known[shape] = [0] * (1 + len(kinds))
            if not self._alone:
                known[0 if always_list is None else always_list + 1] = (
                    CHANGE_NUMBERS if always_list is None else IS_LIST
                )
        single: list[Any] = []
        lists: list[Any] = []
        if known[0] or any(map(ne, numbers, count(1))):
            known[0] = CHANGE_NUMBERS
            lists.append(" ".join(map(str, numbers)))
        alone = len(numbers) == 1
        for place, values in enumerate(columns, start=1):
            habit = known[place]
            first = values[0]
            if alone and habit < IS_LIST:  # most columns of most changes at low load, so without detours
                if first is None:
                    if habit:
                        single.append(None)
                    continue
                if habit == HAS_VALUES and type(first) in STORED_AS_IS:
                    single.append(first)
                    continue
            if not habit & IS_LIST and values.count(first) == len(values):
                if first is None:
                    if habit:
                        single.append(None)
                    continue
                habit |= HAS_OFFSETS if type(first) is FromNow else HAS_VALUES
                if habit != HAS_OFFSETS | HAS_VALUES:
                    known[place] = habit
                    single.append(self._stored(first))
                    continue
            # They differ, or are a value now and were an offset before.
            known[place] = self._list(kinds[place - 1], habit | IS_LIST, values, lists)
        return not known[0], tuple(known[1:]), single + lists

    def encode_bulk_insert(
        self, shape: Any, kinds: Sequence[str], columns: Iterable[Sequence[Any]], own: frozenset[int]
    ) -> tuple[tuple[int, ...], list[Any]]:
        """The habits of the columns of copies, and their values: the single ones, then the lists.

        The columns at the places `own` are lists, the others hold one value each. A value that was an offset before,
        or the other way round, cannot be told like that.
        """
        known = self._known.setdefault(shape, [0] * len(kinds))
        single: list[Any] = []
        lists: list[Any] = []
        for place, values in enumerate(columns):
            habit = known[place]
            if place in own:
                known[place] = self._list(kinds[place], habit | IS_LIST, values, lists)
            elif (value := values[0]) is not None:
                habit |= HAS_OFFSETS if type(value) is FromNow else HAS_VALUES
                if habit == HAS_OFFSETS | HAS_VALUES:
                    raise MixedTimeEncoding
                known[place] = habit
                single.append(self._stored(value))
            elif habit:
                single.append(None)
        return tuple(known), single + lists

    def _list(self, kind: str, habit: int, values: Sequence[Any], lists: list[Any]) -> int:
        """Add the values as they travel; the column's habit from now on."""
        if kind == "text":
            habit |= HAS_VALUES
            if not habit & AS_ARRAY:
                text = join_texts(values)
                if text is not None:
                    lists.append(text)
                    return habit
                habit |= AS_ARRAY
            lists.append(values)
            return habit
        if kind not in _WHOLE:
            lists.append(values)
            return habit | HAS_VALUES
        types = set(map(type, values))
        if FromNow in types:
            habit |= HAS_OFFSETS
        if types - _NO_VALUE:
            habit |= HAS_VALUES
        if not types.isdisjoint(_NOT_WHOLE):
            raise Unstorable("a column of whole numbers keeps nothing else")
        if types <= _INTS:
            lists.append(" ".join(map(str, values)))
        else:
            lists.append(" ".join(["-" if value is None else str(self._stored(value)) for value in values]))
        if habit & HAS_OFFSETS and habit & HAS_VALUES:
            lists.append([type(value) is FromNow for value in values])
        return habit

    def _stored(self, value: Any) -> Any:
        """One value as its column keeps it; an offset without the clock."""
        return value.offset if type(value) is FromNow else encode(value, self._line_of)


_INTS = frozenset({int})
_NOT_WHOLE = frozenset({str, bytes, float, bool})


def join_texts(values: Sequence[Any]) -> str | None:
    """The texts as one, or None when the server could not tell them apart again."""
    unset = values.count(None)
    try:
        text = _SEPARATOR.join([_UNSET if value is None else value for value in values] if unset else values)
    except TypeError as error:
        raise Unstorable("a column of texts keeps texts only") from error
    if text.count(_SEPARATOR) != len(values) - 1 or text.count(_UNSET) != unset or not text:
        return None
    return text
