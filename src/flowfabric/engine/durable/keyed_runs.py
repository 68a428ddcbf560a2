"""Submits with a key, and the run that has a key."""

from __future__ import annotations

import asyncio

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.operations.create import LATE_CREATE_PAUSE_S, defaults_of
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.keyed_lock import KeyedLock
from flowfabric.engine.runtime.lane_spread_cache import LaneSpreads
from flowfabric.engine.runtime.read_set import ReadSet, load_each
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.ids import mint_solo
from flowfabric.model.answers.execution import Submitted
from flowfabric.model.execution import Execution, IdempotencyKey, Payload
from flowfabric.model.gate import Reply
from flowfabric.model.suspension import Suspension
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import keys as key_rules
from flowfabric.rules.durable.keys import KeyPolicy, KeyRows
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.scheduling.lane_spread import KeyPlace
from flowfabric.stores.queries import Read


class KeyedRuns:
    """Creates runs under keys, finds them, and deletes keys that no run has any longer."""

    def __init__(self, runtime: Runtime, lanes: LaneSpreads) -> None:
        self._runtime = runtime
        self._lanes = lanes
        self._locks = KeyedLock()

    async def submit(self, ask: CreateExecution, policy: KeyPolicy, message: MessageArgs | None) -> Submitted:
        """Create a run under its key, or handle the run that has it as the policy says.

        After a change of the lane's spread the key may be taken on another partition: then that one decides.
        """
        async with self._locks.hold(ask.digest):
            while True:
                await self._lanes.prepare()
                place = self._lanes.place(ask)
                elsewhere = None if place is None else await self._find_taken(ask, place, policy)
                try:
                    if elsewhere is not None:
                        fresh = ids.ExecutionId(f"{{fp:{elsewhere}}}:{self._runtime.minter.uuid()}")
                        moved = msgspec.structs.replace(ask, execution_id=fresh, partition=elsewhere)
                        return await self._submit(moved, policy, message, None, only_if_taken=True)
                    return await self._submit(ask, policy, message, place)
                except _Freed:
                    pass  # the key was taken on the other partition until now
                except errors.KeyElsewhere:
                    if place is None or not place.is_here:
                        raise
                await asyncio.sleep(LATE_CREATE_PAUSE_S)
                await self._lanes.refresh()

    async def find(self, key: str, namespace: str, lane: ids.LaneId) -> str | None:
        """Return the run that has a key of this lane: one that has not ended, or else the last one."""
        await self._lanes.prepare()
        spread = self._lanes.spread(lane)
        fresh = mint_solo(lane, self._runtime.partitions, self._runtime.minter, spread=spread, key=key)
        ask = CreateExecution(
            execution_id=fresh,
            partition=ids.partition_of(fresh),
            namespace=namespace,
            lane_id=lane,
            execution_kind="",
            idempotency_key=key,
        )
        place = self._lanes.place(ask)
        partitions = [ask.partition, *(() if place is None else (partition for partition, _ in place.lookups))]
        rows = await load_each(self._runtime, IdempotencyKey, ((partition, ask.digest) for partition in partitions))
        found = await load_each(self._runtime, Execution, ((row.execution_id,) for row in rows if row is not None))
        holder = key_rules.find_holder([row for row in found if row is not None])
        return None if holder is None else holder.execution_id

    async def delete_expired(self, key: IdempotencyKey) -> bool:
        """Delete an expired key, unless its run is still kept."""
        if key.until is None:  # no run keeps it
            decided = key_rules.keep_key(key, None, key.expires_at)
            assert decided.change is not None
            change = msgspec.structs.replace(decided.change, id=self._runtime.minter.change_id())
            return await self._runtime.commit_queue.add(change) is not None
        reads = ReadSet()
        row = reads.one(IdempotencyKey, key.partition, key.digest)
        holder = reads.one(Execution, key.execution_id)
        return await self._runtime.decide_and_commit(
            reads, lambda rows, now: key_rules.keep_key(row(rows), holder(rows), now)
        )

    async def _submit(
        self,
        ask: CreateExecution,
        policy: KeyPolicy,
        message: MessageArgs | None,
        place: KeyPlace | None,
        *,
        only_if_taken: bool = False,
    ) -> Submitted:
        reads, call = ReadSet(), str(self._runtime.minter.change_id())
        existing = reads.one(Execution, ask.execution_id)
        key = reads.one(IdempotencyKey, ask.partition, ask.digest)
        holder, root = reads.more_one(Execution), reads.more_one(Suspension)
        payload, asked = reads.more_one(Payload), reads.more_one(Reply)
        addressed = None if message is None else msgspec.structs.replace(message, execution_id=ask.execution_id)

        async def load_holder(rows: Rows) -> Rows:
            if (taken := key(rows)) is None:
                return [[], [], [], []]
            address = (taken.execution_id,)
            found = [Read(Execution, address), Read(Suspension, address)]
            if message is not None:
                found += [Read(Payload, address), Read(Reply, (*address, message.message_id))]
            rows = (await self._runtime.load(found)).rows
            return rows if message is not None else [*rows, [], []]

        def decide(rows: Rows, now: int) -> Decision[Submitted]:
            key_rows = KeyRows(existing(rows), key(rows), holder(rows), root(rows), payload(rows), asked(rows))
            if only_if_taken and key_rows.existing is None and not key_rules.is_taken(key_rows, policy, now):
                raise _Freed
            return key_rules.submit(
                key_rows, ask, policy, addressed, now, defaults=defaults_of(self._runtime), place=place, call=call
            )

        return await self._runtime.decide_and_commit(reads, decide, load_more=load_holder)

    async def _find_taken(self, ask: CreateExecution, place: KeyPlace, policy: KeyPolicy) -> int | None:
        """Return another partition on which a run has the key."""
        for partition, _ in place.lookups:
            reads = ReadSet()
            key = reads.one(IdempotencyKey, partition, ask.digest)
            loaded = await self._runtime.load(reads)
            if (row := key(loaded.rows)) is None:
                continue
            [holder, root] = await self._load_holder(row.execution_id)
            if key_rules.is_taken(KeyRows(None, row, holder, root), policy, loaded.now):
                return partition
        return None

    async def _load_holder(self, execution_id: str) -> tuple[Execution | None, Suspension | None]:
        reads = ReadSet()
        holder, root = reads.one(Execution, execution_id), reads.one(Suspension, execution_id)
        rows = (await self._runtime.load(reads)).rows
        return holder(rows), root(rows)


class _Freed(Exception):
    """The key is no longer taken on the partition where it was found."""
