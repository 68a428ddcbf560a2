"""Reading: the statements for `load`, `due` and `scan`, composed from the catalogue.

A load answers all its wants from one snapshot in one trip, so that no row of it is newer than its root: each kind of
row comes beside the others, a few rows as an array of records. Of many the driver would take very long to take such an
array apart: they come as one array for each column, and when there is no other kind as rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.catalog import TABLE, index_columns
from flowfabric.stores.codec import CODEC, QueueDecoder, QueueEncoder, encode
from flowfabric.stores.postgres.commit.fragments import CLOCK_SQL, KEY_TYPES
from flowfabric.stores.postgres.commit.parameters import encode_list, list_parameter
from flowfabric.stores.postgres.dead_entries import IndexRange
from flowfabric.stores.postgres.sql import (
    ParameterNumbering,
    RowType,
    column_list,
    column_type,
    columns_equal,
    table_column_list,
)
from flowfabric.stores.queries import Due, GroupedCount, Loaded, Read, Scan, Where, prefix_upper_bound

MANY_READS = 50  # wants of one kind
# Entries of an index that this transaction has stepped over, dead ones as well; 0 where the server does not count.
ENTRIES_READ_TEMPLATE = "coalesce(pg_stat_get_xact_tuples_returned('{index}'::regclass), 0)"


class LoadShape(NamedTuple):
    """How the rows of one kind are asked for, and how they come."""

    row: RowType
    encodings: tuple[int, ...]  # of the numbers of the wants, and of their keys
    columnar: bool


class LoadResult(NamedTuple):
    """What the server said."""

    shapes: tuple[LoadShape, ...]
    rows: Any  # a list of rows when there is one kind, of many rows; else one row with everything


async def fetch_rows(connection: Any, wants: Sequence[Read], clock: int | None) -> LoadResult:
    """The server's answer to these wants, for `loaded`."""
    kinds: dict[tuple[RowType, int], list[tuple[Any, ...]]] = {}
    for number, want in enumerate(wants):
        kinds.setdefault((want.row, len(want.key)), []).append((number, *want.key))
    # Any number of rows may begin like a key; beside other kinds they are mostly few.
    many = 1 if len(kinds) == 1 and _is_start(wants[0]) else MANY_READS
    shapes: list[LoadShape] = []
    lists: list[Any] = []
    for (row, width), given in kinds.items():
        types = ("int", *KEY_TYPES[row][:width])
        habit, values = zip(*map(encode_list, types, zip(*given, strict=True)), strict=True)
        shapes.append(LoadShape(row, habit, len(given) >= many))
        lists += values
    asked = tuple(shapes)
    if len(asked) == 1 and asked[0].columnar:
        return LoadResult(asked, await connection.fetch(_load_rows_words(asked[0]), clock, *lists))
    return LoadResult(asked, await connection.fetchrow(_load_words(asked), clock, *lists))


def _is_start(want: Read) -> bool:
    return len(want.key) < len(TABLE[want.row].key)


def decode_rows(answer: LoadResult, wants: Sequence[Read], line_at: QueueDecoder) -> Loaded:
    """The rows of each want."""
    rows: list[list[Any]] = [[] for _ in wants]
    if type(answer.rows) is list:
        decode = CODEC[wants[0].row].decode
        for _, number, *columns in answer.rows:
            if number is not None:
                rows[number].append(decode(columns, line_at))
        return Loaded(answer.rows[0]["now"], rows)
    now, *values = answer.rows
    rest = iter(values)
    for row, _, many in answer.shapes:
        codec = CODEC[row]
        found: Iterable[Sequence[Any]] = next(rest)
        if many:  # an array for each column; null when there are no rows
            columns = [*islice(rest, len(codec.columns))]
            found = zip(found, *columns, strict=True) if found else ()
        for number, *cells in found:
            rows[number].append(codec.decode(cells, line_at))
    return Loaded(now, rows)


@cache
def _load_words(shapes: tuple[LoadShape, ...]) -> str:
    parameters = ParameterNumbering()
    answers = [CLOCK_SQL.format(given=parameters.add("bigint"))]
    beside: list[str] = []
    for row, habit, many in shapes:
        columns = [f't."{name}"' for name in TABLE[row].column_names]
        found = _found(parameters, row, habit)
        if many:
            name = f"many_{len(beside)}"
            arrays = ", ".join(f"array_agg({column})" for column in ("x.number", *columns))
            beside.append(f"(select {arrays} from {found}) as {name}")
            answers.append(f"{name}.*")
        else:
            answers.append(f"array(select row(x.number, {', '.join(columns)}) from {found})")
    return f"select {', '.join(answers)}{' from ' if beside else ''}{', '.join(beside)}"


@cache
def _load_rows_words(shape: LoadShape) -> str:
    """The same for one kind of row: the time, with nothing beside it when nothing is found, and the rows."""
    parameters = ParameterNumbering()
    clock = CLOCK_SQL.format(given=parameters.add("bigint"))
    columns = table_column_list(TABLE[shape.row], "t.")
    found = f"select x.number as asked, {columns} from {_found(parameters, shape.row, shape.encodings)}"
    return (
        f"with clock as materialized (select {clock} as now)"
        f" select c.now, t.asked, {columns} from clock c left join ({found} offset 0) t on true"
    )


def _found(parameters: ParameterNumbering, row: RowType, habit: tuple[int, ...]) -> str:
    """The wants of one kind as `x`, and as `t` the rows of each, in key order."""
    table = TABLE[row]
    start = table.key[: len(habit) - 1]
    types = ("int", *KEY_TYPES[row][: len(start)])
    arrays = ", ".join(list_parameter(parameters, *each) for each in zip(types, habit, strict=True))
    where = columns_equal(start, "t", "x") or "true"
    found = f"select * from {table.name} t where {where} order by {column_list(table.key)}"
    return f"unnest({arrays}) as x ({column_list(['number', *start])}), lateral ({found}) t"


class ConditionBuilder:
    """Conditions of a list as words, and the values that they compare with."""

    def __init__(self, row: RowType, line_of: QueueEncoder) -> None:
        self.table = TABLE[row]
        self.values: list[Any] = []
        self._columns = CODEC[row].column
        self._line_of = line_of

    def parameter(self, value: Any, kind: str) -> str:
        """A parameter."""
        self.values.append(value)
        return f"${len(self.values)}::{kind}"

    def column_parameter(self, column: str, value: Any) -> str:
        """A parameter that is compared with a column."""
        return self.parameter(encode(value, self._line_of), column_type(self._columns[column]))

    def value_source(self, scan: Scan) -> tuple[str, str]:
        """The values that a list is made for as `v`, and how a row meets one of them."""
        named = scan.limit_by_condition
        kind = column_type(self._columns[named.column]) + "[]"
        column = f't."{named.column}"'
        if scan.max_values is not None:
            return self.distinct_value_source(scan), f"{column} = v.each"
        if named.op == "in":
            values = {encode(value, self._line_of) for value in named.value} - {None}
            return f"unnest({self.parameter(sorted(values), kind)}) as v(each)", f"{column} = v.each"
        ranges = {
            start: prefix_upper_bound(start) for start in named.value
        }  # both ends, so that an index finds each range
        lists = f"{self.parameter([*ranges], kind)}, {self.parameter([*ranges.values()], kind)}"
        return f"unnest({lists}) as v(each, until)", f"{column} >= v.each and {column} < v.until"

    def distinct_value_source(self, scan: Scan) -> str:
        """The first values that begin with a prefix as `v`: one index search each, however many rows share a value."""
        named, after = scan.limit_by_condition, scan.values_after
        column, table = f't."{named.column}"', self.table.name
        until = self.column_parameter(named.column, prefix_upper_bound(named.value))
        if after is None:
            beyond = f"{column} >= {self.column_parameter(named.column, named.value)}"
        else:
            beyond = f"{column} > {self.column_parameter(named.column, max(named.value, after))}"
        first = f"select {column} from {table} t where {beyond} and {column} < {until} order by {column} limit 1"
        following = (
            f"select {column} from {table} t where {column} > found.each and {column} < {until}"
            f" order by {column} limit 1"
        )
        most = self.parameter(scan.max_values, "bigint")
        return (
            f"(with recursive found(each) as (({first}) union all"
            f" select ({following}) from found where found.each is not null)"
            f" select each from found where each is not null limit {most}) as v"
        )

    def condition(self, one: Where) -> str:
        """The condition in words."""
        column = f't."{one.column}"'
        match one.op:
            case "set":
                return f"{column} is not null"
            case "unset":
                return f"{column} is null"
            case "in":
                values = [encode(value, self._line_of) for value in one.value]
                return f"{column} = any({self.parameter(values, column_type(self._columns[one.column]) + '[]')})"
            case "starts":
                until = prefix_upper_bound(one.value)  # or an index would be read to its end
                start = f"{column} >= {self.column_parameter(one.column, one.value)}"
                return (
                    start if until is None else f"({start} and {column} < {self.column_parameter(one.column, until)})"
                )
            case _:
                return f"{column} {one.op} {self.column_parameter(one.column, one.value)}"


def due_statement(
    row: RowType,
    column: str,
    limit: int,
    where: tuple[Where, ...],
    clock: int | None,
    line_of: QueueEncoder,
    *,
    ranges: Sequence[IndexRange] = (),
    include_next: bool = True,
) -> tuple[str, list[Any]]:
    """The rows whose instant has come, and the next instant: both by the index of that column.

    With `ranges` only these parts of the index are read. `began`, `ended` and `last` count its entries before the rows,
    behind them and behind the next instant; the server evaluates an answer's columns in their order.
    """
    conditions = ConditionBuilder(row, line_of)
    now = CLOCK_SQL.format(given=conditions.parameter(clock, "bigint"))
    most = conditions.parameter(limit, "bigint")
    table = conditions.table
    and_where = "".join(f" and {conditions.condition(one)}" for one in where)
    index = next((index.columns for index in table.indexes if index.columns[0] == column), (column,))
    order = column_list([*index, *(name for name in table.key if name not in index)], "t.")
    is_indexed = any(index.columns[0] == column for index in table.indexes)
    entries = f"(select {ENTRIES_READ_TEMPLATE.format(index=f'{table.name}_{column}')})" if is_indexed else "0"
    is_due = f't."{column}" <= (select now from clock){and_where}'
    found = f"{table.name} t where {is_due} order by {order} limit {most}"
    if ranges:
        bounds = [
            conditions.parameter([part.low[0] for part in ranges], "bigint[]"),
            conditions.parameter([part.high[0] for part in ranges], "bigint[]"),
        ]
        found = (
            f"unnest({', '.join(bounds)}) as r (low, high), lateral (select * from {table.name} t"
            f' where t."{column}" >= r.low and t."{column}" < r.high and {is_due} order by {order} limit {most}) t'
            f" order by {order} limit {most}"
        )
    ahead = (
        f'(select t."{column}" from {table.name} t where t."{column}" > (select now from clock){and_where}'
        f' order by t."{column}" limit 1)'
    )
    words = (
        f"with clock as materialized (select {now} as now)"
        f" select {entries} as began, now, array(select row({table_column_list(table, 't.')}) from {found})"
        f" as rows,"
        f" {entries} as ended, {ahead if include_next else 'null'} as next_at, {entries} as last from clock"
    )
    return words, conditions.values


def decode_due(answer: Any, row: RowType, line_at: QueueDecoder) -> Due:
    """The rows of the server's answer."""
    decode = CODEC[row].decode
    return Due(answer["now"], [decode(record, line_at) for record in answer["rows"]], answer["next_at"])


def scan_statement(scan: Scan, line_of: QueueEncoder) -> tuple[str, list[Any]]:
    """The rows of a list, in its order and then by key."""
    conditions = ConditionBuilder(scan.row, line_of)
    table = conditions.table
    each, is_one = ("", "") if scan.limit_by is None else conditions.value_source(scan)
    own = scan.where if scan.limit_by is None else scan.other_conditions
    met = [conditions.condition(one) for one in own]
    order = scan.full_order
    if scan.after is not None:
        names = order[: len(scan.after)]
        place = ", ".join(
            conditions.column_parameter(name, value) for name, value in zip(names, scan.after, strict=True)
        )
        met.append(f"({column_list(names, 't.')}) > ({place})")
    meeting = f"from {table.name} t where {' and '.join(met) or 'true'}"
    ordered = f"order by {column_list(order, 't.')}"
    limited = f"limit {conditions.parameter(scan.limit, 'bigint')}"
    if scan.limit_by is None:
        return f"select {table_column_list(table, 't.')} {meeting} {ordered} {limited}", conditions.values
    # By value, or the first rows of all of them together would be looked for in one heap.
    words = (
        f"select {table_column_list(table, 't.')} from {each}, lateral (select t.* {meeting}"
        f" and {is_one} {ordered} {limited}) t {ordered}"
    )
    return words, conditions.values


def count_statement(tally: GroupedCount, line_of: QueueEncoder) -> tuple[str, list[Any]]:
    """How many rows, by columns of their executions; the rows are found by the index of their column."""
    conditions = ConditionBuilder(tally.row, line_of)
    table = conditions.table
    order = column_list(index_columns(tally.row, tally.column), "t.")
    limited = f"order by {order} limit {conditions.parameter(tally.limit, 'bigint')}"
    if tally.values is None:
        chosen = f'from {table.name} t where t."{tally.column}" is not null {limited}'
    else:
        values = sorted({encode(value, line_of) for value in tally.values})
        kind = column_type(CODEC[tally.row].column[tally.column])
        chosen = (
            f"from unnest({conditions.parameter(values, kind + '[]')}) as v(each),"
            f' lateral (select * from {table.name} t where t."{tally.column}" = v.each {limited}) t'
        )
    by = column_list(tally.group_by)
    if tally.row is Execution:
        source = f"(select {column_list(tally.group_by, 't.')} {chosen}) e"
    else:
        source = (
            f'(select t."{tally.execution_column}" as its {chosen}) t join ff_exec_core e on e.execution_id = t.its'
        )
    return f"select {by}, count(*) from {source} group by {by}", conditions.values


def queues_in(values: Sequence[Any]) -> set[QueueKey]:
    """The lines among some values."""
    return {value for value in values if type(value) is QueueKey}
