"""Facts, the inbox, and replies: what a run publishes and what it receives.

Each is recorded with the operation that caused it, so that a replay does not repeat it: a fact that was set, a reply
that was given, and whether the inbox could be closed.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowfabric.engine.types import MAX_FACT_BYTES, MAX_MAILBOXES, FactArgs, GateArgs, MemoArgs, ReplyArgs
from flowfabric.errors import FactTooLarge, InvalidInput
from flowfabric.model.gate import GateKind, GateMemo, GateOutcome
from flowfabric.sdk import validation
from flowfabric.sdk.durable.attempt import is_in_step
from flowfabric.sdk.durable.context_part import ContextPart
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.serialization.values import ValueCodec, from_json, incoming_codec, json_bytes, to_plain

if TYPE_CHECKING:
    from flowfabric.sdk.durable.attempt import DurableAttempt

Codecs = Mapping[str, ValueCodec]  # by the name of the message

SETS_PER_LEASE = 1 << 32  # numbers of the sets inside a step, which counts them anew under each lease


class Message:
    """A message from the inbox: its name and value, who sent it, and `reply` if the sender waits for one.

    The sender is a host and process, or what `ff send --by` says. A message matches by name and value:
    `case Message("add", item) as ask`.
    """

    __match_args__ = ("name", "value")

    def __init__(self, durable: DurableAttempt | None, memo: GateMemo, value: Any) -> None:
        self.name: str = memo.mailbox or ""
        self.value = value
        self.sender = memo.sender or ""
        self.id = memo.message_id or ""
        self.wants_reply = memo.wants_reply
        self._durable = durable

    async def reply(self, value: Any = None) -> None:
        """Reply to the sender; the first reply stays. Does nothing if the sender waits for none."""
        payload = json_bytes(to_plain(value))
        await self._reply(ReplyArgs(message_id=self.id, payload=payload, payload_encoding="json"))

    async def refuse(self, reason: str) -> None:
        """Refuse what was asked: the asker gets `Refused` with this reason. The first reply stays."""
        if not reason:
            raise InvalidInput('reason: empty; say why, as in ask.refuse("the cart is full")')
        await self._reply(ReplyArgs(message_id=self.id, reason=reason))

    async def _reply(self, args: ReplyArgs) -> None:
        durable = self._durable
        if not self.wants_reply or durable is None:
            return
        branch = await durable.begin_operation()
        place = durable.next_place(f"reply:{self.name}")
        if await durable.ledger.find_step(branch, place, self.id) is not None:
            return
        point = f"reply:{self.name}"
        async with durable.parker.without_parking():
            await durable.reach(point, "before_effect")
            await durable.reach(point, "after_effect")
            await durable.engine.reply(durable.handle, args, _memo(durable, place, self.id))
            await durable.reach(point, "after_commit")

    def __repr__(self) -> str:
        return f"Message({self.name!r}, {self.value!r})"


class Inbox:
    """Messages of several names, in the order in which they were sent."""

    def __init__(self, durable: DurableAttempt, codecs: Codecs) -> None:
        self._durable = durable
        self._codecs = codecs
        self._is_closed = False

    async def next(self, timeout: Duration | None = None) -> Message | None:
        """Return the next message, sent before or after this call; None if none arrives in time."""
        if self._is_closed:
            raise InvalidInput("inbox: it is closed, so that no message can arrive")
        durable = self._durable
        await durable.begin_operation()
        memo = await durable.open_and_wait(
            GateArgs(
                name=durable.next_gate_name("inbox"),
                kind=GateKind.MAILBOX,
                mailboxes=tuple(self._codecs),
                expires_in_ms=None if timeout is None else to_ms(timeout, "timeout"),
            )
        )
        if memo.ended_as is GateOutcome.TIMED_OUT:
            return None
        name = memo.mailbox or ""
        codec = self._codecs.get(name)
        plain = from_json(memo.payload or b"null")
        return Message(durable, memo, plain if codec is None else codec.load(plain, name))

    async def close(self) -> bool:
        """Close the inbox if every message to the run has been read: from then on senders are refused.

        Returns False if one is unread; then nothing changes.
        """
        durable = self._durable
        branch = await durable.begin_operation()
        place = durable.next_place("close:inbox")
        memo = await durable.ledger.find_step(branch, place, None)
        if memo is not None:
            self._is_closed = from_json(memo.result) is True
            return self._is_closed
        async with durable.parker.without_parking():
            await durable.reach("close:inbox", "before_effect")
            await durable.reach("close:inbox", "after_effect")
            self._is_closed = await durable.engine.close_inbox(durable.handle, _memo(durable, place, None))
            await durable.reach("close:inbox", "after_commit")
        return self._is_closed


class ContextInbox(ContextPart):
    """The part of a context that shows facts and receives messages."""

    def __init__(self) -> None:
        super().__init__()
        self._fact_sets: Counter[str] = Counter()  # of this attempt, by place
        self._fact_lock = asyncio.Lock()

    @property
    @abstractmethod
    def declared_inbox(self) -> Codecs:
        """What the task declares to take."""

    async def set(self, name: str, value: Any) -> None:
        """Show a value under a name, of up to 64 KiB as JSON: `run.get(name)` reads it without a worker.

        The last value is kept as long as the run. A replay does not repeat a set that it reaches again, so a fact never
        returns to an earlier value; a step that runs again does.
        """
        data = encode_fact(name, value)
        durable = self.durable
        branch = await durable.begin_operation()
        if is_in_step():
            place, before = f"in:{name}", self.handle.fields.lease_epoch * SETS_PER_LEASE
        else:
            place, before = f"{branch.name}{name}", 0
        self._fact_sets[place] += 1
        count = before + self._fact_sets[place]
        if count <= durable.ledger.fact_sets.get(place, 0):
            return
        if durable.ledger.has_left(branch) and not is_in_step():
            await durable.wait_until_left(branch)
        number = durable.ledger.next_number()
        args = FactArgs(name=name, value=data, encoding="json", place=place, count=count, number=number)
        async with durable.parker.without_parking(), self._fact_lock:  # one after the other, in the order of the calls
            await durable.reach(f"fact:{name}", "before_effect")
            await durable.reach(f"fact:{name}", "after_effect")
            await self.engine.set_fact(self.handle, args)
            await durable.reach(f"fact:{name}", "after_commit")

    def inbox(self, **messages: Any) -> Inbox:
        """Return the messages to this run, of these names and types, in the order in which they were sent.

        Without names, it has all those that the task declares: `@app.task(inbox={"add": Item, "close": None})`.
        """
        declared = self.declared_inbox
        if not messages:
            if not declared:
                raise InvalidInput(
                    'inbox: the task declares none; write @app.task(inbox={"add": Item}) or ctx.inbox(add=Item)'
                )
            return Inbox(self.durable, declared)
        if unknown := [name for name in messages if declared and name not in declared]:
            raise InvalidInput(f"inbox: the task declares no {unknown[0]!r}; it has {', '.join(sorted(declared))}")
        return Inbox(self.durable, message_codecs(messages))


def message_codecs(messages: object) -> dict[str, ValueCodec]:
    """Return the codecs of messages that are declared by name and type."""
    if not isinstance(messages, Mapping):
        raise InvalidInput(f'inbox: {messages!r} is no mapping; write inbox={{"add": Item, "close": None}}')
    if len(messages) > MAX_MAILBOXES:
        raise InvalidInput(f"inbox: {len(messages)} names, the limit is {MAX_MAILBOXES}; give messages a field instead")
    return {validation.validate_name(name): incoming_codec(shape, f"inbox {name}") for name, shape in messages.items()}


def encode_fact(name: str, value: Any) -> bytes:
    """Return the JSON of a fact; one that is too large is refused."""
    validation.validate_name(name)
    data = json_bytes(to_plain(value))
    if len(data) > MAX_FACT_BYTES:
        raise FactTooLarge(f"{name}: {len(data)} bytes, the limit is {MAX_FACT_BYTES}")
    return data


def _memo(durable: DurableAttempt, place: tuple[str, int], digest: str | None) -> MemoArgs:
    name, occurrence = place
    number = durable.ledger.next_number()
    return MemoArgs(name=name, occurrence=occurrence, encoding="json", digest=digest, number=number)
