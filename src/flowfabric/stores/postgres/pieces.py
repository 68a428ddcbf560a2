"""The pieces that a commit statement is made of: each knows its shape, and the words for it.

A piece serves any number of rows. A column in which all of them agree comes as one value, the others as one list
each; a column that is unset in all of them does not come at all. What comes how is the piece's `habit`, part of its
shape: two batches with equal pieces share one prepared statement. `habits.py` hands the values over in the order in
which the words ask for them: first the single ones, then the lists.

Each row belongs to a change, whose number picks its verdict. When every change of the batch has exactly one row, in
order, the rows are `counted` and the numbers need not be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

from flowfabric.model.event import Event
from flowfabric.model.execution import Execution
from flowfabric.rules.change import Form, FromNow, LeaseWant, Like, Own
from flowfabric.stores.codec import encode, no_line
from flowfabric.stores.postgres.habits import DIFFER, LISTED, NUMBERS, OFFSETS, VALUES, words_of_list
from flowfabric.stores.postgres.sql import Parameters, Row, column_type, quoted
from flowfabric.stores.rows import TABLE

Lock = Literal["update", "share", "none"]

COLUMN_TYPES: dict[Row, dict[str, str]] = {
    table.row: {column.name: column_type(column) for column in table.columns} for table in TABLE.values()
}
KEY_TYPES: dict[Row, tuple[str, ...]] = {
    table.row: tuple(COLUMN_TYPES[table.row][name] for name in table.key) for table in TABLE.values()
}
EVENT_TYPES = {
    name: "bigint" if name in ("lease_epoch", "attempt_index") else "text" for name in Event.__struct_fields__
}
LEASE_TYPES = {"want": "smallint", "lease_id": "text", "lease_epoch": "bigint"}
BOUND_TYPES = {"not_before": "bigint", "not_after": "bigint"}

CLOCK = "coalesce({given}, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)"
NOW = "(select now from verdict)"
NUMBER = "select nextval('ff_batch_batch_id_seq') as batch_id"  # of a batch: to be drawn when all locks are held
POINT = "insert into ff_told_in (execution_id, batch_id)"
# The batches that tell of a row, with this one as the newest.
POINTER = (
    "case when cardinality({row}.told) >= 1000 then {row}.told[2:] || (select batch_id from number)"
    " else array_append({row}.told, (select batch_id from number)) end"
)


class Given:
    """Rows that come as parameters, under the name `x`; `x.place` counts them from 1."""

    def __init__(self, parameters: Parameters, counted: bool, columns: Sequence[tuple[str, str, int]]) -> None:
        """`columns` has name, type and habit of each."""
        self._parameters = parameters
        self._lists: list[tuple[str, str, int]] = [] if counted else [("no", "int", NUMBERS)]
        self._words = {name: self._column(name, kind, habit) for name, kind, habit in columns}
        self.no = "x.place::int" if counted else "x.no"
        self.yes = f"(select yes from verdict)[{self.no}]"

    def __getitem__(self, name: str) -> str:
        """The value of a column."""
        return self._words[name]

    def rows(self) -> str:
        """The table of rows; to be asked for once, after everything else."""
        if not self._lists:
            return "(select 1::bigint as place) as x"
        lists = ", ".join(words_of_list(self._parameters, kind, habit) for _, kind, habit in self._lists)
        return f"unnest({lists}) with ordinality as x ({quoted(name for name, _, _ in self._lists)}, place)"

    def _column(self, name: str, kind: str, habit: int) -> str:
        if not habit:
            return "null"
        if habit & DIFFER:
            self._lists.append((name, kind, habit))
            value = f'x."{name}"'
        else:
            value = self._parameters.one(kind)
        if not habit & OFFSETS:
            return value
        if not habit & VALUES:
            return f"{NOW} + {value}"
        self._lists.append((f"{name} is an offset", "boolean", LISTED))
        return f'case when x."{name} is an offset" then {NOW} + {value} else {value} end'


class Judged(NamedTuple):
    """Guards of one table: each row is found by its key, locked, and compared with what the change had seen."""

    row: Row
    lock: Lock  # "none" is for rows that must be absent: one that is there refuses the change, locked or not
    like: Like | None  # what they must look like, in place of a revision
    leased: bool
    counted: bool
    habit: tuple[
        int, ...
    ]  # of the key, of the revision or the own columns, and if leased of what is asked of the lease

    def words(self, name: str, before: str | None, parameters: Parameters) -> str:
        """A table expression with `no` and `holds` a guard; of a lease's end only what the clock has still to judge."""
        table = TABLE[self.row]
        kinds = {f"key {key}": kind for key, kind in zip(table.key, KEY_TYPES[self.row], strict=True)}
        if self.like is not None:
            kinds |= {f"own {column}": COLUMN_TYPES[self.row][column] for column in self.like.own}
        elif self.lock != "none":
            kinds["revision"] = "bigint"
        if self.leased:
            kinds |= LEASE_TYPES
        given = Given(parameters, self.counted, _columns(kinds, self.habit))
        found = f"from {table.name} r where " + " and ".join(f'r."{key}" = {given[f"key {key}"]}' for key in table.key)
        if before:
            found += f" and (select count(*) from {before}) >= 0"
        if self.lock == "none":
            return (
                f"{name} as materialized (select {given.no} as no, t.found is null as holds from {given.rows()}"
                f" left join lateral (select true as found {found} limit 1) t on true)"
            )
        if self.like is None:
            seen, holds, ends = ["revision"], f"{given['revision']} = t.revision", ""
        else:
            seen, ends = [table.key[0], *self.like.fields, *self.like.own], ""
            looks = [f't."{table.key[0]}" is not null', *map(_looks, self.like.fields.items())]
            looks += [f't."{column}" is not distinct from {given[f"own {column}"]}' for column in self.like.own]
            holds = " and ".join(looks)
        if self.leased:
            seen += ["lease_id", "lease_epoch", "lease_expires_at"]
            same = f"{given['lease_id']} = t.lease_id and {given['lease_epoch']} = t.lease_epoch"
            holds += f" and ({given['want']} is null or ({same}))"
            ends = f", {given['want']} as want, t.lease_expires_at as ends_at"
        return (
            f"{name} as materialized (select {given.no} as no, coalesce({holds}, false) as holds{ends}"
            f" from {given.rows()}"
            f" left join lateral (select {quoted(seen, 'r.')} {found} for {self.lock}) t on true)"
        )

    def verdict(self, name: str) -> str:
        """`no` and `ok` a guard, once the clock has been read."""
        if not self.leased:
            return f"select no, holds as ok from {name}"
        live = f"g.want = {LeaseWant.LIVE.value}"
        return (
            f"select g.no, g.holds and (g.want is null or coalesce((g.ends_at > c.now) = ({live}), false)) as ok"
            f" from {name} g, clock c"
        )


def _looks(column: tuple[str, Any]) -> str:
    name, value = column
    return f't."{name}" is null' if value is None else f't."{name}" = {_formed(value)}'


class Timed(NamedTuple):
    """Changes with a time before or after which they do not hold, and those without any guard."""

    counted: bool
    habit: tuple[int, ...]

    def words(self, name: str, before: str | None, parameters: Parameters) -> str:
        """A table expression with the two bounds of each change."""
        given = Given(parameters, self.counted, _columns(BOUND_TYPES, self.habit))
        bounds = f"{given['not_before']}::bigint as not_before, {given['not_after']}::bigint as not_after"
        return f"{name} as materialized (select {given.no} as no, {bounds} from {given.rows()})"

    def verdict(self, name: str) -> str:
        """`no` and `ok` a change."""
        return (
            f"select g.no, c.now >= coalesce(g.not_before, c.now) and c.now <= coalesce(g.not_after, c.now) as ok"
            f" from {name} g, clock c"
        )


class Patched(NamedTuple):
    """Rows that get new values in the same columns."""

    row: Row
    columns: tuple[str, ...]
    unless: str | None
    counted: bool
    habit: tuple[int, ...]  # of the key, and of the columns

    def words(self, parameters: Parameters) -> str:
        table = TABLE[self.row]
        # The key has names of its own, since a patch may set one of its columns.
        kinds = {f"key {key}": kind for key, kind in zip(table.key, KEY_TYPES[self.row], strict=True)}
        kinds |= {name: COLUMN_TYPES[self.row][name] for name in self.columns}
        given = Given(parameters, self.counted, _columns(kinds, self.habit))
        sets = ", ".join(f'"{name}" = {given[name]}' for name in self.columns)
        keys = " and ".join(f't."{key}" = {given[f"key {key}"]}' for key in table.key)
        unless = f' and t."{self.unless}" is null' if self.unless else ""
        return f"update {table.name} t set {sets} from {given.rows()} where {keys}{unless} and {given.yes}"


class Inserted(NamedTuple):
    """New rows, or (`put`) rows that replace what is there."""

    row: Row
    put: bool
    counted: bool
    habit: tuple[int, ...]  # of all columns

    def words(self, parameters: Parameters) -> str:
        table = TABLE[self.row]
        columns = [column for column in _columns(COLUMN_TYPES[self.row], self.habit) if column[2]]
        given = Given(parameters, self.counted, columns)
        values = ", ".join(given[name] for name, _, _ in columns)
        names = quoted(name for name, _, _ in columns)
        into = f"insert into {table.name} ({names}) select {values} from {given.rows()} where {given.yes}"
        if not self.put:
            return into
        others = [name for name in table.column_names if name not in table.key]
        sets = ", ".join(f'"{name}" = excluded."{name}"' for name in others)
        then = f"update set {sets}" if others else "nothing"
        return f"{into} on conflict ({quoted(table.key)}) do {then}"


class Copied(NamedTuple):
    """New rows of one change that are alike but for a few columns."""

    row: Row
    habit: tuple[int, ...]  # of all columns

    def words(self, parameters: Parameters) -> str:
        number = parameters.one("int")
        columns = [column for column in _columns(COLUMN_TYPES[self.row], self.habit) if column[2]]
        given = Given(parameters, True, columns)
        values = ", ".join(given[name] for name, _, _ in columns)
        names = quoted(name for name, _, _ in columns)
        into = f"insert into {TABLE[self.row].name} ({names}) select {values} from {given.rows()}"
        return f"{into} where (select yes from verdict)[{number}]"


class Deleted(NamedTuple):
    """All rows whose keys begin like the given ones."""

    row: Row
    width: int
    counted: bool
    habit: tuple[int, ...]

    @property
    def empties_roots(self) -> bool:
        """Whether it may take any number of roots for one key."""
        table = TABLE[self.row]
        return table.is_root and self.width < len(table.key)

    def words(self, parameters: Parameters) -> str:
        table = TABLE[self.row]
        start = dict(zip(table.key[: self.width], KEY_TYPES[self.row], strict=False))
        given = Given(parameters, self.counted, _columns(start, self.habit))
        keys = "".join(f't."{key}" = {given[key]} and ' for key in start)
        left = " returning t.execution_id, t.told" if self.row is Execution else ""
        return f"delete from {table.name} t using {given.rows()} where {keys}{given.yes}{left}"

    def then(self, name: str) -> list[str]:
        """Table expressions that stand on it: what points to the batches that tell of a row outlives it, as they do."""
        if self.row is not Execution:
            return []
        kept = "select b.batch_id from ff_batch b where b.batch_id = p.batch_id for key share"  # no trim in between
        pointers = f"select t.execution_id, b.batch_id from {name} t, unnest(t.told) p (batch_id), lateral ({kept}) b"
        return [f"{name}_left as ({POINT} {pointers} on conflict do nothing)"]


class Formed(NamedTuple):
    """Roots of which a form says what becomes of them."""

    form: Form
    counted: bool
    habit: tuple[int, ...]  # of the key and the revision

    def words(self, parameters: Parameters) -> str:
        """The update of the roots, which answers with everything that the form copies from them."""
        table = TABLE[self.form.root]
        kinds = {f"key {key}": kind for key, kind in zip(table.key, KEY_TYPES[table.row], strict=True)}
        given = Given(parameters, self.counted, _columns(kinds | {"revision": "bigint"}, self.habit))
        sets = "".join(f'"{name}" = {_formed(value)}, ' for name, value in self.form.fields.items())
        keys = " and ".join(f't."{key}" = {given[f"key {key}"]}' for key in table.key)
        copied = quoted((value.column for value in self.form.event.values() if type(value) is Own), "t.")
        return (
            f"update {table.name} t set {sets}revision = {given['revision']}, told = {POINTER.format(row='t')}"
            f" from {given.rows()}"
            f" where {keys} and {given.yes} returning x.place, {copied}"
        )

    def told(self, name: str) -> str:
        """The events of that update, in order, as an array."""
        told = {column: _formed(value, "w") for column, value in self.form.event.items()}
        return f"array(select {_event(told)} from {name} w order by w.place)"


def _formed(value: Any, own: str = "t") -> str:
    """A value of a form in the words of the server; it comes from a rule, never from a caller."""
    if type(value) is Own:
        return f'{own}."{value.column}"'
    if type(value) is FromNow:
        return f"{NOW} + {value.offset}"
    if isinstance(value, str) and not isinstance(value, Enum):
        return "'" + value.replace("'", "''") + "'"
    return "null" if value is None else str(encode(value, no_line))


class Told(NamedTuple):
    """Events."""

    counted: bool
    habit: tuple[int, ...]

    def words(self, parameters: Parameters) -> list[str]:
        """Table expressions: the events, and what points from their executions to the batch."""
        columns = [column for column in _columns(EVENT_TYPES, self.habit) if column[2]]
        given = Given(parameters, self.counted, columns)
        event = _event({name: given[name] for name, _, _ in columns})
        pointers = "select (e.told).execution_id, n.batch_id from events e, number n"
        return [
            f"events as materialized (select x.place, {event} as told from {given.rows()} where {given.yes})",
            f"pointers as ({POINT} {pointers} on conflict do nothing)",
        ]

    def told(self) -> str:
        """The events, in order, as an array."""
        return "array(select told from events order by place)"


def _event(values: dict[str, str]) -> str:
    """An event as a batch holds it."""
    return f"row({', '.join(values.get(name, 'null') for name in EVENT_TYPES)})::ff_told"


def _columns(kinds: dict[str, str], habits: tuple[int, ...]) -> list[tuple[str, str, int]]:
    return [(name, kind, habit) for (name, kind), habit in zip(kinds.items(), habits, strict=True)]


Guards = Judged | Timed
Writes = Patched | Inserted | Copied | Deleted | Formed
