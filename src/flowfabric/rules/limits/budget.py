"""Budget state: one budget in memory, what counts against its limits, and the change between two states.

Decisions about one budget take its state and return the answer and the new state. Several decisions are made one after
another in memory and committed once: `change_between` returns the difference as one change. All rows belong to the
budget row, whose revision changes with every write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.change import Change, Delete, Guard, Upsert, Write
from flowfabric.model.limits.budget import Budget, BudgetDimension, BudgetReservation, BudgetSpend, UsageKey
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE, NamespacedId
from flowfabric.model.view import view_of
from flowfabric.rules.limits import owner as owner_rules

DEDUP_TTL_MS = 24 * 60 * 60 * 1000
UNACKNOWLEDGED_TTL_MS = 30 * DEDUP_TTL_MS  # so long the key of a report is kept that its caller will acknowledge
MAX_AMOUNT = 2**63 - 1

A = TypeVar("A")
Amounts = tuple[tuple[str, int], ...]


class BudgetState(msgspec.Struct, frozen=True):
    """A loaded budget. Reservations, ledgers and idempotency keys are loaded only as far as they were requested."""

    budget_id: str
    partition: int
    root: Budget | None = None
    dimensions: dict[str, BudgetDimension] = {}
    reservations: dict[tuple[str, str], BudgetReservation] = {}
    spends: dict[tuple[str, str], BudgetSpend] = {}
    keys: dict[str, int] = {}  # digests of applied reports and when they expire
    spends_cleared: bool = False  # all ledgers were deleted since the load
    namespace: str = DEFAULT_NAMESPACE
    other_roots: dict[NamespacedId, Budget] = {}  # those of the same id in other namespaces, as far as loaded

    @property
    def key(self) -> NamespacedId:
        """The key prefix of all rows."""
        return NamespacedId(self.namespace, self.budget_id)

    @property
    def is_defined(self) -> bool:
        """True if the budget was defined, not only used."""
        return owner_rules.is_defined(self.root)

    def root_or_new(self) -> Budget:
        """Return the root, or a new one for usage of an undefined budget."""
        return self.root or Budget(self.budget_id, self.partition, namespace=self.namespace)

    def dimension(self, name: str) -> BudgetDimension:
        """Return a dimension, known or new."""
        return self.dimensions.get(name) or BudgetDimension(self.budget_id, name, namespace=self.namespace)

    def resolve_owner(self, namespace: str) -> NamespacedId:
        """Return the budget that this id refers to in a namespace, given the loaded roots."""
        known = self.other_roots if self.root is None else {**self.other_roots, self.key: self.root}
        return owner_rules.resolve_owner(namespace, self.budget_id, known)


BudgetDecision = tuple[A | errors.FabricError, BudgetState]


def budget_state(
    budget_id: str, partition: int, rows: Iterable[Any], namespace: str = DEFAULT_NAMESPACE
) -> BudgetState:
    """Return the state built from the loaded rows; roots of other namespaces are kept apart."""
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
    """Return the change from one state to the other; None if they are equal."""
    name = before.key
    writes: list[Write] = [Delete(BudgetSpend, name)] if after.spends_cleared else []
    if not after.spends_cleared:
        writes += [Delete(BudgetSpend, (*name, *key)) for key in before.spends.keys() - after.spends.keys()]
    writes += [
        Delete(BudgetReservation, (*name, *key)) for key in before.reservations.keys() - after.reservations.keys()
    ]
    writes += _changed_rows(before.dimensions, after.dimensions)
    writes += _changed_rows({} if after.spends_cleared else before.spends, after.spends)
    writes += _changed_rows(before.reservations, after.reservations)
    for digest, until in after.keys.items():
        if (known := before.keys.get(digest)) != until:
            if known is not None and known > until:  # acknowledged
                writes.append(Delete(UsageKey, (*name, digest, known)))
            writes.append(Upsert(UsageKey(name.id, digest, until, name.namespace)))
    if not writes and after.root == before.root:
        return None
    revision = None if before.root is None else before.root.revision
    return Change(guards=(Guard(Budget, name, revision),), writes=(Upsert(after.root_or_new()), *writes))


def _changed_rows(before: Mapping[Any, msgspec.Struct], after: Mapping[Any, msgspec.Struct]) -> list[Write]:
    return [Upsert(row) for key, row in after.items() if before.get(key) != row]


# ---------------------------------------------------------------------------------------------------------------
# Usage and limits


def used_and_reserved(row: BudgetDimension) -> int:
    """Return what counts against the limits of a dimension."""
    return (row.usage or 0) + row.reserved


def first_exhausted(dimensions: Iterable[BudgetDimension]) -> BudgetDimension | None:
    """Return the first dimension that is at or beyond its hard limit."""
    return next(
        (row for row in in_definition_order(dimensions) if row.hard_limit and used_and_reserved(row) >= row.hard_limit),
        None,
    )


def in_definition_order(dimensions: Iterable[BudgetDimension]) -> list[BudgetDimension]:
    """Return the dimensions as defined, then those that were only reported, by name."""
    return sorted(dimensions, key=lambda row: (row.position is None, row.position or 0, row.dimension))


def find_corruption(state: BudgetState) -> errors.FabricError | None:
    """Return what is wrong with the stored numbers; None if they are valid."""
    for row in state.dimensions.values():
        if min(row.hard_limit, row.soft_limit, row.usage or 0, row.reserved) < 0:
            return errors.Corruption(f"budget {state.budget_id}: {row.dimension}: a negative number")
    return None


def was_applied(state: BudgetState, digest: str, now: int) -> bool:
    """True if a report with this digest was applied and has not expired."""
    return state.keys.get(digest, 0) > now


def acknowledge(state: BudgetState, digests: Iterable[str], now: int) -> BudgetState:
    """Note that the callers of these reports have recorded them: they will not repeat them.

    Their keys stay for a day, so that a former holder of the lease who comes late is not counted either.
    """
    until = now + DEDUP_TTL_MS
    shortened = {digest: until for digest in digests if state.keys.get(digest, 0) > until}
    return replace(state, keys={**state.keys, **shortened}) if shortened else state


def find_hard_breach(state: BudgetState, amounts: Amounts) -> limit_answers.HardBreach | None:
    """Return the first dimension, in the given order, whose hard limit these amounts would exceed."""
    for name, amount in amounts:
        row = state.dimensions.get(name)
        if row is not None and row.hard_limit and used_and_reserved(row) + amount > row.hard_limit:
            action = state.root_or_new().on_hard_limit
            namespace = msgspec.UNSET if state.key.is_shared else state.namespace
            return limit_answers.HardBreach(
                name, row.usage or 0, row.hard_limit, row.reserved, action, namespace=namespace
            )
    return None


def record_breach(state: BudgetState, breach: limit_answers.HardBreach, now: int) -> BudgetDecision[Any]:
    """Return the breach, counted in the budget row."""
    row = state.root_or_new()
    root = replace(
        row,
        breach_count=row.breach_count + 1,
        last_breach_at=now,
        last_breach_dim=breach.dimension,
        last_updated_at=now,
    )
    return breach, replace(state, root=root)


def apply_usage(
    state: BudgetState,
    amounts: Amounts,
    digest: str | None,
    execution_id: str | None,
    now: int,
    *,
    key_ttl_ms: int = DEDUP_TTL_MS,
) -> BudgetDecision[limit_answers.UsageResult]:
    """Count these amounts, also in the ledger of an execution if given, and record the report's digest."""
    dimensions, spends = dict(state.dimensions), dict(state.spends)
    soft: limit_answers.SoftBreach | None = None
    for name, amount in amounts:
        known = state.dimension(name)
        usage = (known.usage or 0) + amount
        if usage > MAX_AMOUNT:
            return errors.InvalidInput(f"{name}: {usage} in use would be more than {MAX_AMOUNT}"), state
        dimensions[name] = replace(known, usage=usage)
        if soft is None and known.soft_limit and usage > known.soft_limit:
            soft = limit_answers.SoftBreach(name, usage, known.soft_limit)
        if execution_id is not None:
            spent = spends.get((execution_id, name))
            total = amount + (0 if spent is None else spent.amount)
            spends[execution_id, name] = BudgetSpend(state.budget_id, execution_id, name, total, state.namespace)
    keys = state.keys if digest is None else {**state.keys, digest: now + key_ttl_ms}
    row = state.root_or_new()
    root = replace(row, soft_breach_count=row.soft_breach_count + (soft is not None), last_updated_at=now)
    after = replace(state, root=root, dimensions=dimensions, spends=spends, keys=keys)
    return soft or limit_answers.Ok(), after


class BudgetNeed(msgspec.Struct, frozen=True):
    """The capacity that a suspended execution waits for: an amount in one dimension.

    The budget belongs to the execution's own namespace or is shared. No key can name another namespace, so a forged
    waitpoint or mailbox cannot reach one.
    """

    budget_id: str
    dimension: str
    amount: int
    namespace: str = DEFAULT_NAMESPACE

    @property
    def budget(self) -> NamespacedId:
        """The budget with its namespace."""
        return NamespacedId(self.namespace, self.budget_id)

    @property
    def key(self) -> str:
        """The key of the waitpoint, or the name of the mailbox, that the execution waits on."""
        prefix = SHARED_NEED_PREFIX if self.budget.is_shared else OWN_NEED_PREFIX
        return f"{prefix}{self.budget_id}:{self.amount}:{self.dimension}"


SHARED_NEED_PREFIX = "budget:"  # a budget of the default namespace
OWN_NEED_PREFIX = "own-budget:"  # a budget of the suspended execution's namespace


def parse_need(key: str | None, namespace: str) -> BudgetNeed | None:
    """Parse a key of an execution in a namespace; None if the key is not about a budget."""
    if key is None or not key.startswith((SHARED_NEED_PREFIX, OWN_NEED_PREFIX)):
        return None
    prefix, _, need = key.partition(":")
    budget_id, _, rest = need.partition(":")
    amount, _, dimension = rest.partition(":")
    owner = DEFAULT_NAMESPACE if f"{prefix}:" == SHARED_NEED_PREFIX else namespace
    return BudgetNeed(budget_id, dimension, int(amount), owner) if amount.isdecimal() else None


def has_capacity_for(state: BudgetState, need: BudgetNeed) -> bool:
    """True if the need fits now."""
    row = state.dimensions.get(need.dimension)
    return row is None or not row.hard_limit or used_and_reserved(row) + need.amount <= row.hard_limit


def with_reserved(state: BudgetState, need: BudgetNeed) -> BudgetState:
    """Return the state as if the need were reserved, so that the next check finds that much less capacity."""
    row = state.dimension(need.dimension)
    row = replace(row, reserved=row.reserved + need.amount)
    return replace(state, dimensions={**state.dimensions, need.dimension: row})


def status(state: BudgetState) -> limit_answers.BudgetStatus | errors.FabricError:
    """Return the budget as shown to readers."""
    root = state.root
    if root is None or not root.defined:
        return errors.NotFound("budget")
    rows = in_definition_order(state.dimensions.values())
    declared = [row for row in rows if row.position is not None]
    return view_of(
        limit_answers.BudgetStatus,
        root,
        usage={row.dimension: row.usage for row in rows if row.usage is not None},
        hard_limits={row.dimension: row.hard_limit for row in declared},
        soft_limits={row.dimension: row.soft_limit for row in declared},
        reserved={row.dimension: row.reserved for row in rows if row.reserved},
        last_breach_at=_optional_text(root.last_breach_at),
        next_reset_at=_optional_text(root.next_reset_at),
        created_at=_optional_text(root.created_at),
    )


def _optional_text(instant: int | None) -> str | None:
    return None if instant is None else str(instant)
