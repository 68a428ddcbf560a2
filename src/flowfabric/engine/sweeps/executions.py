"""The sweeps of executions: expired leases, delays, timeouts, deadlines and retention."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from flowfabric.engine.sweeps.sweeper import Sweep
from flowfabric.model.answers import execution as answers
from flowfabric.rules.execution import expire as expire_rules
from flowfabric.stores.queries import Where

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine


def execution_sweeps(engine: Engine) -> tuple[Sweep, ...]:
    """Return these sweeps."""

    async def mark(execution_id: str) -> bool:
        return isinstance(await engine.mark_lease_expired_if_due(execution_id), answers.MarkedExpired)

    async def promote(execution_id: str) -> bool:
        return await engine.promote_delayed(execution_id) is answers.Promotion.PROMOTED

    def expire(reason: str) -> Callable[[str], Awaitable[bool]]:
        async def act(execution_id: str) -> bool:
            return isinstance(await engine.expire_if_due(execution_id, reason), answers.Expired)

        return act

    return (
        Sweep("lease_expiry", "lease_expires_at", mark, (Where("lease_expired_at", "unset"),)),
        Sweep("delayed_promoter", "delay_until", promote),
        Sweep("attempt_timeout", "attempt_timeout_at", expire(expire_rules.ATTEMPT_TIMEOUT)),
        Sweep("execution_deadline", "deadline_at", expire(expire_rules.EXECUTION_DEADLINE)),
        Sweep("retention_trimmer", "purge_at", engine.purge_execution),
    )
