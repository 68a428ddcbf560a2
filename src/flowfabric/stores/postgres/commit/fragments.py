"""The fragments of a commit statement: each is a shape of guards or writes that renders its own SQL.

A fragment serves any number of rows. A column in which all rows agree is sent as one value, other columns as one list
each; a column that is null in all rows is not sent. The encodings of the columns are part of the fragment's shape: two
batches with equal fragments share one prepared statement. `parameters.py` supplies the values in the order in which the
SQL numbers its parameters: single values first, then lists.

Each row belongs to a change, whose number selects its verdict. If every change of the batch has exactly one row, in
order, the numbers are implicit (`implicit_numbers`) and are not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from flowfabric.model.change import (
    ColumnRef,
    Expected,
    IfSet,
    LeaseRequirement,
    Parameter,
    Plus,
    RowTemplate,
)
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution
from flowfabric.model.instant import FromNow
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.codec import encode, refuse_queue
from flowfabric.stores.postgres.commit.parameters import (
    CHANGE_NUMBERS,
    HAS_OFFSETS,
    HAS_VALUES,
    IS_LIST,
    VALUE_LIST,
    list_parameter,
)
from flowfabric.stores.postgres.sql import HOT_ROWS, ParameterNumbering, RowType, column_list, column_type, row_sql

LockMode = Literal["update", "share", "none"]

COLUMN_TYPES: dict[RowType, dict[str, str]] = {
    table.row: {column.name: column_type(column) for column in table.columns} for table in TABLE.values()
}
KEY_TYPES: dict[RowType, tuple[str, ...]] = {
    table.row: tuple(COLUMN_TYPES[table.row][name] for name in table.key) for table in TABLE.values()
}
EVENT_TYPES = {
    name: "bigint" if name in ("lease_epoch", "attempt_index") else "text" for name in Event.__struct_fields__
}
LEASE_TYPES = {"requires": "smallint", "lease_id": "text", "lease_epoch": "bigint"}
BOUND_TYPES = {"not_before": "bigint", "not_after": "bigint"}

CLOCK_SQL = "coalesce({given}, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)"
COMMIT_TIME_SQL = "(select now from verdict)"
NEXT_BATCH_ID_SQL = "select nextval('ff_batch_batch_id_seq') as batch_id"  # drawn when all locks are held
INSERT_POINTER_SQL = "insert into ff_told_in (execution_id, batch_id)"
# The ids of the last 1000 batches with an event of this row, the new batch included.
APPEND_POINTER_SQL = (
    "case when cardinality({row}.told) >= 1000 then {row}.told[2:] || (select batch_id from new_batch)"
    " else array_append({row}.told, (select batch_id from new_batch)) end"
)


class ParameterRows:
    """Rows that are sent as parameters: the relation `x`, numbered from 1 in `x.ordinal`."""

    def __init__(
        self, parameters: ParameterNumbering, implicit_numbers: bool, columns: Sequence[tuple[str, str, int]]
    ) -> None:
        """`columns` has the name, type and encoding of each column."""
        self._parameters = parameters
        self._lists: list[tuple[str, str, int]] = [] if implicit_numbers else [("change_no", "int", CHANGE_NUMBERS)]
        self._columns = {name: self._column_sql(name, kind, encoding) for name, kind, encoding in columns}
        self.change_no = "x.ordinal::int" if implicit_numbers else "x.change_no"
        self.accepted = f"(select accepted from verdict)[{self.change_no}]"

    def __getitem__(self, name: str) -> str:
        """Return the expression for a column's value."""
        return self._columns[name]

    def rows_sql(self) -> str:
        """Return the relation `x`. Call it once, after all single values are numbered."""
        if not self._lists:
            return "(select 1::bigint as ordinal) as x"
        lists = ", ".join(list_parameter(self._parameters, kind, encoding) for _, kind, encoding in self._lists)
        return f"unnest({lists}) with ordinality as x ({column_list(name for name, _, _ in self._lists)}, ordinal)"

    @property
    def has_lists(self) -> bool:
        """True if there may be several rows."""
        return bool(self._lists)

    def _column_sql(self, name: str, kind: str, encoding: int) -> str:
        if not encoding:
            return "null"
        if encoding & IS_LIST:
            self._lists.append((name, kind, encoding))
            value = f'x."{name}"'
        else:
            value = self._parameters.add(kind)
        if not encoding & HAS_OFFSETS:
            return value
        if not encoding & HAS_VALUES:
            return f"{COMMIT_TIME_SQL} + {value}"
        self._lists.append((f"{name} is an offset", "boolean", VALUE_LIST))
        return f'case when x."{name} is an offset" then {COMMIT_TIME_SQL} + {value} else {value} end'


class GuardFragment(NamedTuple):
    """Guards of one table: each row is found by its key, locked, and compared with what the change relies on."""

    row: RowType
    lock: LockMode  # "none" is for rows that must be absent
    expected: Expected | None  # the expected values, in place of a revision
    has_leases: bool
    implicit_numbers: bool
    encodings: tuple[int, ...]  # encodings of the key, of the revision or `per_row` columns, and of lease columns

    def sql(self, name: str, previous: str | None, parameters: ParameterNumbering) -> str:
        """Return a CTE with `change_no` and `holds` per guard, and the lease expiry, which the clock decides later."""
        table = TABLE[self.row]
        types = {f"key {key}": kind for key, kind in zip(table.key, KEY_TYPES[self.row], strict=True)}
        if self.expected is not None:
            types |= {f"expected {column}": COLUMN_TYPES[self.row][column] for column in self.expected.per_row}
        elif self.lock != "none":
            types["revision"] = "bigint"
        if self.has_leases:
            types |= LEASE_TYPES
        params = ParameterRows(parameters, self.implicit_numbers, _columns(types, self.encodings))
        key = [params[f"key {name}"] for name in table.key]
        # Lock the rows of the previous guard first.
        after = f" and (select count(*) from {previous}) >= 0" if previous else ""
        if self.lock == "none":
            found = row_sql("r.ctid", table, key, after)
            return (
                f"{name} as materialized (select {params.change_no} as change_no, t.found is null as holds from"
                f" {params.rows_sql()} left join lateral (select true as found from ({found}) r limit 1) t on true)"
            )
        if self.expected is None:
            columns, holds, lease = ["revision"], f"{params['revision']} = t.revision", ""
        else:
            columns, lease = [table.key[0], *self.expected.fields, *self.expected.per_row], ""
            equal = [f't."{table.key[0]}" is not null', *map(_equals, self.expected.fields.items())]
            equal += [f't."{name}" is not distinct from {params[f"expected {name}"]}' for name in self.expected.per_row]
            holds = " and ".join(equal)
        if self.has_leases:
            columns += ["lease_id", "lease_epoch", "lease_expires_at"]
            same = f"{params['lease_id']} = t.lease_id and {params['lease_epoch']} = t.lease_epoch"
            holds += f" and ({params['requires']} is null or ({same}))"
            lease = f", {params['requires']} as requires, t.lease_expires_at as expires_at"
        return (
            f"{name} as materialized (select {params.change_no} as change_no, coalesce({holds}, false) as holds{lease}"
            f" from {params.rows_sql()}"
            f" left join lateral ({row_sql(column_list(columns, 'r.'), table, key, after)} for {self.lock}) t on true)"
        )

    def verdict_sql(self, name: str) -> str:
        """Return a query with `change_no` and `ok` per guard; it reads the clock."""
        if not self.has_leases:
            return f"select change_no, holds as ok from {name}"
        live = f"g.requires = {LeaseRequirement.LIVE.value}"
        return (
            "select g.change_no,"
            f" g.holds and (g.requires is null or coalesce((g.expires_at > c.now) = ({live}), false)) as ok"
            f" from {name} g, clock c"
        )


def _equals(column: tuple[str, Any]) -> str:
    name, value = column
    return f't."{name}" is null' if value is None else f't."{name}" = {value_sql(value)}'


class TimeBoundsFragment(NamedTuple):
    """Changes that are bounded in time, and changes without any guard."""

    implicit_numbers: bool
    encodings: tuple[int, ...]

    def sql(self, name: str, previous: str | None, parameters: ParameterNumbering) -> str:
        """Return a CTE with the two bounds of each change."""
        params = ParameterRows(parameters, self.implicit_numbers, _columns(BOUND_TYPES, self.encodings))
        bounds = f"{params['not_before']}::bigint as not_before, {params['not_after']}::bigint as not_after"
        return f"{name} as materialized (select {params.change_no} as change_no, {bounds} from {params.rows_sql()})"

    def verdict_sql(self, name: str) -> str:
        """Return a query with `change_no` and `ok` per change."""
        return (
            "select g.change_no,"
            " c.now >= coalesce(g.not_before, c.now) and c.now <= coalesce(g.not_after, c.now) as ok"
            f" from {name} g, clock c"
        )


class UpdateFragment(NamedTuple):
    """Updates that set the same columns of one table."""

    row: RowType
    columns: tuple[str, ...]
    unless_set: str | None
    implicit_numbers: bool
    encodings: tuple[int, ...]  # encodings of the key and of the columns

    def sql(self, parameters: ParameterNumbering) -> str:
        table = TABLE[self.row]
        # The key columns are renamed, because a patch may set one of them.
        types = {f"key {key}": kind for key, kind in zip(table.key, KEY_TYPES[self.row], strict=True)}
        types |= {name: COLUMN_TYPES[self.row][name] for name in self.columns}
        params = ParameterRows(parameters, self.implicit_numbers, _columns(types, self.encodings))
        sets = ", ".join(f'"{name}" = {params[name]}' for name in self.columns)
        keys = " and ".join(f't."{key}" = {params[f"key {key}"]}' for key in table.key)
        unless = f' and t."{self.unless_set}" is null' if self.unless_set else ""
        return f"update {table.name} t set {sets} from {params.rows_sql()} where {keys}{unless} and {params.accepted}"


class InsertFragment(NamedTuple):
    """Inserts, or upserts that replace existing rows."""

    row: RowType
    is_upsert: bool
    implicit_numbers: bool
    encodings: tuple[int, ...]  # encodings of all columns

    @property
    def is_hot_upsert(self) -> bool:
        """True if existing rows are updated by `hot_upsert_sql`."""
        return self.is_upsert and self.row in HOT_ROWS

    def sql(self, parameters: ParameterNumbering) -> str:
        params, source = self._rows(parameters)
        return self._insert_sql(params, source)

    def hot_upsert_sql(self, parameters: ParameterNumbering) -> tuple[str, str]:
        """Return an update of the rows that exist, and an insert of the others.

        The check for a conflict would read all dead versions of a row. The root is locked, so no row moves meanwhile.
        """
        table, (params, source) = TABLE[self.row], self._rows(parameters)
        place = row_sql("r.ctid", table, [params[name] for name in table.key])
        sets = ", ".join(f'"{name}" = {params[name]}' for name in table.column_names if name not in table.key)
        update = (
            f"update {table.name} t set {sets} from {source}, lateral ({place}) k"
            f" where t.ctid = k.ctid and {params.accepted}"
        )
        return update, self._insert_sql(params, source, f" and ({place}) is null")

    def _rows(self, parameters: ParameterNumbering) -> tuple[ParameterRows, str]:
        params = ParameterRows(parameters, self.implicit_numbers, _columns(COLUMN_TYPES[self.row], self.encodings))
        return params, params.rows_sql()

    def _insert_sql(self, params: ParameterRows, source: str, condition: str = "") -> str:
        table = TABLE[self.row]
        given = [name for (name, _, encoding) in _columns(COLUMN_TYPES[self.row], self.encodings) if encoding]
        values = ", ".join(params[name] for name in given)
        into = f"insert into {table.name} ({column_list(given)}) select {values} from {source}"
        into += f" where {params.accepted}{condition}"
        if not self.is_upsert:
            return into
        others = [name for name in table.column_names if name not in table.key]
        sets = ", ".join(f'"{name}" = excluded."{name}"' for name in others)
        action = f"update set {sets}" if others else "nothing"
        return f"{into} on conflict ({column_list(table.key)}) do {action}"


class BulkInsertFragment(NamedTuple):
    """Inserts of one change that differ in a few columns only."""

    row: RowType
    encodings: tuple[int, ...]  # encodings of all columns

    def sql(self, parameters: ParameterNumbering) -> str:
        change_no = parameters.add("int")
        columns = [column for column in _columns(COLUMN_TYPES[self.row], self.encodings) if column[2]]
        params = ParameterRows(parameters, True, columns)
        values = ", ".join(params[name] for name, _, _ in columns)
        names = column_list(name for name, _, _ in columns)
        into = f"insert into {TABLE[self.row].name} ({names}) select {values} from {params.rows_sql()}"
        return f"{into} where (select accepted from verdict)[{change_no}]"


class DeleteFragment(NamedTuple):
    """Deletes of all rows whose keys have the given prefixes."""

    row: RowType
    key_length: int
    implicit_numbers: bool
    encodings: tuple[int, ...]

    @property
    def deletes_roots_by_prefix(self) -> bool:
        """True if one key prefix may match any number of aggregate roots."""
        table = TABLE[self.row]
        return table.is_aggregate_root and self.key_length < len(table.key)

    def sql(self, parameters: ParameterNumbering) -> str:
        table = TABLE[self.row]
        prefix = dict(zip(table.key[: self.key_length], KEY_TYPES[self.row], strict=False))
        params = ParameterRows(parameters, self.implicit_numbers, _columns(prefix, self.encodings))
        source = params.rows_sql()
        if 1 < self.key_length == len(table.key) and params.has_lists:
            # In a join the server may read all rows that share the first columns of the key, and many deleted ones.
            # `offset 0` makes it search for each key. The root is locked, so that the row does not move meanwhile.
            found = " and ".join(f'r."{key}" = {params[key]}' for key in prefix)
            source += f", lateral (select r.ctid as place from {table.name} r where {found} offset 0) k"
            return f"delete from {table.name} t using {source} where t.ctid = k.place and {params.accepted}"
        keys = "".join(f't."{key}" = {params[key]} and ' for key in prefix)
        returning = " returning t.execution_id, t.told" if self.row is Execution else ""
        return f"delete from {table.name} t using {source} where {keys}{params.accepted}{returning}"

    def keep_pointers_sql(self, name: str) -> list[str]:
        """Return CTEs that keep the deleted executions' pointers to batches of the event log, which outlives them."""
        if self.row is not Execution:
            return []
        kept = "select b.batch_id from ff_batch b where b.batch_id = p.batch_id for key share"  # a trim has to wait
        pointers = f"select t.execution_id, b.batch_id from {name} t, unnest(t.told) p (batch_id), lateral ({kept}) b"
        return [f"{name}_pointers as ({INSERT_POINTER_SQL} {pointers} on conflict do nothing)"]


class TemplateFragment(NamedTuple):
    """Updates of aggregate roots by one row template."""

    template: RowTemplate
    implicit_numbers: bool
    encodings: tuple[int, ...]  # encodings of the key and of the revision

    def sql(self, parameters: ParameterNumbering) -> str:
        """Return the update of the roots; it returns all columns that the template's event reads."""
        table = TABLE[self.template.row]
        types = {f"key {key}": kind for key, kind in zip(table.key, KEY_TYPES[table.row], strict=True)}
        params = ParameterRows(
            parameters, self.implicit_numbers, _columns(types | {"revision": "bigint"}, self.encodings)
        )
        sets = "".join(f'"{name}" = {value_sql(value)}, ' for name, value in self.template.fields.items())
        keys = " and ".join(f't."{key}" = {params[f"key {key}"]}' for key in table.key)
        copied = column_list(columns_read(self.template.event.values()), "t.")
        return (
            f"update {table.name} t set {sets}revision = {params['revision']},"
            f" told = {APPEND_POINTER_SQL.format(row='t')}"
            f" from {params.rows_sql()}"
            f" where {keys} and {params.accepted} returning x.ordinal, {copied}"
        )

    def events_sql(self, name: str) -> str:
        """Return the array of the events of that update, in order."""
        return f"array(select {template_event_sql(self.template, 'w')} from {name} w order by w.ordinal)"


def value_sql(
    value: Any, row: str = "t", now: str = COMMIT_TIME_SQL, parameters: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return a template's value for a row as an SQL expression. Constants come from a rule, never from a caller."""
    kind = type(value)
    if kind is ColumnRef:
        return f'{row}."{value.column}"'
    if kind is FromNow:
        return f"{now} + {value.offset}" if value.offset else now
    if kind is Parameter:
        return parameters[value.name]
    if kind is Plus:
        return " + ".join(value_sql(part, row, now, parameters) for part in (value.left, value.right))
    if kind is IfSet:
        then, otherwise = (value_sql(part, row, now, parameters) for part in (value.then, value.otherwise))
        return f'case when {row}."{value.column}" is null then {otherwise} else {then} end'
    if isinstance(value, str) and not isinstance(value, Enum):
        return "'" + value.replace("'", "''") + "'"
    return "null" if value is None else str(encode(value, refuse_queue))


def columns_read(values: Iterable[Any]) -> list[str]:
    """Return the columns that some values of a template refer to."""
    columns: dict[str, None] = {}
    for value in values:
        if isinstance(value, ColumnRef | IfSet):
            columns[value.column] = None
        if isinstance(value, IfSet):
            columns |= dict.fromkeys(columns_read((value.then, value.otherwise)))
        if isinstance(value, Plus):
            columns |= dict.fromkeys(columns_read((value.left, value.right)))
    return list(columns)


def template_event_sql(template: RowTemplate, row: str) -> str:
    """Return the event of a template for a row that it has written."""
    return _event_sql({name: value_sql(value, row) for name, value in template.event.items()})


class EventFragment(NamedTuple):
    """Events that are inserted into the batch of the event log."""

    implicit_numbers: bool
    encodings: tuple[int, ...]

    def sql(self, parameters: ParameterNumbering) -> list[str]:
        """Return CTEs with the events, and with the pointers from their executions to the batch."""
        columns = [column for column in _columns(EVENT_TYPES, self.encodings) if column[2]]
        params = ParameterRows(parameters, self.implicit_numbers, columns)
        event = _event_sql({name: params[name] for name, _, _ in columns})
        pointers = "select (e.event).execution_id, n.batch_id from events e, new_batch n"
        accepted = f"from {params.rows_sql()} where {params.accepted}"
        return [
            f"events as materialized (select x.ordinal, {event} as event {accepted})",
            f"pointers as ({INSERT_POINTER_SQL} {pointers} on conflict do nothing)",
        ]

    def events_sql(self) -> str:
        """Return the array of the events, in order."""
        return "array(select event from events order by ordinal)"


def _event_sql(values: dict[str, str]) -> str:
    """Return an event as a value of the type that batches hold."""
    return f"row({', '.join(values.get(name, 'null') for name in EVENT_TYPES)})::ff_told"


def _columns(types: dict[str, str], encodings: tuple[int, ...]) -> list[tuple[str, str, int]]:
    return [(name, kind, encoding) for (name, kind), encoding in zip(types.items(), encodings, strict=True)]


ConditionFragment = GuardFragment | TimeBoundsFragment
WriteFragment = UpdateFragment | InsertFragment | BulkInsertFragment | DeleteFragment | TemplateFragment
