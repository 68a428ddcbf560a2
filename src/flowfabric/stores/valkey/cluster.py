"""The client of one server or of a cluster: finds the node of a key, follows redirects, and repeats what is safe.

A call goes to the node that serves the slot of its tag, on the node's write connection, or on its read connection.
Calls to one node on one connection are executed in the order of the calls, as long as the slot map is current. A
command that was refused without being executed is sent again until its deadline (`errors.py` has the table), perhaps
behind later calls. A command whose reply was lost is repeated only if it is a read; a write ends with
`StoreUnavailable`, in doubt.

The slot map is asked for after a redirect, after a lost connection and while a node is slow. If it shows that a slow
node has lost its slots, its connections are closed at once: a failover ends the wait for a dead node.

With `wait=N` or `durability=fsync` a write in doubt may be visible and still vanish. So the next read of its slot first
makes a small write there and waits until that is confirmed, and everything before it with it. A caller that reads to
find out whether a write was executed gets the true answer, or an error while that is unknown.

One server is a cluster of one node, without slot map. There a refused connection fails its commands at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from libvalkey import pack_command

from flowfabric.errors import Corruption, FabricError, InvalidInput, StoreFault, StoreUnavailable
from flowfabric.event_loop import start_task
from flowfabric.settings import Deadlines
from flowfabric.stores.valkey.address import ValkeyAddress
from flowfabric.stores.valkey.connection import MAX_WAITING_BYTES
from flowfabric.stores.valkey.errors import Remedy, ReplyError, remedy_for, translate_reply, unavailable
from flowfabric.stores.valkey.node import Node
from flowfabric.stores.valkey.session import Argument, Command, Confirmation, Endpoint, Reply
from flowfabric.stores.valkey.slots import SLOTS, Location, barrier_key, parse_redirect, parse_slot_map, slot_of
from flowfabric.stores.valkey.subscription import ChannelSubscription

MAX_REDIRECTS = 5  # redirects that are followed at once; later ones wait
MAX_LOADS = 3  # loads of the library for one command, whose slot may move from node to node meanwhile
MIN_RETRY_S, MAX_RETRY_S = 0.01, 0.25  # between two attempts of a command
REFRESH_S = 0.1  # pause between two requests for the slot map
MAP_TIMEOUT_S = 1.0  # timeout of a request for the slot map
RETRY_S = 10.0  # time for which a command is sent again if `command_s` is unlimited
CONFIRM_SHARE = 0.5  # share of `command_s` for which WAIT and WAITAOF may block
MAX_WAIT_MS = 1000  # time for which WAIT may block: a replica is behind by milliseconds, or it is gone
MAX_CACHED_TAGS = 4096

_RANDOM = random.SystemRandom()


class ValkeyClient:
    """The connections to one server or to the nodes of a cluster."""

    def __init__(self, address: ValkeyAddress, deadlines: Deadlines | None = None) -> None:
        self.address = address
        self.deadlines = address.deadlines(deadlines or Deadlines())
        self.confirmations: Sequence[Confirmation] = self._confirmations()
        self.library: str | None = None  # loaded on a node that does not know a function
        self._tls = address.tls_context()
        self._nodes: dict[Location, Node] = {}
        self._slots: list[Node | None] = [None] * SLOTS
        self._primaries: list[Node] | None = None  # the nodes in it
        self._slot_by_tag: dict[str | bytes, int] = {}
        self._unconfirmed: dict[int, asyncio.Future[Reply] | None] = {}  # slots with writes in doubt, and the barrier
        self._stalled: list[Command] = []  # wait for the next slot map
        self._stalled_bytes = 0
        self.resent = 0  # commands that were sent again, perhaps behind later ones
        self._refreshing: asyncio.Task[None] | None = None
        self._refresh_wanted = False
        self._subscriptions: list[ChannelSubscription] = []
        self._closed = False

    def endpoint(self, location: Location) -> Endpoint:
        """Return where a node is, and the user to connect as."""
        host, port = location
        password = self.address.password
        return Endpoint(
            host,
            port,
            username=self.address.username,
            password=None if password is None else password.reveal(),
            database=self.address.database,
            tls=self._tls,
        )

    # --- calls

    async def open(self) -> None:
        """Connect; on a cluster, learn the slot map."""
        if self.address.is_cluster:
            await self._learn_slot_map()
        else:
            node = self._node(self.address.hosts[0])
            await node.read("PING")
            self._use_slots([node] * SLOTS)

    def call(self, tag: str | bytes, *arguments: Argument) -> asyncio.Future[Reply]:
        """Send a command to the node of a tag or key, behind all earlier calls to that node."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        slot = self._slot_by_tag.get(tag)
        if slot is None:
            slot = self._remember_slot(tag)
        command = Command(pack_command(arguments), future, loop.time(), slot=slot, is_read=False)
        node = self._slots[slot]
        if node is None:
            self._stall([command])
        else:
            node.writes.send(command)
        return future

    def read(self, tag: str | bytes, *arguments: Argument) -> asyncio.Future[Reply]:
        """Send a command that writes nothing to the node of a tag or key; it is repeated after a lost reply."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        slot = self._remember_slot(tag)
        command = Command(pack_command(arguments), future, loop.time(), slot=slot, is_read=True)
        if self._unconfirmed and slot in self._unconfirmed:
            self._read_after_barrier(tag, command)
        else:
            self._dispatch(command)
        return future

    def node_for(self, tag: str | bytes) -> Node:
        """Return the node that serves a tag or key; `StoreUnavailable` if none does."""
        slot = self._remember_slot(tag)
        node = self._slots[slot]
        if node is None:
            raise unavailable(f"no node serves slot {slot}", StoreFault.CLUSTER)
        return node

    def primaries(self) -> list[Node]:
        """Return the nodes that serve slots; do not change the list."""
        if self._primaries is None:
            self._primaries = list(dict.fromkeys(node for node in self._slots if node is not None))
        return self._primaries

    def one_of_each_node(self, tags: Iterable[str]) -> list[str]:
        """Return one of these tags for each node that serves some: what is sent with it follows what was sent there."""
        return list({self._slots[self._remember_slot(tag)]: tag for tag in tags}.values())

    def uncovered_slots(self) -> int:
        """Return how many slots no node serves."""
        return self._slots.count(None)

    async def for_each_primary(self, *arguments: Argument) -> list[Reply]:
        """Send a command to every primary on its write connection; return the replies, in the order of `primaries`."""
        return await asyncio.gather(*[node.call(*arguments) for node in self.primaries()])

    def subscribe(self, subscription: ChannelSubscription) -> None:
        """Start a subscription; it reconnects until the client is closed."""
        self._subscriptions.append(subscription)
        subscription.start(self._any_endpoint, self.deadlines)

    async def close(self) -> None:
        """Close all connections; calls without a reply end with `StoreUnavailable`."""
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            with suppress(asyncio.CancelledError):
                await self._refreshing
        for command in self._take_stalled():
            command.fail(unavailable("the store is closed", StoreFault.OTHER))
        await asyncio.gather(*[subscription.close() for subscription in self._subscriptions])
        await asyncio.gather(*[node.close() for node in self._nodes.values()])

    # --- routing

    def _remember_slot(self, tag: str | bytes) -> int:
        slot = self._slot_by_tag.get(tag)
        if slot is None:
            if len(self._slot_by_tag) >= MAX_CACHED_TAGS:
                self._slot_by_tag.clear()
            slot = self._slot_by_tag[tag] = slot_of(tag) if self.address.is_cluster else 0
        return slot

    def _node(self, location: Location) -> Node:
        node = self._nodes.get(location)
        if node is None:
            node = self._nodes[location] = Node(self, location)
        return node

    def _any_endpoint(self) -> Endpoint:
        """Return where a subscription connects: messages reach it on every node."""
        locations = [node.location for node in self.primaries() if not node.is_slow] or list(self.address.hosts)
        return self.endpoint(_RANDOM.choice(locations))

    def _dispatch(self, command: Command) -> None:
        """Send a command to the node that serves its slot now."""
        assert command.slot is not None
        node = self._slots[command.slot]
        if node is None:
            self._stall([command])
        else:
            self._send_to(node, command)

    def _send_to(self, node: Node, command: Command) -> None:
        if self._closed:
            command.fail(unavailable("the store is closed", StoreFault.OTHER))
        elif not command.future.done():
            command.sent_at = asyncio.get_running_loop().time()
            (node.reads if command.is_read else node.writes).send(command)

    # --- reads after a write in doubt

    def _read_after_barrier(self, tag: str | bytes, command: Command) -> None:
        """Send a read once a write to its slot is confirmed; reads of a slot share that write."""
        assert command.slot is not None
        barrier = self._unconfirmed[command.slot]
        if barrier is None or barrier.done():
            key = barrier_key(tag)
            barrier = self.call(tag, "SET", key, 1)
            self._unconfirmed[command.slot] = barrier
        barrier.add_done_callback(partial(self._finish_barrier, command))

    def _finish_barrier(self, command: Command, barrier: asyncio.Future[Reply]) -> None:
        assert command.slot is not None
        error = None if barrier.cancelled() else barrier.exception()
        if error is None and not barrier.cancelled():
            if self._unconfirmed.get(command.slot) is barrier:
                del self._unconfirmed[command.slot]
            self._dispatch(command)
        else:
            detail, source = "the store is closed", StoreFault.OTHER
            if isinstance(error, StoreUnavailable):
                detail, source = error.detail, error.source
            command.fail(unavailable(f"an earlier write is not confirmed yet: {detail}", source))

    # --- commands without a proper reply

    def handle_error_reply(self, node: Node, command: Command, error: ReplyError) -> None:
        """Send a command again that was not executed, or fail it."""
        command.redirects += 1
        self.resent += 1
        match remedy_for(error):
            case Remedy.REFUSE:
                command.fail(translate_reply(error))
            case _ if self._is_late(command):
                command.fail(translate_reply(error))
            case Remedy.FOLLOW:
                self._follow(node, command, error)
            case Remedy.LOAD_LIBRARY if self.library is not None and command.loads < MAX_LOADS:
                command.loads += 1
                node.load_library(self.library).add_done_callback(partial(self._resend_after_load, node, command))
            case Remedy.LOAD_LIBRARY:
                command.fail(translate_reply(error))
            case Remedy.REROUTE:
                if self.address.is_cluster:
                    self.refresh_soon()
                else:  # the host's name may lead to the new primary
                    node.writes.renew()
                self._retry_later(node, command)
            case Remedy.RETRY:
                self._retry_later(node, command)

    def handle_lost(self, commands: Sequence[Command], error: StoreUnavailable, *, sent: bool) -> None:
        """Send reads and unsent commands again if another node may answer; fail the others."""
        again: list[Command] = []
        for command in commands:
            is_safe = command.is_read or not sent
            if is_safe and self._may_recover(command, sent=sent):
                command.redirects += 1
                self.resent += 1
                again.append(command)
            else:
                if not is_safe and self.confirmations and command.slot is not None:
                    self._unconfirmed[command.slot] = None
                command.fail(unavailable(error.detail, error.source, in_doubt=not is_safe))
        if self._closed:
            return
        if self.address.is_cluster:
            self._stall(again)
        else:
            for command in again:
                self._dispatch(command)

    def _may_recover(self, command: Command, *, sent: bool) -> bool:
        """True if a command may be sent again: a cluster fails over, and a server may be back after a restart."""
        if self._closed or command.slot is None or self._is_late(command):
            return False
        return self.address.is_cluster or (sent and command.redirects < MAX_REDIRECTS)

    def _follow(self, node: Node, command: Command, error: ReplyError) -> None:
        if not self.address.is_cluster:
            detail = f"{node} is a node of a cluster ({error}); write valkey+cluster://… in the URL"
            command.fail(unavailable(detail, StoreFault.CLUSTER))
            return
        slot, location = parse_redirect(error.text, node.location)
        target = self._node(location)
        if error.code == "MOVED":
            self._slots[slot] = target
            self._primaries = None
            self.refresh_soon()
        else:
            command.asking = True
        if command.redirects > MAX_REDIRECTS:
            command.asking = False
            self._retry_later(target, command)
        else:
            self._send_to(target, command)

    def _resend_after_load(self, node: Node, command: Command, loading: asyncio.Future[Reply]) -> None:
        error = asyncio.CancelledError() if loading.cancelled() else loading.exception()
        if isinstance(error, StoreUnavailable):
            command.fail(unavailable(error.detail, error.source))
        elif error is not None:
            command.fail(unavailable(f"{node}: the library was not loaded: {error}", StoreFault.SCRIPT_NOT_LOADED))
        else:
            self._send_to(node, command)

    def _retry_later(self, node: Node, command: Command) -> None:
        pause_s = min(MIN_RETRY_S * 2 ** min(command.redirects, 10), MAX_RETRY_S) * _RANDOM.uniform(0.5, 1.0)
        again = partial(self._send_to, node, command) if command.slot is None else partial(self._dispatch, command)
        asyncio.get_running_loop().call_later(pause_s, again)

    def _is_late(self, command: Command) -> bool:
        limit_s = self.deadlines.command_s or RETRY_S
        return asyncio.get_running_loop().time() - command.began_at >= limit_s

    def _stall(self, commands: Iterable[Command]) -> None:
        """Let commands wait for the next slot map."""
        if self._closed:
            for command in commands:
                command.fail(unavailable("the store is closed", StoreFault.OTHER))
            return
        for command in commands:
            size = len(command.packed)
            if self._stalled and self._stalled_bytes + size > MAX_WAITING_BYTES:
                detail = f"{self._stalled_bytes} bytes of commands wait for the slot map already"
                command.fail(unavailable(detail, StoreFault.CLUSTER))
            else:
                self._stalled.append(command)
                self._stalled_bytes += size
        if self._stalled:
            self.refresh_soon()

    def _take_stalled(self) -> list[Command]:
        stalled, self._stalled, self._stalled_bytes = self._stalled, [], 0
        return stalled

    # --- the slot map

    def refresh_soon(self) -> None:
        """Ask for the slot map, unless that is under way."""
        if self._closed or not self.address.is_cluster:
            return
        self._refresh_wanted = True
        if self._refreshing is None:
            self._refreshing = start_task(self._refresh(), name="flowfabric-valkey-slots")

    async def _refresh(self) -> None:
        try:
            while self._refresh_wanted:
                self._refresh_wanted = False
                with suppress(FabricError):
                    await self._learn_slot_map()
                self._send_stalled()
                await asyncio.sleep(REFRESH_S)
        finally:
            self._refreshing = None

    def _send_stalled(self) -> None:
        for command in self._take_stalled():
            assert command.slot is not None
            if self._slots[command.slot] is not None:
                self._dispatch(command)
            elif self._is_late(command):
                command.fail(unavailable(f"no node serves slot {command.slot}", StoreFault.CLUSTER))
            else:
                self._stall([command])

    async def _learn_slot_map(self) -> None:
        """Ask nodes for the slot map until one answers."""
        known = [node.location for node in self.primaries()]
        _RANDOM.shuffle(known)
        known.sort(key=lambda location: self._node(location).is_slow)
        error: Exception = unavailable("no node knows which nodes serve the slots", StoreFault.CLUSTER)
        for location in dict.fromkeys([*known, *self.address.hosts]):
            try:
                async with asyncio.timeout(min(MAP_TIMEOUT_S, self.deadlines.connect_s or MAP_TIMEOUT_S)):
                    reply = await self._node(location).read("CLUSTER", "SLOTS")
            except TimeoutError:
                error = unavailable(f"{location[0]}:{location[1]}: no slot map in time", StoreFault.TIMEOUT)
            except Corruption as failed:
                if "cluster support disabled" not in failed.detail:
                    raise
                raise InvalidInput(f"url: {location[0]}:{location[1]} is no cluster; write valkey://…") from failed
            except FabricError as failed:
                error = failed
            else:
                if reply:
                    await self._adopt(reply, location)
                    return
        raise error

    async def _adopt(self, reply: Reply, asked: Location) -> None:
        """Use a new slot map; take commands back from nodes that have lost their slots."""
        slots: list[Node | None] = [None] * SLOTS
        for first, last, location in parse_slot_map(reply, asked):
            slots[first : last + 1] = [self._node(location)] * (last + 1 - first)
        self._use_slots(slots)
        serving = set(self.primaries())
        for node in list(self._nodes.values()):
            if node in serving:
                continue
            waiting = node.writes.take_waiting() + node.reads.take_waiting()
            for command in waiting:
                if command.slot is None:
                    command.fail(unavailable(f"{node} serves no slots any more", StoreFault.CLUSTER))
            self._stall(command for command in waiting if command.slot is not None)
            if node.is_slow:
                for connection in (node.writes, node.reads):
                    connection.drop("a slow node that has lost its slots")
            if node.writes.is_idle and node.reads.is_idle:
                del self._nodes[node.location]
                await node.close()
        for node in serving:
            node.is_slow = False

    def _use_slots(self, slots: list[Node | None]) -> None:
        self._slots = slots
        self._primaries = None
        locations = {node.location for node in self.primaries()}
        for subscription in self._subscriptions:
            subscription.leave_unless(locations)

    def _confirmations(self) -> list[Confirmation]:
        """Return the commands that confirm a batch of writes."""
        wait, fsync = self.address.wait, self.address.fsync
        limit_ms = max(1, int((self.deadlines.command_s or RETRY_S) * 1000 * CONFIRM_SHARE))
        wait_ms = min(limit_ms, MAX_WAIT_MS)
        confirmations = []
        if wait:
            confirmations.append(Confirmation("WAIT", wait, wait_ms, is_enough=lambda copies: copies >= wait))
        if fsync:
            confirmations.append(Confirmation("WAITAOF", 1, 0, limit_ms, is_enough=lambda copies: copies[0] >= 1))
        return confirmations
