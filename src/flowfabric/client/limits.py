"""Budgets and quotas over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowfabric import errors
from flowfabric.api import budgets
from flowfabric.client.base import ClientBase, execution_path
from flowfabric.client.decoding import decode_as, decode_variant
from flowfabric.client.transport import quote_segment
from flowfabric.engine.operations.limits import BudgetReader
from flowfabric.handles import Handle
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE

_USAGE = (limit_answers.Ok, limit_answers.AlreadyApplied, limit_answers.SoftBreach, limit_answers.HardBreach)


class ClientLimits(ClientBase):
    """Operations on budgets and quota policies."""

    async def create_budget(
        self,
        budget_id: str,
        *,
        dimensions: Sequence[str],
        hard_limits: Sequence[int],
        soft_limits: Sequence[int],
        scope_type: str = "",
        scope_id: str = "",
        enforcement_mode: str = "",
        on_hard_limit: str = "",
        on_soft_limit: str = "",
        reset_interval_ms: int = 0,
        namespace: str = DEFAULT_NAMESPACE,
        declaration: str | None = None,
    ) -> limit_answers.BudgetDefined:
        """Define a budget; a second definition changes nothing unless its `declaration` differs.

        Defining needs an operator's token. With a lesser token an existing budget is accepted.
        """
        body = {
            "budget_id": budget_id,
            "dimensions": list(dimensions),
            "hard_limits": list(hard_limits),
            "soft_limits": list(soft_limits),
            "scope_type": scope_type,
            "scope_id": scope_id,
            "enforcement_mode": enforcement_mode,
            "on_hard_limit": on_hard_limit,
            "on_soft_limit": on_soft_limit,
            "reset_interval_ms": reset_interval_ms,
            "namespace": namespace,
        } | ({} if declaration is None else {"declaration": declaration})
        match await self._define("budgets", budget_id, body):
            case "Created":
                return limit_answers.BudgetCreated(budget_id)
            case "Changed":
                return limit_answers.LimitsChanged(budget_id)
            case _:
                return limit_answers.BudgetExists(budget_id)

    async def _define(self, kind: str, name: str, body: dict[str, Any]) -> str:
        """Define a budget or quota policy, or find it defined; return the variant name of the response."""
        try:
            response = await self.transport.request("POST", f"/v1/{kind}", body)
        except errors.Unauthorized:
            where, query = f"/v1/{kind}/{quote_segment(name)}", {"namespace": body["namespace"]}
            if (await self.transport.request("GET", where, query=query, allow_not_found=True)).status == 404:
                raise
            return "AlreadySatisfied"
        return next(iter(decode_as(response.body, dict[str, Any])), "")

    async def change_budget_limits(
        self,
        budget_id: str,
        *,
        dimensions: Sequence[str],
        hard_limits: Sequence[int],
        soft_limits: Sequence[int],
        namespace: str = DEFAULT_NAMESPACE,
    ) -> limit_answers.LimitsChanged:
        body = {
            "dimensions": list(dimensions),
            "hard_limits": list(hard_limits),
            "soft_limits": list(soft_limits),
            "namespace": namespace,
        }
        response = await self.transport.request("PUT", _budget_path(budget_id, "limits"), body)
        changed: limit_answers.LimitsChanged = decode_variant(response.body, Changed=limit_answers.LimitsChanged)
        return changed

    async def list_budgets(
        self, *, cursor: str | None = None, limit: int = 50, namespace: str = DEFAULT_NAMESPACE
    ) -> list[str]:
        query = {"cursor": cursor, "limit": limit, "namespace": namespace}
        return (await self.transport.fetch(budgets.BudgetIds, "GET", "/v1/budgets", query=query)).budgets

    async def get_budget_status(
        self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE
    ) -> limit_answers.BudgetStatus:
        query = {"namespace": namespace}
        return await self.transport.fetch(limit_answers.BudgetStatus, "GET", _budget_path(budget_id), query=query)

    read_budget_usage_and_limits = BudgetReader.read_budget_usage_and_limits

    async def create_quota_policy(
        self,
        quota_policy_id: str,
        *,
        window_seconds: int,
        max_requests_per_window: int,
        max_concurrent: int,
        jitter_ms: int = 0,
        namespace: str = DEFAULT_NAMESPACE,
    ) -> limit_answers.QuotaPolicyCreated | limit_answers.QuotaPolicyExists:
        """Define a quota policy; a second definition changes nothing. Needs the same token as a budget."""
        body = {
            "quota_policy_id": quota_policy_id,
            "window_seconds": window_seconds,
            "max_requests_per_window": max_requests_per_window,
            "max_concurrent": max_concurrent,
            "jitter_ms": jitter_ms,
            "namespace": namespace,
        }
        if await self._define("quotas", quota_policy_id, body) == "Created":
            return limit_answers.QuotaPolicyCreated(quota_policy_id)
        return limit_answers.QuotaPolicyExists(quota_policy_id)

    # -- usage of executions ------------------------------------------------------------------------------------------

    async def record_spend(
        self,
        budget_id: str,
        execution_id: str,
        deltas: Mapping[str, int],
        *,
        idempotency_key: str | None = None,
        handle: Handle | None = None,
        namespace: str | None = None,
        shared: bool = True,
        reservation_id: str | None = None,
        acknowledged: Sequence[str] | None = None,
    ) -> limit_answers.UsageResult:
        _holds_nothing(handle)
        body = {
            "budget_id": budget_id,
            "dimensions": dict(deltas),
            "idempotency_key": idempotency_key,
            "namespace": namespace,
            "shared": shared,
            "reservation_id": reservation_id,
            "acknowledged": None if acknowledged is None else list(acknowledged),
        }
        response = await self.transport.request("POST", execution_path(execution_id, "spend"), body)
        return decode_variant(response.body, *_USAGE)

    async def reserve_budget(
        self,
        budget_id: str,
        execution_id: str,
        amounts: Mapping[str, int],
        *,
        ttl_ms: int,
        reservation_id: str | None = None,
        handle: Handle | None = None,
        namespace: str | None = None,
        shared: bool = True,
        drawn: Mapping[str, int] | None = None,
        epoch: int = 0,
    ) -> limit_answers.Reserved | limit_answers.HardBreach | limit_answers.AlreadyApplied:
        _holds_nothing(handle)
        body: dict[str, Any] = {
            "budget_id": budget_id,
            "reservation_id": reservation_id or self.minter.uuid(),
            "amounts": dict(amounts),
            "ttl_ms": ttl_ms,
            "namespace": namespace,
            "shared": shared,
            "drawn": dict(drawn or {}),
            "epoch": epoch,
        }
        response = await self.transport.request("POST", execution_path(execution_id, "reserve"), body)
        return decode_variant(
            response.body, limit_answers.Reserved, limit_answers.HardBreach, limit_answers.AlreadyApplied
        )

    async def settle_budget(
        self,
        budget_id: str,
        execution_id: str,
        reservation_id: str,
        amounts: Mapping[str, int],
        *,
        namespace: str | None = None,
        shared: bool = True,
    ) -> limit_answers.UsageResult:
        body = {
            "budget_id": budget_id,
            "reservation_id": reservation_id,
            "amounts": dict(amounts),
            "namespace": namespace,
            "shared": shared,
        }
        response = await self.transport.request("POST", execution_path(execution_id, "settle"), body)
        return decode_variant(response.body, *_USAGE)

    async def refund_budget(
        self,
        budget_id: str,
        reservation_id: str,
        *,
        execution_id: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        shared: bool = True,
        epoch: int | None = None,
        acknowledged: Sequence[str] = (),
    ) -> limit_answers.Refunded:
        body = {
            "reservation_id": reservation_id,
            "execution_id": execution_id,
            "namespace": namespace,
            "shared": shared,
            "epoch": epoch,
            "acknowledged": list(acknowledged),
        }
        response = await self.transport.request("POST", _budget_path(budget_id, "refund"), body)
        return decode_variant(response.body, limit_answers.Refunded)

    async def unblock_budget_waiters(self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> bool:
        response = await self.transport.request("POST", _budget_path(budget_id, "wake"), query={"namespace": namespace})
        return bool(decode_as(response.body, dict[str, bool])["still_waiting"])


def _budget_path(budget_id: str, *rest: str) -> str:
    return "/".join(("/v1/budgets", quote_segment(budget_id), *rest))


def _holds_nothing(handle: Handle | None) -> None:
    if handle is not None:
        raise errors.InvalidInput("handle: a server charges budgets by execution id; leave the handle out")
