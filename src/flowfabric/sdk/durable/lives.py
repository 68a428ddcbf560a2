"""Continue as new: a durable function ends its life, and the same run begins another one with other arguments."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NoReturn

from flowfabric.errors import InvalidInput
from flowfabric.sdk.durable.attempt import is_in_step
from flowfabric.sdk.durable.parker import HandlerUnwound
from flowfabric.sdk.serialization.inputs import JSON_ENCODING

if TYPE_CHECKING:
    from flowfabric.sdk.context import Context
    from flowfabric.sdk.durable.ledger import Ledger

logger = logging.getLogger("flowfabric.durable")

CONTINUE_OVER = 1_000  # operations after which a life should continue as new
WARN_AT = 5_000
CONTINUE = "continue_as_new"


def should_continue(ledger: Ledger, run_id: str) -> bool:
    """True if this attempt has reached so many operations; a replay gives the same answer at the same place."""
    count = ledger.reached_count
    if count >= WARN_AT and not ledger.has_warned_of_length:
        ledger.has_warned_of_length = True
        logger.warning(
            "%s remembers %d operations, which every attempt loads; let it call ctx.continue_as_new(…)", run_id, count
        )
    return count > CONTINUE_OVER


async def continue_run(context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Check the arguments, begin the next life, and end this attempt; nothing changes if they are refused."""
    payload = _payload(context, args, kwargs)
    if context.open_reservations:
        raise InvalidInput(f"{CONTINUE}: it is inside ctx.reserve(…), whose rest would stay reserved; leave that first")
    if is_in_step() or not context.may_park:
        raise InvalidInput(f"{CONTINUE}: only the function itself can continue as new, not a step or a task beside it")
    durable = context.durable
    branch = await durable.begin_operation()
    durable.parker.check_task()
    await durable.ledger.check_new(branch, (CONTINUE, 0))
    async with durable.parker.without_parking():
        await context.flush()
        await context.acknowledge_spends()
        await context.reach_fault_point(CONTINUE, "before_effect")
        await context.engine.continue_as_new(
            context.handle, payload, encoding=JSON_ENCODING, unmet=durable.parker.waiting_gates()
        )
        durable.has_continued = True
        await context.reach_fault_point(CONTINUE, "after_commit")
    durable.parker.end()
    if context.branches.in_thread:
        raise HandlerUnwound(CONTINUE)
    if asyncio.current_task() is context.branches.root.task:
        await asyncio.get_running_loop().create_future()  # its cancellation has been requested
    raise asyncio.CancelledError(CONTINUE)


def _payload(context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the encoded arguments of the next life: as they are, or of a call made with `s` of the own task."""
    from flowfabric.sdk.call import Call

    task = context.app.tasks[context.task]
    if len(args) == 1 and not kwargs and isinstance(args[0], Call):
        call = args[0]
        if call.task is not task:
            raise InvalidInput(f"{CONTINUE}: a call of {call.task.name} is not one of {task.name}")
        args, kwargs = call.args, call.kwargs
    if task.is_batch:
        raise InvalidInput(f"{CONTINUE}: {task.name} is a batch, whose inputs stay; submit what is left to it instead")
    return task.signature.to_json(task.signature.bind(args, kwargs))
