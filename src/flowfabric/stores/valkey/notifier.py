"""Notifications between processes: PUBLISH and SUBSCRIBE on one channel for each database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from secrets import token_hex

import msgspec

from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.subscription import ChannelSubscription

Callback = Callable[[frozenset[str]], None]
ANY_HOME = "{ff}"


class ValkeyNotifier:
    """Sends the notifications of this process and receives those of others."""

    def __init__(self, client: ValkeyClient) -> None:
        self._client = client
        self._name = token_hex(6)
        self._channel = f"ff_wake:{client.address.database}"
        self._callbacks: list[Callback] = []
        self._subscription: ChannelSubscription | None = None

    def notify(self, topics: frozenset[str]) -> None:
        """Notify other processes."""
        if topics:
            self.notify_behind(topics, [ANY_HOME])

    def notify_behind(self, topics: frozenset[str], homes: Iterable[str]) -> None:
        """Notify other processes of what was sent to these partitions, by a message behind it on each node.

        A call that is redirected is executed after the message.
        """
        message = msgspec.json.encode((self._name, sorted(topics)))
        for home in self._client.one_of_each_node(homes):
            self._client.call(home, "PUBLISH", self._channel, message).add_done_callback(_ignore)

    def on_notify(self, callback: Callback) -> None:
        """Call back with the topics of other processes; with none after messages may have been lost."""
        self._callbacks.append(callback)
        if self._subscription is None:
            self._subscription = ChannelSubscription(
                self._channel, on_message=self._receive, on_reconnect=lambda: self._call_back(frozenset())
            )
            self._client.subscribe(self._subscription)

    def _receive(self, _: bytes, message: bytes) -> None:
        sender, topics = msgspec.json.decode(message, type=tuple[str, list[str]])
        if sender != self._name:
            self._call_back(frozenset(topics))

    def _call_back(self, topics: frozenset[str]) -> None:
        for callback in self._callbacks:
            callback(topics)


def _ignore(reply: asyncio.Future[object]) -> None:
    """A lost notification delays others by a poll interval."""
    if not reply.cancelled():
        reply.exception()
