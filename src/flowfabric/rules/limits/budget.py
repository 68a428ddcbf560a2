"""A budget as decisions see it: one sheet, what counts in it, and the change between two of them.

Decisions about one budget take the sheet and return the answer and the sheet as it will be. They are made one after
the other in memory and written once: `written` tells the difference between two sheets as a change. Everything in it
belongs to the budget row, whose revision moves with whatever moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.budget import Budget, BudgetDimension, BudgetReservation, BudgetSpend, UsageKey
from flowfabric.model.change import Change, Delete, Guard, Upsert, Write
from flowfabric.model.owned_id import DEFAULT_NAMESPACE, NamespacedId
from flowfabric.rules.limits import owner as owner_rules

DEDUP_LIFE_MS = 24 * 60 * 60 * 1000
MAX_AMOUNT = 2**63 - 1

A = TypeVar("A")
Amounts = tuple[tuple[str, int], ...]


class BudgetState(msgspec.Struct, frozen=True):
    """A budget as it was loaded: whole but for its ledgers and keys, of which only those asked about are here."""

    budget_id: str
    partition: int
    root: Budget | None = None
    dimensions: dict[str, BudgetDimension] = {}
    reservations: dict[tuple[str, str], BudgetReservation] = {}
    spends: dict[tuple[str, str], BudgetSpend] = {}
    keys: dict[str, int] = {}  # digest and end of life of the reports that are remembered
    spends_cleared: bool = False  # all ledgers were dropped since it was loaded
    namespace: str = DEFAULT_NAMESPACE
    other_roots: dict[
        NamespacedId, Budget
    ] = {}  # of the same id in other namespaces, as far as a decision asked for them

    @property
    def key(self) -> NamespacedId:
        """What begins the key of every row."""
        return NamespacedId(self.namespace, self.budget_id)

    @property
    def is_defined(self) -> bool:
        """True if somebody has defined it, not only used it."""
        return owner_rules.is_defined(self.root)

    def root_or_new(self) -> Budget:
        """The root, or the one that usage of an undefined budget makes."""
        return self.root or Budget(self.budget_id, self.partition, namespace=self.namespace)

    def dimension(self, name: str) -> BudgetDimension:
        """A dimension, known or new."""
        return self.dimensions.get(name) or BudgetDimension(self.budget_id, name, namespace=self.namespace)

    def resolve_owner(self, namespace: str) -> NamespacedId:
        """The budget that this id stands for in a namespace, given the roots that were loaded."""
        known = self.other_roots if self.root is None else {**self.other_roots, self.key: self.root}
        return owner_rules.resolve_owner(namespace, self.budget_id, known)


BudgetDecision = tuple[A | errors.FabricError, BudgetState]


def budget_state(
    budget_id: str, partition: int, rows: Iterable[Any], namespace: str = DEFAULT_NAMESPACE
) -> BudgetState:
    """The sheet of whatever rows were loaded; roots of other namespaces stand apart."""
    root: Budget | None = None
    dimensions, reservations, spends, keys = {}, {}, {}, dict[str, int]()
    roots: dict[NamespacedId, Budget] = {}
    for row in rows:
        match row:
            case Budget() if row.namespace != namespace:
                roots[NamespacedId(row.namespace, row.budget_id)] = row
            case Budget():
                root = row
            case BudgetDimension():
                dimensions[row.dimension] = row
            case BudgetReservation():
                reservations[row.reservation_id, row.dimension] = row
            case BudgetSpend():
                spends[row.execution_id, row.dimension] = row
            case UsageKey():
                keys[row.digest] = max(row.expires_at, keys.get(row.digest, 0))
    return BudgetState(
        budget_id, partition, root, dimensions, reservations, spends, keys, namespace=namespace, other_roots=roots
    )


def change_between(before: BudgetState, after: BudgetState) -> Change | None:
    """What makes the one of the other; None when nothing differs."""
    name = before.key
    writes: list[Write] = [Delete(BudgetSpend, name)] if after.spends_cleared else []
    if not after.spends_cleared:
        writes += [Delete(BudgetSpend, (*name, *key)) for key in before.spends.keys() - after.spends.keys()]
    writes += [
        Delete(BudgetReservation, (*name, *key)) for key in before.reservations.keys() - after.reservations.keys()
    ]
    writes += _put(before.dimensions, after.dimensions)
    writes += _put({} if after.spends_cleared else before.spends, after.spends)
    writes += _put(before.reservations, after.reservations)
    writes += [
        Upsert(UsageKey(name.id, digest, until, name.namespace))
        for digest, until in after.keys.items()
        if before.keys.get(digest) != until
    ]
    if not writes and after.root == before.root:
        return None
    revision = None if before.root is None else before.root.revision
    return Change(guards=(Guard(Budget, name, revision),), writes=(Upsert(after.root_or_new()), *writes))


def _put(before: Mapping[Any, msgspec.Struct], after: Mapping[Any, msgspec.Struct]) -> list[Write]:
    return [Upsert(row) for key, row in after.items() if before.get(key) != row]


# ---------------------------------------------------------------------------------------------------------------
# What counts


def used_and_reserved(row: BudgetDimension) -> int:
    """What counts against the limits of a dimension."""
    return (row.usage or 0) + row.reserved


def first_exhausted(dimensions: Iterable[BudgetDimension]) -> BudgetDimension | None:
    """The first dimension that leaves no room for more work: at its hard limit, or beyond."""
    return next(
        (row for row in in_definition_order(dimensions) if row.hard_limit and used_and_reserved(row) >= row.hard_limit),
        None,
    )


def in_definition_order(dimensions: Iterable[BudgetDimension]) -> list[BudgetDimension]:
    """As defined, then what was only reported, by name."""
    return sorted(dimensions, key=lambda row: (row.position is None, row.position or 0, row.dimension))


def find_corruption(sheet: BudgetState) -> errors.FabricError | None:
    """What is wrong with the stored numbers of a budget; None when they make sense."""
    for row in sheet.dimensions.values():
        if min(row.hard_limit, row.soft_limit, row.usage or 0, row.reserved) < 0:
            return errors.Corruption(f"budget {sheet.budget_id}: {row.dimension}: a negative number")
    return None


def was_applied(sheet: BudgetState, digest: str, now: int) -> bool:
    """Whether a report of this name was applied and is remembered."""
    return sheet.keys.get(digest, 0) > now


def find_hard_breach(sheet: BudgetState, amounts: Amounts) -> limit_answers.HardBreach | None:
    """The first dimension, in the order given, whose hard limit these amounts would exceed."""
    for name, amount in amounts:
        row = sheet.dimensions.get(name)
        if row is not None and row.hard_limit and used_and_reserved(row) + amount > row.hard_limit:
            action = sheet.root_or_new().on_hard_limit
            own = msgspec.UNSET if sheet.key.is_shared else sheet.namespace
            return limit_answers.HardBreach(name, row.usage or 0, row.hard_limit, row.reserved, action, namespace=own)
    return None


def record_breach(sheet: BudgetState, breach: limit_answers.HardBreach, now: int) -> BudgetDecision[Any]:
    """The refusal, and its place in the books."""
    row = sheet.root_or_new()
    root = replace(
        row,
        breach_count=row.breach_count + 1,
        last_breach_at=now,
        last_breach_dim=breach.dimension,
        last_updated_at=now,
    )
    return breach, replace(sheet, root=root)


def apply_usage(
    sheet: BudgetState, amounts: Amounts, digest: str | None, execution_id: str | None, now: int
) -> BudgetDecision[limit_answers.UsageResult]:
    """Count these amounts, for the ledger of an execution if one is named, and remember the report by its name."""
    dimensions, spends = dict(sheet.dimensions), dict(sheet.spends)
    soft: limit_answers.SoftBreach | None = None
    for name, amount in amounts:
        known = sheet.dimension(name)
        usage = (known.usage or 0) + amount
        if usage > MAX_AMOUNT:
            return errors.InvalidInput(f"{name}: {usage} in use would be more than {MAX_AMOUNT}"), sheet
        dimensions[name] = replace(known, usage=usage)
        if soft is None and known.soft_limit and usage > known.soft_limit:
            soft = limit_answers.SoftBreach(name, usage, known.soft_limit)
        if execution_id is not None:
            spent = spends.get((execution_id, name))
            total = amount + (0 if spent is None else spent.amount)
            spends[execution_id, name] = BudgetSpend(sheet.budget_id, execution_id, name, total, sheet.namespace)
    keys = sheet.keys if digest is None else {**sheet.keys, digest: now + DEDUP_LIFE_MS}
    row = sheet.root_or_new()
    root = replace(row, soft_breach_count=row.soft_breach_count + (soft is not None), last_updated_at=now)
    after = replace(sheet, root=root, dimensions=dimensions, spends=spends, keys=keys)
    return soft or limit_answers.Ok(), after


class BudgetNeed(msgspec.Struct, frozen=True):
    """What an execution that a hard limit put to sleep waits for: room for so much in one dimension.

    The budget is one of the execution's own namespace or a shared one. No key can name another namespace, whoever made
    the waitpoint or the mailbox.
    """

    budget_id: str
    dimension: str
    amount: int
    namespace: str = DEFAULT_NAMESPACE

    @property
    def budget(self) -> NamespacedId:
        """Whose budget it is, and which."""
        return NamespacedId(self.namespace, self.budget_id)

    @property
    def key(self) -> str:
        """The name of the waitpoint, or of the mailbox, that it sleeps on."""
        start = SHARED_NEED_PREFIX if self.budget.is_shared else OWN_NEED_PREFIX
        return f"{start}{self.budget_id}:{self.amount}:{self.dimension}"


SHARED_NEED_PREFIX = "budget:"  # a budget of the default namespace
OWN_NEED_PREFIX = "own-budget:"  # one of the namespace of the execution that sleeps


def parse_need(key: str | None, namespace: str) -> BudgetNeed | None:
    """What a key says in an execution of a namespace; None when it is about something else."""
    if key is None or not key.startswith((SHARED_NEED_PREFIX, OWN_NEED_PREFIX)):
        return None
    start, _, told = key.partition(":")
    budget_id, _, rest = told.partition(":")
    amount, _, dimension = rest.partition(":")
    whose = DEFAULT_NAMESPACE if f"{start}:" == SHARED_NEED_PREFIX else namespace
    return BudgetNeed(budget_id, dimension, int(amount), whose) if amount.isdecimal() else None


def has_capacity_for(sheet: BudgetState, need: BudgetNeed) -> bool:
    """Whether there is room for it now."""
    row = sheet.dimensions.get(need.dimension)
    return row is None or not row.hard_limit or used_and_reserved(row) + need.amount <= row.hard_limit


def with_reserved(sheet: BudgetState, need: BudgetNeed) -> BudgetState:
    """The sheet as if the need were met already: whoever is asked after this one finds so much less room."""
    row = sheet.dimension(need.dimension)
    row = replace(row, reserved=row.reserved + need.amount)
    return replace(sheet, dimensions={**sheet.dimensions, need.dimension: row})


def status(sheet: BudgetState) -> limit_answers.BudgetStatus | errors.FabricError:
    """The budget for people."""
    root = sheet.root
    if root is None or not root.defined:
        return errors.NotFound("budget")
    rows = in_definition_order(sheet.dimensions.values())
    declared = [row for row in rows if row.position is not None]
    return limit_answers.BudgetStatus(
        budget_id=root.budget_id,
        scope_type=root.scope_type,
        scope_id=root.scope_id,
        enforcement_mode=root.enforcement_mode,
        usage={row.dimension: row.usage for row in rows if row.usage is not None},
        hard_limits={row.dimension: row.hard_limit for row in declared},
        soft_limits={row.dimension: row.soft_limit for row in declared},
        breach_count=root.breach_count,
        soft_breach_count=root.soft_breach_count,
        on_hard_limit=root.on_hard_limit,
        on_soft_limit=root.on_soft_limit,
        reserved={row.dimension: row.reserved for row in rows if row.reserved},
        last_breach_at=_text(root.last_breach_at),
        last_breach_dim=root.last_breach_dim,
        next_reset_at=_text(root.next_reset_at),
        created_at=_text(root.created_at),
    )


def _text(instant: int | None) -> str | None:
    return None if instant is None else str(instant)
