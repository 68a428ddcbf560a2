"""A create told in words, wherever the engine is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from flowfabric.engine.validation import execution as validate
from flowfabric.model.answers import execution as answers
from flowfabric.rules.execution.create import CreateExecution


class ExecutionCreator(ABC):
    """Creates executions."""

    @abstractmethod
    async def create(self, ask: CreateExecution) -> answers.Created | answers.Duplicate:
        """Create an execution as a request says that stands ready."""

    async def create_execution(
        self,
        *,
        execution_id: str,
        namespace: str = "default",
        lane_id: str = "default",
        execution_kind: str = "task",
        input_payload: bytes = b"",
        payload_encoding: str | None = None,
        priority: int = 0,
        creator_identity: str = "",
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
        policy: str | Mapping[str, Any] | None = None,
        delay_until: int | None = None,
        execution_deadline_at: int | None = None,
        parent_id: str | None = None,
    ) -> answers.Created | answers.Duplicate:
        """Create an execution, or learn which earlier one stands for the same id or idempotency key.

        The end of a child is told to its parent, which lives on the same partition.
        """
        return await self.create(
            CreateExecution(
                execution_id=execution_id,
                partition=0,
                namespace=namespace,
                lane_id=lane_id,
                execution_kind=execution_kind,
                input_payload=input_payload,
                payload_encoding=payload_encoding,
                priority=priority,
                creator_identity=creator_identity,
                idempotency_key=idempotency_key,
                tags={} if tags is None else tags,  # type: ignore[arg-type]
                policy=validate.policy_text(policy),
                delay_until=delay_until,
                execution_deadline_at=execution_deadline_at,
                parent_id=parent_id,
            )
        )
