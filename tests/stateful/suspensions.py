"""Suspension operations: suspends, gates, messages, signals and streams as moves, beside all the others.

Signals are sent early, late, twice and in any order; keys rotate during a wait; the clock advances to just before, at
and just after deadlines. Used tokens, waitpoints and signals stay in use. Invariants are checked here without reference
to the rules.
"""

from __future__ import annotations

from typing import Any
from uuid import NAMESPACE_OID, uuid5

import msgspec

from flowfabric.model.condition import (
    AllConditions,
    ByName,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    Wildcard,
)
from flowfabric.model.gate import GateKind, GateMemo
from flowfabric.model.suspension import Suspension, TimeoutBehavior, Waitpoint
from flowfabric.rules.durable.gates import GateArgs
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.security.waitpoint_token import WaitpointToken
from flowfabric.rules.suspension.arguments import FreshWaitpoint, ResumePolicy, SuspendArgs, UsePendingWaitpoint
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery, SignalArgs
from flowfabric.testing.invariants import scan_all
from tests.stateful import choices as some
from tests.stateful.operations import Lives
from tests.stateful.predicates import is_active
from tests.stateful.state_machine import move

NAMES = ("go", "go", "ok", "stop")
SOURCES = ("ana", "ana", "bo")
KEYS = (None, None, "i1", "i2")
CONDITIONS: tuple[Condition, ...] = (
    Single("k", Wildcard()),
    Single("k", ByName("go")),
    AllConditions((Single("k", ByName("go")), Single("k", ByName("ok")))),
    Count(2, CountKind.DISTINCT_SOURCES, ("k",)),
    Count(2, CountKind.DISTINCT_SIGNALS, ("k",), ByName("go")),
    AllConditions((Single("k", ByName("go")), Count(1, CountKind.DISTINCT_SOURCES, ("k",), ByName("ok")))),
    OperatorOnly(),
)
TWO = AllConditions((Single("k"), Single("l", ByName("ok"))))
FRAMES = (
    (b"text", "durable"),
    (b"\xff", "durable"),
    (b'{"a":{"b":1}}', "summary"),
    (b"[]", "summary"),
    (b"x", "best_effort"),
)


class Waiting(Lives):
    """Every suspension operation."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[str, str]] = []  # executions and their waitpoints, open or closed
        self.tokens: dict[str, str] = {}
        self.sent: list[SignalArgs] = []
        self.accepted: dict[str, int] = {}  # how many signals each waitpoint accepted
        self.remembered: dict[tuple[str, str], tuple[str, int]] = {}

    def place(self, number: int, wanted: str = "open") -> tuple[str, str]:
        """Return a waitpoint, most often an open one; otherwise one that closed long ago."""
        states = self.run(self._states()) if number < 7 else {}
        fit = [place for place in self.places if states.get(place[1]) in (wanted, "pending")]
        choice = fit or self.places
        return choice[-1 - number % len(choice)]

    async def _states(self) -> dict[str, str]:
        """Return which waitpoints are pending, open or closed, from the rows alone."""
        store, now = self.players[0].store, self.clock.now
        roots = {root.execution_id: root for root in await scan_all(store, Suspension)}
        found = {}
        for one in await scan_all(store, Waitpoint):
            root = roots[one.execution_id]
            if one.gate is not None:
                gate = msgspec.json.decode(root.gates or "{}").get(one.gate, {})
                own = any(pair[0] == one.waitpoint_id for pair in gate.get("waitpoints", ()))
                state = "open" if own and gate.get("expires_at", now + 1) > now else "closed"
                state = state if one.closed_at is None else "closed"
            elif one.suspension_id is None and one.closed_at is None:
                state = "pending" if one.expires_at > now else "closed"
            else:
                own = root.suspension_id == one.suspension_id and root.closed_at is None
                state = "open" if own and one.closed_at is None else "closed"
            found[one.waitpoint_id] = state
        return found

    async def _gates(self, execution_id: str) -> dict[str, Any]:
        """Return the open gates of an execution, from the rows alone."""
        roots = await scan_all(self.players[0].store, Suspension)
        texts = (root.gates for root in roots if root.execution_id == execution_id)
        found: dict[str, Any] = msgspec.json.decode(next(texts, None) or "{}")
        return found

    @move(weight=12, lane=some.lanes, worker=some.workers)
    def keep_busy(self, lane: str, worker: str) -> None:
        """Let a worker claim existing or new work and keep it for a while."""
        order = {"lane_id": lane, "lease_ttl_ms": 30_000, **self.who(worker)}
        if self.do("claim", capabilities=("gpu", "cuda"), **order) is None:
            self.do("create_execution", execution_id=self.new_id(lane), lane_id=lane)
            self.do("claim", **order)

    # -- suspending ---------------------------------------------------------------------------------------------------

    @move(
        weight=14,
        pick=some.picks,
        condition=CONDITIONS,
        timeout=some.instants,
        behavior=tuple(TimeoutBehavior),
        delay=(None, None, 300),
        key=(None, None, None, "s1"),
        two=(False, False, False, True),
    )
    def suspend(self, pick: int, condition: Condition, two: bool, **asked: Any) -> None:
        if not self.held:
            return
        held = self.handle(pick)
        bindings = [FreshWaitpoint(self.minter.uuid(), "k")] + [FreshWaitpoint(self.minter.uuid(), "l")] * two
        self._suspend(held, TWO if two else condition, tuple(bindings), **asked)

    @move(weight=5, pick=some.picks, place=some.picks, condition=CONDITIONS, timeout=some.instants)
    def suspend_on_pending(self, pick: int, place: int, condition: Condition, timeout: int | None) -> None:
        if self.held and self.places:
            execution_id, waitpoint_id = self.place(place, "pending")
            own = [held for held in self.held if held.fields.execution_id == execution_id]
            held = own[-1] if own and pick < 8 else self.handle(pick)
            self._suspend(held, condition, (UsePendingWaitpoint(waitpoint_id),), timeout=timeout)

    def _suspend(self, held: Any, condition: Condition, bindings: tuple[Any, ...], **asked: Any) -> None:
        args = SuspendArgs(
            suspension_id=self.minter.uuid(),
            waitpoints=bindings,
            resume_condition=condition,
            reason_code="waiting_for_signal",
            now=self.clock.now,
            timeout_at=self.instant(asked.get("timeout")),
            timeout_behavior=asked.get("behavior", TimeoutBehavior.AUTO_RESUME),
            resume_policy=ResumePolicy(resume_delay_ms=asked.get("delay")),
            idempotency_key=asked.get("key"),
        )
        answer = self.do("suspend", handle=held, args=args)
        details = getattr(answer, "details", None)
        if details is not None:
            for one in (details, *details.additional_waitpoints):
                self._keep(held.fields.execution_id, one.waitpoint_id, one.waitpoint_token)

    @move(weight=5, pick=some.picks, length=(0, 1, 500, 5000, 5000))
    def make_a_waitpoint(self, pick: int, length: int) -> None:
        if self.held:
            held = self.handle(pick)
            made = self.do("create_waitpoint", handle=held, waitpoint_key="k", expires_in=length)
            if hasattr(made, "token"):
                self._keep(held.fields.execution_id, made.waitpoint_id, made.token)

    def _keep(self, execution_id: str, waitpoint_id: str, token: WaitpointToken) -> None:
        if waitpoint_id not in self.tokens:
            self.places.append((execution_id, waitpoint_id))
            self.accepted[waitpoint_id] = 0
        self.tokens[waitpoint_id] = token.reveal()

    # -- waits of a durable function ----------------------------------------------------------------------------------

    @move(weight=6, pick=some.picks, name=("g", "g", "h"), keys=(("k",), ("k", "l")), length=(None, None, 500, 5000))
    def open_a_gate(self, pick: int, name: str, keys: tuple[str, ...], length: int | None) -> None:
        """Open a gate; links are derived from their position, so that the next life asks there again."""
        if not self.held:
            return
        held = self.handle(pick)
        e, before = held.fields.execution_id, self.run(self._states())
        was_open = name in self.run(self._gates(e))  # Its links may be closed one by one, and nothing starts anew.
        args = GateArgs(
            name=name,
            kind=GateKind.SIGNALS,
            condition=Count(len(keys), CountKind.DISTINCT_WAITPOINTS, keys),
            waitpoints=tuple((str(uuid5(NAMESPACE_OID, f"{e}|{name}|{key}")), key) for key in keys),
            expires_in_ms=length,
        )
        for link in getattr(self.do("open_gate", handle=held, args=args), "links", ()):
            if not was_open and before.get(link.waitpoint_id) == "closed" and link.waitpoint_id in self.accepted:
                self.accepted[link.waitpoint_id] = 0  # It starts anew without its former state.
                for key in [key for key in self.remembered if key[0] == link.waitpoint_id]:
                    del self.remembered[key]
            self._keep(e, link.waitpoint_id, link.token)

    @move(weight=2, pick=some.picks, unmet=((), ("m",)))
    def begin_the_next_life(self, pick: int, unmet: tuple[str, ...]) -> None:
        """Continue as new: gates close, what was remembered goes, unread messages stay."""
        if self.held:
            self.do("continue_as_new", handle=self.handle(pick), input_payload=b"2", unmet=unmet)

    @move(weight=3, lane=some.lanes, worker=some.workers, lives=(1, 2), votes=(0, 1, 2))
    def ask_and_park(self, lane: str, worker: str, lives: int, votes: int) -> None:
        """Ask people and park, perhaps again in a life after one that succeeded."""
        e = self.new_id(lane)
        self.do("create_execution", execution_id=e, lane_id=lane)
        for life in range(lives):
            who = self.who(worker)
            self.do("issue_claim_grant", execution_id=e, lane_id=lane, grant_ttl_ms=1000, **who)
            self.do("claim_execution", execution_id=e, lease_ttl_ms=30_000, **who)
            self.open_a_gate(0, "g", ("k", "l"), None)
            for vote in range(votes):
                self.signal(vote, "go", "ana", "i1", False, ttl=86_400_000, cap=10_000, seat=0)
            if life + 1 < lives:
                self.do("complete", handle=self.handle(0), result=b"asked")
                self.do("replay_execution", execution_id=e)
        self.park(0, ("g",))

    @move(weight=4, pick=some.picks, kind=(GateKind.MAILBOX, GateKind.TIMER), length=(0, 300, 5000))
    def open_another_gate(self, pick: int, kind: GateKind, length: int) -> None:
        if self.held:
            box = "box" if kind is GateKind.MAILBOX else None
            args = GateArgs(name=kind.value, kind=kind, mailbox=box, expires_in_ms=length or None if box else length)
            self.do("open_gate", handle=self.handle(pick), args=args)

    @move(weight=6, pick=some.picks, names=(("g",), ("g", "h"), ("g", "mailbox", "timer"), ("mailbox",), ("timer",)))
    def park(self, pick: int, names: tuple[str, ...]) -> None:
        if self.held:
            held = self.handle(pick)
            waits = self.do("read_waits", execution_id=held.fields.execution_id)
            known = tuple(name for name in names if name in waits.open) if pick < 8 else names
            self.do("park", handle=held, gates=known or names)

    @move(weight=4, pick=some.picks, key=KEYS, text=(b"", b"one", b"two"), seat=some.seats)
    def send_a_message(self, pick: int, key: str | None, text: bytes, seat: int) -> None:
        e = self.pick(pick, is_active)
        args = MessageArgs(
            execution_id=e,
            mailbox="box",
            message_id=self.minter.uuid(),
            payload=text,
            idempotency_key=key,
            dedup_ttl_ms=500,
        )
        self.do("send_message", seat=seat, args=args)

    @move(place=some.picks)
    def close_a_waitpoint(self, place: int) -> None:
        if self.places:
            self.do("close_waitpoint", waitpoint_id=self.place(place)[1])

    # -- signals ------------------------------------------------------------------------------------------------------

    @move(
        weight=24,
        place=some.picks,
        name=NAMES,
        source=SOURCES,
        key=KEYS,
        forged=(False, False, False, False, True),
        ttl=(86_400_000, 86_400_000, 500, 0),
        cap=(10_000, 10_000, 10_000, 3),
        seat=some.seats,
    )
    def signal(self, place: int, name: str, source: str, key: str | None, forged: bool, **asked: Any) -> None:
        if not self.places:
            return
        execution_id, waitpoint_id = self.place(place)
        token = self.tokens[waitpoint_id] if not forged else self.tokens[self.places[0][1]][:-1] + "0"
        args = SignalArgs(
            execution_id=execution_id,
            waitpoint_id=waitpoint_id,
            signal_id=self.minter.uuid(),
            signal_name=name,
            source_type="user",
            source_identity=source,
            payload=name.encode(),
            waitpoint_token=WaitpointToken(token),
            idempotency_key=key,
            dedup_ttl_ms=asked["ttl"],
            max_signals_per_execution=asked["cap"],
            signal_maxlen=4,
        )
        self.sent.append(args)
        self._deliver(args, asked["seat"])

    @move(weight=3, pick=some.picks, seat=some.seats)
    def signal_again(self, pick: int, seat: int) -> None:
        """Repeat a signal exactly, as after a lost reply, perhaps much later."""
        if self.sent:
            self._deliver(self.sent[-1 - pick % len(self.sent)], seat)

    def _deliver(self, args: SignalArgs, seat: int) -> None:
        before = self.run(self._states()).get(args.waitpoint_id)
        answer = self.do("deliver_signal", seat=seat, args=args)
        if isinstance(answer, Accepted):
            assert before in ("pending", "open"), "a closed waitpoint took a signal"
            self.accepted[args.waitpoint_id] += 1
            self._remember(args)
        elif isinstance(answer, DuplicateDelivery):
            first, until = self.remembered[args.waitpoint_id, args.idempotency_key or ""]
            assert (answer.existing_signal_id, self.clock.now < until) == (first, True), "not a repetition"

    def _remember(self, args: SignalArgs) -> None:
        if args.idempotency_key and args.dedup_ttl_ms:
            known = self.remembered.get((args.waitpoint_id, args.idempotency_key))
            assert known is None or known[1] <= self.clock.now, "a signal took effect twice"
            until = self.clock.now + args.dedup_ttl_ms
            self.remembered[args.waitpoint_id, args.idempotency_key] = (args.signal_id, until)

    @move(weight=2, place=some.picks, name=NAMES)
    def approve(self, place: int, name: str) -> None:
        if self.places:
            execution_id, waitpoint_id = self.place(place)
            answer = self.do(
                "deliver_approval_signal",
                execution_id=execution_id,
                lane_id=self.lane_of(execution_id),
                waitpoint_id=waitpoint_id,
                signal_name=name,
                idempotency_suffix="x",
                signal_dedup_ttl_ms=0,
            )
            self.accepted[waitpoint_id] += isinstance(answer, Accepted)

    @move(weight=2, pick=some.picks, delay=(0, 0, 300))
    def resume_by_hand(self, pick: int, delay: int) -> None:
        wanted = self.pick(pick, lambda row: row.current_suspension_id is not None)
        self.do("resume_execution", execution_id=wanted, resume_delay_ms=delay)

    @move(weight=4, pick=some.picks)
    def time_out(self, pick: int) -> None:
        self.do("expire_suspension", execution_id=self.pick(pick, lambda row: row.current_suspension_id is not None))

    @move(weight=4, pick=some.picks, around=some.around, name=("suspension_timeout", "pending_wp_expiry"))
    def let_a_wait_end(self, pick: int, around: int, name: str) -> None:
        """Advance the clock to the end of some wait or key, and run the sweep."""
        store = self.players[0].store
        ends = [row.timeout_at for row in self.run(scan_all(store, Suspension)) if row.closed_at is None]
        ends += [row.pending_until for row in self.run(scan_all(store, Waitpoint))]
        instants = sorted(end for end in ends if end is not None and end >= self.clock.now)
        if instants:
            self.clock.now = max(self.clock.now, instants[pick % len(instants)] + around)
        self.do("sweep_once", name=name)

    @move(kid=("k1", "k2", "k3"), grace=(0, 500, 100_000))
    def rotate_in_the_middle(self, kid: str, grace: int) -> None:
        secret = {"k1": some.SECRET, "k2": some.OTHER_SECRET, "k3": "33" * 32}[kid]
        self.do("rotate_waitpoint_hmac_secret_all", new_kid=kid, new_secret_hex=secret, grace_ms=grace)

    # -- streams and reads --------------------------------------------------------------------------------------------

    @move(weight=4, pick=some.picks, frame=FRAMES)
    def write_a_frame(self, pick: int, frame: tuple[bytes, str]) -> None:
        if self.held:
            self.do("append_frame", handle=self.handle(pick), payload=frame[0], mode=frame[1])

    @move(weight=2, pick=some.picks, seat=some.seats)
    def read_waits(self, pick: int, seat: int) -> None:
        execution_id = self.pick(pick, is_active)
        self.do("list_pending_waitpoints", seat=seat, execution_id=execution_id, limit=2)
        self.do("read_stream", seat=seat, execution_id=execution_id, attempt_index=0)
        self.do("read_summary", seat=seat, execution_id=execution_id, attempt_index=0)
        self.do("list_suspended", seat=seat, partition=86, limit=2)
        if self.held:
            self.do("observe_signals", seat=seat, handle=self.handle(pick))
        for _, waitpoint_id in self.places[-2:]:
            self.do("read_waitpoint_token", partition=86, waitpoint_id=waitpoint_id)

    # -- invariants ---------------------------------------------------------------------------------------------------

    def make(self, made: Any) -> None:
        super().make(made)
        self.run(self.look())

    async def look(self) -> None:
        """Check what is true of every suspension at every moment."""
        store = self.players[0].store
        rows = {row.execution_id: row for row in await self.players[0].execution_rows()}
        roots = {root.execution_id: root for root in await scan_all(store, Suspension)}
        ended = {(memo.execution_id, memo.gate) for memo in await scan_all(store, GateMemo)}
        for execution_id, row in rows.items():
            root = roots.pop(execution_id, None)
            waits = row.lifecycle_phase.value == "suspended"
            is_open = root is not None and root.suspension_id is not None and root.closed_at is None
            assert waits == is_open == (row.current_suspension_id is not None), "suspended without a suspension"
            if root is not None:
                assert not is_open or row.current_suspension_id == root.suspension_id
                assert (root.due_at is not None) == is_open, "a closed suspension is listed"
                gates = msgspec.json.decode(root.gates or "{}")
                assert not any((execution_id, name) in ended for name in gates), "a gate is open and has ended"
                parked_on = msgspec.json.decode(root.waits_on or "[]") if is_open else []
                assert all(name in gates for name in parked_on), "parked on what has ended"
                assert not is_open or not satisfied(root), "a satisfied condition did not resume"
                counted = msgspec.json.decode(root.progress or "{}", type=dict[str, list[str]]).values()
                assert all(len(set(found)) == len(found) for found in counted), "a satisfier was counted twice"
                assert root.signal_count >= sum(
                    self.accepted.get(one, 0) for owner, one in self.places if owner == execution_id
                )
        assert not roots, "waits without an execution"
        for waitpoint in await scan_all(store, Waitpoint):
            assert waitpoint.signal_count == self.accepted[waitpoint.waitpoint_id], "signals were lost or doubled"


def satisfied(root: Suspension) -> bool:
    """Return True if the counted signals satisfy the condition, computed a second time over the stored form."""
    progress: dict[str, list[str]] = msgspec.json.decode(root.progress or "{}")
    return _met(msgspec.json.decode(root.resume_condition or '"OperatorOnly"'), progress, "<root>")


def _met(node: Any, progress: dict[str, list[str]], path: str) -> bool:
    if isinstance(node, str):
        return False
    if "Single" in node:
        return path in progress
    node = node["Composite"]
    if node["kind"] == "Count":
        return len(set(progress.get(path, ()))) >= int(node["n"])
    below = (f"members[{n}]" if path == "<root>" else f"{path}.members[{n}]" for n in range(len(node["members"])))
    return all(_met(member, progress, place) for member, place in zip(node["members"], below, strict=True))
