"""What the server lets the holder of a handle do beyond the verbs of the specification."""

from __future__ import annotations

from collections.abc import Mapping

from flowfabric.engine.operations.executions import ExecutionOperations, fence_of
from flowfabric.engine.validation import execution as validate
from flowfabric.handles import Handle
from flowfabric.model.answers import execution as answers
from flowfabric.rules import validation
from flowfabric.rules.execution import holder, lease
from flowfabric.rules.execution import tags as tag_rules


class HolderOperations(ExecutionOperations):
    """Verbs that need the lease of the handle they are given."""

    async def set_tags(self, handle: Handle, pairs: Mapping[str, str]) -> int:
        """Set several tags of the held execution, all or none; how many were given.

        Only the holder of the lease may set tags that begin with `ff.`: people who decide by them trust them.
        """
        execution_id, fence = self.runtime.handle_fields(handle).execution_id, fence_of(handle)
        given = validate.validate_tags(pairs)
        if refused := tag_rules.check_not_empty(given):
            raise refused
        return await self.runtime.decide_execution(
            execution_id, lambda row, now: holder.set_tags_as_holder(row, fence, given, now), use_cache=True
        )

    async def cancel_as_holder(self, handle: Handle, *, reason: str = "") -> answers.Cancelled:
        """Cancel with the current lease, or with the last one while its attempt is open."""
        execution_id, fence = self.runtime.handle_fields(handle).execution_id, fence_of(handle)
        why = validation.text("reason", reason)
        return await self.runtime.decide_execution(
            execution_id, lambda row, _: holder.cancel_as_holder(row, fence, why)
        )

    async def require_lease(self, handle: Handle) -> None:
        """Refuse a handle whose lease is not the current one, or is over.

        For verbs on other partitions, which cannot be fenced in the same change: the lease may end right after it.
        """
        fields, fence = self.runtime.handle_fields(handle), fence_of(handle)
        await self.runtime.decide_execution(
            fields.execution_id, lambda row, now: lease.check_renewal(row, fields.attempt_index, fence, now)
        )
