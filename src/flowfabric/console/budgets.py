"""Budgets and quotas: their usage and holders, and forms to change their limits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar

import msgspec

from flowfabric import errors
from flowfabric.console.pages import Ui, View, action, page, parse_integer
from flowfabric.engine.operations.overview import Spending
from flowfabric.engine.types import ExecutionSnapshot, QuotaStatus
from flowfabric.model.answers.limits import BudgetStatus
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE
from flowfabric.model.text import format_amount, split_dimension
from flowfabric.server import logging
from flowfabric.server.errors import bad_request
from flowfabric.server.request import path_uuid

MAX_BUDGETS = 100
MAX_QUOTAS = 100
MAX_SPENDERS = 100
SHOWN_HOLDERS = 5
MAX_HOLDERS = 100
BUDGET_MAILBOXES = ("budget:", "own-budget:")  # prefixes of gates that wait for capacity in a budget


class BudgetRow(msgspec.Struct, frozen=True):
    """One dimension of a budget."""

    budget_id: str
    namespace: str
    label: str
    dimension: str
    used: int
    reserved: int
    soft_limit: int
    limit: int
    refusals: int
    resets_at: int | None

    @property
    def is_hot(self) -> bool:
        """True if more than 80 % of the limit are used or reserved."""
        return bool(self.limit) and self.used + self.reserved >= 0.8 * self.limit


class BudgetsPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "budgets.html"
    namespace: str
    budgets: list[BudgetRow]
    quotas: list[QuotaStatus]
    tasks: dict[str, str]  # tasks of the first runs that hold a slot, by id


class BudgetPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "budget.html"
    namespace: str
    budget_id: str
    rows: list[BudgetRow]
    refusals: int
    resets_at: int | None
    spenders: list[Spending]
    tasks: dict[str, str]  # tasks of the runs that spend, by id


def budget_label(status: BudgetStatus) -> str:
    """Return the name of a budget: its scope, as in `llm:acme`."""
    return status.scope_id or status.budget_id


def needed_amount(mailbox: str) -> str:
    """Return the amount that a run waits for, from the name of its mailbox: `budget:<id>:<amount>:<dimension>`."""
    _, _, need = mailbox.partition(":")
    amount, _, dimension = need.partition(":")[2].partition(":")
    if not amount.isdecimal():
        return mailbox
    return f"{format_amount(int(amount), dimension)} {split_dimension(dimension)[0]}"


async def link_to_budget(ui: Ui, run: ExecutionSnapshot, budget_id: str) -> list[tuple[str, str]]:
    """Return the link to a budget of the run's namespace, or to a shared one that the caller may see."""
    for namespace in dict.fromkeys((run.namespace, DEFAULT_NAMESPACE)):
        with suppress(errors.NotFound):
            if ui.sees_all or namespace in (ui.namespaces or ()):
                label = budget_label(await ui.engine.get_budget_status(budget_id, namespace=namespace))
                return [(f"budget {label}", ui.url(f"/budgets/{budget_id}", namespace=namespace))]
    return []


def budget_rows(status: BudgetStatus, namespace: str) -> list[BudgetRow]:
    """Return one row for each dimension."""
    label = budget_label(status)
    resets_at = int(status.next_reset_at) if status.next_reset_at else None
    return [
        BudgetRow(
            status.budget_id,
            namespace,
            label,
            dimension,
            status.usage.get(dimension, 0),
            status.reserved.get(dimension, 0),
            status.soft_limits.get(dimension, 0),
            status.hard_limits.get(dimension, 0),
            status.breach_count,
            resets_at,
        )
        for dimension in sorted({*status.usage, *status.hard_limits, *status.soft_limits})
    ]


async def list_budget_rows(ui: Ui, namespace: str) -> list[BudgetRow]:
    """Return the budgets of a namespace, those that are closest to their limits first."""
    ids = await ui.engine.list_budgets(namespace=namespace, limit=MAX_BUDGETS)
    statuses = await asyncio.gather(*(ui.engine.get_budget_status(each, namespace=namespace) for each in ids))
    rows = [row for status in statuses for row in budget_rows(status, namespace)]
    return sorted(rows, key=lambda row: -(row.used + row.reserved) / (row.limit or 1e18))


@page("/budgets", rows="budgets")
async def show_budgets(ui: Ui) -> BudgetsPage:
    """Show the budgets and quotas of a namespace."""
    namespace = ui.namespace
    quotas = (await ui.engine.list_quotas(namespace=namespace, limit=MAX_QUOTAS)).quotas
    return BudgetsPage(
        title="Budgets & quotas",
        about="budgets",
        namespace=namespace,
        budgets=await list_budget_rows(ui, namespace),
        quotas=quotas,
        tasks=await _tasks_of_holders(ui, quotas),
    )


async def _tasks_of_holders(ui: Ui, quotas: list[QuotaStatus]) -> dict[str, str]:
    """Return the tasks of the first holders: a quota has no name, so its holders identify it for people."""
    if not ui.sees_all:  # runs of other namespaces may hold slots of a shared quota
        return {}
    ids = [holder for quota in quotas for holder in quota.holders[:SHOWN_HOLDERS]][:MAX_HOLDERS]
    found = await asyncio.gather(*(ui.engine.read_execution_info(holder) for holder in ids))
    return {holder: info.execution_kind for holder, info in zip(ids, found, strict=True) if info is not None}


def _budget(ui: Ui, namespace: str | None) -> tuple[str, str]:
    budget_id = path_uuid("budget_id", ui.request.path_params[0].removesuffix(".json"))
    return budget_id, ui.request.resolve_namespace(namespace)


@page("/budgets/{id}")
async def show_budget(ui: Ui) -> BudgetPage:
    """Show one budget, and who spends it."""
    budget_id, namespace = _budget(ui, ui.given_namespace)
    status = await ui.engine.get_budget_status(budget_id, namespace=namespace)
    rows = budget_rows(status, namespace)
    spenders = (await ui.engine.list_spenders(budget_id, namespace=namespace, limit=MAX_SPENDERS)).spending
    return BudgetPage(
        title=rows[0].label if rows else budget_id,
        about="budgets",
        namespace=namespace,
        budget_id=budget_id,
        rows=rows,
        refusals=status.breach_count,
        resets_at=int(status.next_reset_at) if status.next_reset_at else None,
        spenders=sorted(spenders, key=lambda one: -one.amount),
        tasks=await ui.engine.read_kinds({one.execution_id for one in spenders}) if ui.sees_all else {},
    )


@action("/budgets/{id}/limits", scope=ApiScope.OPERATE)
async def change_limits(ui: Ui, fields: Mapping[str, str]) -> str:
    """Change the limits of a budget; runs that wait for it check again. The reason is in the audit log."""
    budget_id, namespace = _budget(ui, fields.get("namespace") or None)
    dimensions = [name.removeprefix("hard.") for name in fields if name.startswith("hard.")]
    await ui.engine.change_budget_limits(
        budget_id,
        dimensions=dimensions,
        hard_limits=[_parse_limit(f"hard.{name}", fields[f"hard.{name}"], name) for name in dimensions],
        soft_limits=[_parse_limit(f"soft.{name}", fields.get(f"soft.{name}", "0"), name) for name in dimensions],
        namespace=namespace,
    )
    await ui.engine.unblock_budget_waiters(budget_id, namespace=namespace)
    reason = {"who": ui.principal.name, "about": budget_id, "reason": fields.get("reason", "")[:500]}
    logging.log_audit("budget_limits_changed", reason)
    return ui.url(f"/budgets/{budget_id}", namespace=namespace, done="limits")


def _parse_limit(field: str, text: str, dimension: str) -> int:
    """Parse an amount in the unit that people use, as in `2.50` of `usd_millionths`."""
    _, unit = split_dimension(dimension)
    whole, point, fraction = text.strip().partition(".")
    digits = len(str(unit)) - 1
    if not point or not digits:
        return parse_integer(field, text) * unit
    if len(fraction) > digits or not fraction.isdecimal() or not fraction.isascii():
        raise bad_request(f"{field}: {text[:40]!r} is no amount with at most {digits} digits after the point")
    return parse_integer(field, (whole or "0") + fraction.ljust(digits, "0"))


@action("/budgets/{id}/reset", scope=ApiScope.OPERATE)
async def reset_usage(ui: Ui, fields: Mapping[str, str]) -> str:
    """Start the usage of a budget again at zero."""
    budget_id, namespace = _budget(ui, fields.get("namespace") or None)
    await ui.engine.reset_budget(budget_id, namespace=namespace)
    await ui.engine.unblock_budget_waiters(budget_id, namespace=namespace)
    return ui.url(f"/budgets/{budget_id}", namespace=namespace, done="reset")
