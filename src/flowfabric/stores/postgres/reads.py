"""Reads: the statements of `load`, `due`, `scan` and `count_grouped`, composed from the catalog.

A load reads everything from one snapshot in one round trip, so that no row is newer than its aggregate root. Each row
type is a column of the result: a few rows are an array of records. The driver is slow to decode such an array of many
rows, so these are sent as one array per column, and as plain rows if there is only one row type.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from flowfabric.model.execution import Execution
from flowfabric.stores.catalog import TABLE, index_columns
from flowfabric.stores.codec import CODEC, QueueDecoder, QueueEncoder, encode
from flowfabric.stores.postgres.commit.fragments import CLOCK_SQL, KEY_TYPES
from flowfabric.stores.postgres.commit.parameters import encode_list, list_parameter
from flowfabric.stores.postgres.dead_entries import IndexRange
from flowfabric.stores.postgres.sql import (
    HOT_ROWS,
    ParameterNumbering,
    RowType,
    column_list,
    column_type,
    columns_equal,
    hot_rows_sql,
    row_sql,
    table_column_list,
)
from flowfabric.stores.queries import (
    Due,
    GroupedCount,
    Loaded,
    Read,
    Scan,
    Search,
    SearchPosition,
    Where,
    prefix_upper_bound,
)

MANY_READS = 50  # reads of one row type
# Index entries that this transaction has read, dead ones included; 0 if the server does not count.
ENTRIES_READ_TEMPLATE = "coalesce(pg_stat_get_xact_tuples_returned('{index}'::regclass), 0)"


class LoadShape(NamedTuple):
    """How the rows of one type are requested and returned."""

    row: RowType
    encodings: tuple[int, ...]  # encodings of the reads' numbers and of their keys
    columnar: bool


class LoadResult(NamedTuple):
    """The undecoded result of a load."""

    shapes: tuple[LoadShape, ...]
    rows: Any  # a list of rows if there are many of one type only; else one row with everything


async def fetch_rows(connection: Any, reads: Sequence[Read], clock: int | None) -> LoadResult:
    """Fetch the rows of these reads, for `decode_rows`."""
    kinds: dict[tuple[RowType, int], list[tuple[Any, ...]]] = {}
    for number, read in enumerate(reads):
        kinds.setdefault((read.row, len(read.key)), []).append((number, *read.key))
    # Any number of rows may match a key prefix; beside other row types they are mostly few.
    many = 1 if len(kinds) == 1 and _is_prefix(reads[0]) else MANY_READS
    shapes: list[LoadShape] = []
    lists: list[Any] = []
    for (row, key_length), keys in kinds.items():
        types = ("int", *KEY_TYPES[row][:key_length])
        encodings, values = zip(*map(encode_list, types, zip(*keys, strict=True)), strict=True)
        shapes.append(LoadShape(row, encodings, len(keys) >= many))
        lists += values
    load_shapes = tuple(shapes)
    if len(load_shapes) == 1 and load_shapes[0].columnar:
        return LoadResult(load_shapes, await connection.fetch(_load_many_statement(load_shapes[0]), clock, *lists))
    return LoadResult(load_shapes, await connection.fetchrow(_load_statement(load_shapes), clock, *lists))


def _is_prefix(read: Read) -> bool:
    return len(read.key) < len(TABLE[read.row].key)


def decode_rows(answer: LoadResult, reads: Sequence[Read], decode_queue: QueueDecoder) -> Loaded:
    """Decode the rows of each read."""
    rows: list[list[Any]] = [[] for _ in reads]
    if type(answer.rows) is list:
        decode = CODEC[reads[0].row].decode
        for _, number, *columns in answer.rows:
            if number is not None:
                rows[number].append(decode(columns, decode_queue))
        return Loaded(answer.rows[0]["now"], rows)
    now, *values = answer.rows
    rest = iter(values)
    for row, _, many in answer.shapes:
        codec = CODEC[row]
        found: Iterable[Sequence[Any]] = next(rest)
        if many:  # one array per column; null if there are no rows
            columns = [*islice(rest, len(codec.columns))]
            found = zip(found, *columns, strict=True) if found else ()
        for number, *cells in found:
            rows[number].append(codec.decode(cells, decode_queue))
    return Loaded(now, rows)


@cache
def _load_statement(shapes: tuple[LoadShape, ...]) -> str:
    parameters = ParameterNumbering()
    answers = [CLOCK_SQL.format(given=parameters.add("bigint"))]
    beside: list[str] = []
    for row, encodings, many in shapes:
        columns = [f't."{name}"' for name in TABLE[row].column_names]
        found = _rows_source(parameters, row, encodings)
        if many:
            name = f"many_{len(beside)}"
            arrays = ", ".join(f"array_agg({column})" for column in ("x.number", *columns))
            beside.append(f"(select {arrays} from {found}) as {name}")
            answers.append(f"{name}.*")
        else:
            answers.append(f"array(select row(x.number, {', '.join(columns)}) from {found})")
    return f"select {', '.join(answers)}{' from ' if beside else ''}{', '.join(beside)}"


@cache
def _load_many_statement(shape: LoadShape) -> str:
    """Return the statement for many rows of one type; without rows it returns the time and nulls."""
    parameters = ParameterNumbering()
    clock = CLOCK_SQL.format(given=parameters.add("bigint"))
    columns = table_column_list(TABLE[shape.row], "t.")
    found = f"select x.number as asked, {columns} from {_rows_source(parameters, shape.row, shape.encodings)}"
    return (
        f"with clock as materialized (select {clock} as now)"
        f" select c.now, t.asked, {columns} from clock c left join ({found} offset 0) t on true"
    )


def _rows_source(parameters: ParameterNumbering, row: RowType, encodings: tuple[int, ...]) -> str:
    """Return the reads of one row type as `x`, joined with the rows of each as `t`, in key order."""
    table = TABLE[row]
    start = table.key[: len(encodings) - 1]
    types = ("int", *KEY_TYPES[row][: len(start)])
    arrays = ", ".join(list_parameter(parameters, *each) for each in zip(types, encodings, strict=True))
    where = columns_equal(start, "t", "x") or "true"
    found = f"select * from {table.name} t where {where} order by {column_list(table.key)}"
    if row in HOT_ROWS and start:
        key = [f'x."{name}"' for name in start]
        found = row_sql("r.*", table, key) if start == table.key else hot_rows_sql(table, key)
    return f"unnest({arrays}) as x ({column_list(['number', *start])}), lateral ({found}) t"


class ConditionBuilder:
    """Builds the conditions of a query and collects their arguments."""

    def __init__(self, row: RowType, encode_queue: QueueEncoder) -> None:
        self.table = TABLE[row]
        self.values: list[Any] = []
        self._columns = CODEC[row].column
        self._encode_queue = encode_queue

    def parameter(self, value: Any, kind: str) -> str:
        """Add an argument; return its parameter."""
        self.values.append(value)
        return f"${len(self.values)}::{kind}"

    def column_parameter(self, column: str, value: Any) -> str:
        """Add an argument that is compared with a column; return its parameter."""
        return self.parameter(encode(value, self._encode_queue), column_type(self._columns[column]))

    def value_source(self, scan: Scan) -> tuple[str, str]:
        """Return the `limit_by` values of a scan as relation `v`, and the condition that a row has one of them."""
        condition = scan.limit_by_condition
        kind = column_type(self._columns[condition.column]) + "[]"
        column = f't."{condition.column}"'
        if scan.max_values is not None:
            return self.distinct_value_source(scan), f"{column} = v.each"
        if condition.op == "in":
            values = {encode(value, self._encode_queue) for value in condition.value} - {None}
            return f"unnest({self.parameter(sorted(values), kind)}) as v(each)", f"{column} = v.each"
        ranges = {start: prefix_upper_bound(start) for start in condition.value}  # both bounds, for an index range scan
        lists = f"{self.parameter([*ranges], kind)}, {self.parameter([*ranges.values()], kind)}"
        return f"unnest({lists}) as v(each, until)", f"{column} >= v.each and {column} < v.until"

    def distinct_value_source(self, scan: Scan) -> str:
        """Return the first values with a prefix as `v`. Each costs one index search, however many rows share it."""
        condition, after = scan.limit_by_condition, scan.values_after
        column, table = f't."{condition.column}"', self.table.name
        until = self.column_parameter(condition.column, prefix_upper_bound(condition.value))
        if after is None:
            lower_bound = f"{column} >= {self.column_parameter(condition.column, condition.value)}"
        else:
            lower_bound = f"{column} > {self.column_parameter(condition.column, max(condition.value, after))}"
        first = f"select {column} from {table} t where {lower_bound} and {column} < {until} order by {column} limit 1"
        following = (
            f"select {column} from {table} t where {column} > found.each and {column} < {until}"
            f" order by {column} limit 1"
        )
        limit_sql = self.parameter(scan.max_values, "bigint")
        return (
            f"(with recursive found(each) as (({first}) union all"
            f" select ({following}) from found where found.each is not null)"
            f" select each from found where each is not null limit {limit_sql}) as v"
        )

    def condition(self, clause: Where) -> str:
        """Return a condition as SQL."""
        column = f't."{clause.column}"'
        match clause.op:
            case "set":
                return f"{column} is not null"
            case "unset":
                return f"{column} is null"
            case "in":
                values = [encode(value, self._encode_queue) for value in clause.value]
                return f"{column} = any({self.parameter(values, column_type(self._columns[clause.column]) + '[]')})"
            case "starts":
                until = prefix_upper_bound(clause.value)  # without it the index would be read to its end
                start = f"{column} >= {self.column_parameter(clause.column, clause.value)}"
                return (
                    start
                    if until is None
                    else f"({start} and {column} < {self.column_parameter(clause.column, until)})"
                )
            case "contains":
                return f"strpos({column}, {self.column_parameter(clause.column, clause.value)}) > 0"
            case _:
                return f"{column} {clause.op} {self.column_parameter(clause.column, clause.value)}"


def due_statement(
    row: RowType,
    column: str,
    limit: int,
    where: tuple[Where, ...],
    clock: int | None,
    encode_queue: QueueEncoder,
    *,
    ranges: Sequence[IndexRange] = (),
    include_next: bool = True,
) -> tuple[str, list[Any]]:
    """Return the statement for the rows whose instant has passed, and the next instant, both read through the index.

    With `ranges` only these parts of the index are read. `began`, `ended` and `last` are the numbers of index entries
    read before the rows, after them, and after the next instant; the server evaluates result columns in order.
    """
    conditions = ConditionBuilder(row, encode_queue)
    now = CLOCK_SQL.format(given=conditions.parameter(clock, "bigint"))
    limit_sql = conditions.parameter(limit, "bigint")
    table = conditions.table
    and_where = "".join(f" and {conditions.condition(clause)}" for clause in where)
    index = next((index.columns for index in table.indexes if index.columns[0] == column), (column,))
    order = column_list([*index, *(name for name in table.key if name not in index)], "t.")
    is_indexed = any(index.columns[0] == column for index in table.indexes)
    entries = f"(select {ENTRIES_READ_TEMPLATE.format(index=f'{table.name}_{column}')})" if is_indexed else "0"
    is_due = f't."{column}" <= (select now from clock){and_where}'
    found = f"{table.name} t where {is_due} order by {order} limit {limit_sql}"
    if ranges:
        bounds = [
            conditions.parameter([part.low[0] for part in ranges], "bigint[]"),
            conditions.parameter([part.high[0] for part in ranges], "bigint[]"),
        ]
        found = (
            f"unnest({', '.join(bounds)}) as r (low, high), lateral (select * from {table.name} t"
            f' where t."{column}" >= r.low and t."{column}" < r.high and {is_due} order by {order} limit {limit_sql}) t'
            f" order by {order} limit {limit_sql}"
        )
    ahead = (
        f'(select t."{column}" from {table.name} t where t."{column}" > (select now from clock){and_where}'
        f' order by t."{column}" limit 1)'
    )
    statement = (
        f"with clock as materialized (select {now} as now)"
        f" select {entries} as began, now, array(select row({table_column_list(table, 't.')}) from {found})"
        f" as rows,"
        f" {entries} as ended, {ahead if include_next else 'null'} as next_at, {entries} as last from clock"
    )
    return statement, conditions.values


def decode_due(answer: Any, row: RowType, decode_queue: QueueDecoder) -> Due:
    """Decode the result of `due_statement`."""
    decode = CODEC[row].decode
    return Due(answer["now"], [decode(record, decode_queue) for record in answer["rows"]], answer["next_at"])


def scan_statement(scan: Scan, encode_queue: QueueEncoder) -> tuple[str, list[Any]]:
    """Return the statement for the rows of a scan, in its order and then by key."""
    conditions = ConditionBuilder(scan.row, encode_queue)
    table = conditions.table
    each, is_one = ("", "") if scan.limit_by is None else conditions.value_source(scan)
    own = scan.where if scan.limit_by is None else scan.other_conditions
    met = [conditions.condition(clause) for clause in own]
    order = scan.full_order
    if scan.after is not None:
        names = order[: len(scan.after)]
        place = ", ".join(
            conditions.column_parameter(name, value) for name, value in zip(names, scan.after, strict=True)
        )
        met.append(f"({column_list(names, 't.')}) {'<' if scan.descending else '>'} ({place})")
    meeting = f"from {table.name} t where {' and '.join(met) or 'true'}"
    direction = " desc" if scan.descending else ""
    ordered = "order by " + ", ".join(f't."{name}"{direction}' for name in order)
    limited = f"limit {conditions.parameter(scan.limit, 'bigint')}"
    if scan.limit_by is None:
        return f"select {table_column_list(table, 't.')} {meeting} {ordered} {limited}", conditions.values
    # One lateral query per value, so that each reads its first rows from the index instead of sorting all rows.
    statement = (
        f"select {table_column_list(table, 't.')} from {each}, lateral (select t.* {meeting}"
        f" and {is_one} {ordered} {limited}) t {ordered}"
    )
    return statement, conditions.values


def search_statement(search: Search, end: SearchPosition | None, encode_queue: QueueEncoder) -> tuple[str, list[Any]]:
    """Return the statement for the executions of a search, up to the position `end`, and their kinds.

    `offset 0` keeps the planner from reading in another order. Kinds are found row by row: a join could begin with all
    payloads.
    """
    conditions = ConditionBuilder(Execution, encode_queue)
    window = _search_window(search, conditions, "offset 0", end)
    kind = "coalesce((select p.execution_kind from ff_payload p where p.execution_id = t.execution_id), '')"
    met = [conditions.condition(clause) for clause in search.filters]
    if search.kind is not None:
        met.append(f"{kind} = {conditions.parameter(search.kind, 'text')}")
    statement = (
        f"select {table_column_list(conditions.table, 't.')}, {kind} as kind from ({window}) t"
        f" where {' and '.join(met) or 'true'} order by {_NEWEST_FIRST}"
        f" limit {conditions.parameter(search.limit, 'bigint')}"
    )
    return statement, conditions.values


def search_end_statement(search: Search, encode_queue: QueueEncoder) -> tuple[str, list[Any]]:
    """Return the statement for the position of the last row that the budget of a search allows."""
    conditions = ConditionBuilder(Execution, encode_queue)
    offset = conditions.parameter(search.budget - 1, "bigint")
    window = _search_window(search, conditions, f"offset {offset} limit 1")
    return window.replace("select t.*", "select t.created_at, t.execution_id", 1), conditions.values


_NEWEST_FIRST = "t.created_at desc, t.execution_id desc"


def _search_window(
    search: Search, conditions: ConditionBuilder, limited: str, end: SearchPosition | None = None
) -> str:
    met = [conditions.condition(clause) for clause in search.bounds]
    for op, position in (("<", search.after), (">=", end)):
        if position is not None:
            place = f"{conditions.parameter(position[0], 'bigint')}, {conditions.parameter(position[1], 'text')}"
            met.append(f"(t.created_at, t.execution_id) {op} ({place})")
    where = " and ".join(met) or "true"
    return f"select t.* from {conditions.table.name} t where {where} order by {_NEWEST_FIRST} {limited}"


def count_statement(query: GroupedCount, encode_queue: QueueEncoder) -> tuple[str, list[Any]]:
    """Return the statement that counts rows by columns of their executions; the rows are read through the index."""
    conditions = ConditionBuilder(query.row, encode_queue)
    table = conditions.table
    order = column_list(index_columns(query.row, query.column), "t.")
    limited = f"order by {order} limit {conditions.parameter(query.limit, 'bigint')}"
    if query.values is None:
        chosen = f'from {table.name} t where t."{query.column}" is not null {limited}'
    else:
        values = sorted({encode(value, encode_queue) for value in query.values})
        kind = column_type(CODEC[query.row].column[query.column])
        chosen = (
            f"from unnest({conditions.parameter(values, kind + '[]')}) as v(each),"
            f' lateral (select * from {table.name} t where t."{query.column}" = v.each {limited}) t'
        )
    by = column_list(query.group_by)
    if query.row is Execution:
        source = f"(select {column_list(query.group_by, 't.')} {chosen}) e"
    else:
        owners = f'select t."{query.execution_column}" as owner_id {chosen}'
        source = f"({owners}) t join ff_exec_core e on e.execution_id = t.owner_id"
    return f"select {by}, count(*) from {source} group by {by}", conditions.values
