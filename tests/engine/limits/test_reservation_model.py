"""Reservations, draws and refunds against a model that knows every row.

The engine loads only the rows that a decision names. So several processes act on a few reservations that expire at
different times, one after the other and in batches, and every answer is compared with that of a plain model.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.limits import AlreadyApplied, HardBreach, Ok, Refunded, Reserved
from flowfabric.rules.limits.budget import DEDUP_TTL_MS
from flowfabric.stores.port import Store
from flowfabric.testing.limit_invariants import check_limit_invariants

B = "0b000000-0000-4000-8000-000000000002"
HARD = {"calls": 40, "tokens": 100}
STEPS = 120
PROCESSES = 3

Operation = tuple[Callable[[Engine], Awaitable[Any]], Callable[[int], Any]]


class Reservation:
    """One reservation of the model."""

    def __init__(self, owner: str, expires_at: int, epoch: int, amounts: dict[str, int]) -> None:
        self.owner, self.expires_at, self.epoch, self.left = owner, expires_at, epoch, amounts


class Model:
    """A budget in plain dictionaries; every method returns what the engine has to answer."""

    def __init__(self) -> None:
        self.usage: Counter[str] = Counter()
        self.spends: dict[str, Counter[str]] = {}
        self.open: dict[str, Reservation] = {}
        self.applied: dict[str, int] = {}  # keys and settled reservations, and until when

    def expire(self, now: int) -> None:
        self.open = {name: one for name, one in self.open.items() if one.expires_at > now}

    def reserved(self, dimension: str) -> int:
        return sum(one.left.get(dimension, 0) for one in self.open.values())

    def breach(self, dimension: str, amount: int, *, freed: int = 0) -> bool:
        return self.usage[dimension] + self.reserved(dimension) - freed + amount > HARD[dimension]

    def reserve(
        self, name: str, owner: str, amounts: dict[str, int], ttl: int, drawn: dict[str, int], epoch: int, now: int
    ) -> Any:
        if self.applied.get(name, 0) > now:
            return AlreadyApplied
        self.expire(now)
        known = self.open.get(name)
        if known is not None and known.owner != owner:
            return errors.InvalidInput
        if known is not None:
            known.expires_at, known.epoch = now + ttl, max(known.epoch, epoch)
            return Reserved(name, now + ttl)
        left = {dimension: max(0, amount - drawn.get(dimension, 0)) for dimension, amount in amounts.items()}
        for dimension in sorted(left):
            if (left[dimension] or dimension not in drawn) and self.breach(dimension, left[dimension]):
                return HardBreach, dimension
        self.open[name] = Reservation(owner, now + ttl, epoch, left)
        return Reserved(name, now + ttl)

    def spend(self, name: str | None, owner: str, amounts: dict[str, int], key: str | None, now: int) -> Any:
        if key is not None and self.applied.get(key, 0) > now:
            return AlreadyApplied
        self.expire(now)
        known = self.open.get(name) if name is not None else None
        if known is not None and known.owner != owner:
            return errors.InvalidInput
        left = {} if known is None else known.left
        taken = {dimension: min(amount, left.get(dimension, 0)) for dimension, amount in amounts.items()}
        for dimension, amount in sorted(amounts.items()):
            uncovered = dimension not in left or amount > left[dimension]
            if uncovered and self.breach(dimension, amount, freed=taken[dimension]):
                return HardBreach, dimension
        for dimension in amounts.keys() & left.keys():
            left[dimension] -= taken[dimension]
        return self._use(owner, amounts, key, now)

    def settle(self, name: str, owner: str, amounts: dict[str, int], now: int) -> Any:
        if self.applied.get(name, 0) > now:
            return AlreadyApplied
        self.expire(now)
        known = self.open.get(name)
        if known is not None and known.owner != owner:
            return errors.InvalidInput
        left = {} if known is None else known.left
        for dimension, amount in sorted(amounts.items()):
            own = left.get(dimension, 0)
            if amount > own and self.breach(dimension, amount, freed=own):
                return HardBreach, dimension
        self.open.pop(name, None)
        return self._use(owner, amounts, name, now)

    def refund(self, name: str, owner: str, epoch: int, now: int) -> Any:
        self.expire(now)
        known = self.open.get(name)
        if known is not None and known.owner != owner:
            return errors.InvalidInput
        if known is None or known.epoch > epoch:
            return Refunded(name, {})
        return Refunded(name, self.open.pop(name).left)

    def release(self, owner: str) -> Any:
        spent = self.spends.pop(owner, Counter())
        for dimension, amount in spent.items():
            self.usage[dimension] = max(0, self.usage[dimension] - amount)
        return dict(spent)

    def reset(self) -> Any:
        self.usage, self.spends = Counter(), {}
        return None

    def _use(self, owner: str, amounts: dict[str, int], key: str | None, now: int) -> Any:
        self.usage.update(amounts)
        self.spends.setdefault(owner, Counter()).update(amounts)
        if key is not None:
            self.applied[key] = now + DEDUP_TTL_MS
        return Ok()


class Players:
    """Chooses operations, and returns each as a call of an engine and the model's answer."""

    def __init__(self, model: Model, engine: Engine, seed: int) -> None:
        self.model = model
        self.chance = random.Random(seed)
        self.owners = [engine.new_execution_id() for _ in range(2)]
        self.names = [str(UUID(int=number + 1)) for number in range(6)]

    def operation(self) -> Operation:
        chance, model = self.chance, self.model
        name, owner, epoch = chance.choice(self.names), chance.choice(self.owners), chance.randrange(3)
        most = {dimension: chance.randrange(1, HARD[dimension] // 3) for dimension in HARD if chance.random() < 0.7}
        amounts = most or {"tokens": 5}
        common: dict[str, Any] = {"namespace": "default", "shared": False}
        match chance.choice(("reserve", "reserve", "reserve", "draw", "draw", "spend", "settle", "refund", "clear")):
            case "reserve":
                ttl = chance.choice((1, 20, 50, 400))
                drawn = {"tokens": chance.randrange(8)} if chance.random() < 0.3 else {}
                return (
                    lambda engine: engine.reserve_budget(
                        B, owner, amounts, ttl_ms=ttl, reservation_id=name, drawn=drawn, epoch=epoch, **common
                    ),
                    lambda now: model.reserve(name, owner, amounts, ttl, drawn, epoch, now),
                )
            case "draw" | "spend" as how:
                source = name if how == "draw" else None
                key = f"key {chance.randrange(30)}" if chance.random() < 0.5 else None
                return (
                    lambda engine: engine.record_spend(
                        B, owner, amounts, idempotency_key=key, reservation_id=source, **common
                    ),
                    lambda now: model.spend(source, owner, amounts, key, now),
                )
            case "settle":
                return (
                    lambda engine: engine.settle_budget(B, owner, name, amounts, **common),
                    lambda now: model.settle(name, owner, amounts, now),
                )
            case "refund":
                return (
                    lambda engine: engine.refund_budget(B, name, execution_id=owner, epoch=epoch, **common),
                    lambda now: model.refund(name, owner, epoch, now),
                )
        if chance.random() < 0.7:
            return lambda engine: engine.release_budget(B, owner, **common), lambda now: model.release(owner)
        return lambda engine: engine.reset_budget(B), lambda now: model.reset()


def _comparable(answer: Any, expected: Any) -> Any:
    """Return an answer in the form in which the model says it."""
    if isinstance(answer, HardBreach):
        return HardBreach, answer.dimension
    if isinstance(expected, type):
        return type(answer)
    if expected is None:
        return None
    return answer.amounts if isinstance(expected, dict) else answer


@pytest.mark.parametrize("seed", range(3))
async def test_decisions_on_the_rows_they_name_agree_with_a_model(store: Store, clock: ManualClock, seed: int) -> None:
    engines = [Engine(store, minter=SeededMinter(10 * seed + number)) for number in range(PROCESSES)]
    await engines[0].create_budget(
        B, dimensions=list(HARD), hard_limits=list(HARD.values()), soft_limits=[0] * len(HARD)
    )
    model, answers = Model(), Counter[str]()
    players = Players(model, engines[0], seed)
    for step in range(STEPS):
        engine = players.chance.choice(engines)
        batch = [players.operation() for _ in range(players.chance.choice((1, 1, 1, 3)))]
        expected = [decide(clock.now) for _, decide in batch]
        got = await asyncio.gather(*(call(engine) for call, _ in batch), return_exceptions=True)
        for answer, wanted in zip(got, expected, strict=True):
            assert _comparable(answer, wanted) == wanted, f"step {step}"
            answers[type(answer).__name__] += 1
        clock.advance_ms(players.chance.choice((0, 0, 5, 30)))
        if step % 10 == 9:
            await check_limit_invariants(engines[0])
            while (await engines[0].sweep_once("budget_reservations")).processed:
                pass
            model.expire(clock.now)
            status = await engines[0].get_budget_status(B)
            assert {name: status.usage.get(name, 0) for name in HARD} == {name: model.usage[name] for name in HARD}
            assert {name: status.reserved.get(name, 0) for name in HARD} == {n: model.reserved(n) for n in HARD}

    assert min(answers[kind] for kind in ("Reserved", "Ok", "Refunded", "HardBreach", "InvalidInput")) >= 5, answers
