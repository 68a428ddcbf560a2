"""The table at which lives are played: who plays, what may be picked up, and how the next move is drawn.

A *move* is a method marked with what it is drawn from. There is one rule for all moves, so that every life has all of
them; hypothesis would otherwise leave many rules out of each life and few lives would get far. Picking prefers what a
verb makes sense for, and now and then takes anything: an execution in a wrong state, one that never was, a lease that
ended long ago.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Hashable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from flowfabric.clock import ManualClock
from flowfabric.ids import SeededMinter
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution
from flowfabric.rules.execution.grant import stored_grant
from flowfabric.rules.execution.lease import Fence
from flowfabric.testing.invariants import scan_all
from tests.stateful import choices as some
from tests.stateful.players import Call, Held, Outcome, Player

Move = tuple[str, dict[str, Any]]

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., None])


def move(weight: int = 1, **choices: Sequence[Any]) -> Callable[[M], M]:
    """Mark a method as a move: how often it is made, compared with others, and what its arguments are chosen from."""

    def mark(method: M) -> M:
        method.move = (weight, choices)  # type: ignore[attr-defined]
        return method

    return mark


@lru_cache
def moves_of(table: Hashable) -> dict[str, tuple[int, dict[str, Sequence[Any]]]]:
    """Every move of a class: its weight and its choices."""
    marked = {name: getattr(getattr(table, name), "move", None) for name in dir(table)}
    return {name: found for name, found in marked.items() if isinstance(found, tuple)}


def drawn(name: str, choices: dict[str, Sequence[Any]]) -> st.SearchStrategy[Move]:
    """One move as hypothesis draws it."""
    return st.tuples(
        st.just(name), st.fixed_dictionaries({one: st.sampled_from(from_) for one, from_ in choices.items()})
    )


@lru_cache
def strategy_of(table: Hashable) -> st.SearchStrategy[Move]:
    """Any move of a class."""
    return st.one_of(
        [drawn(name, choices) for name, (weight, choices) in moves_of(table).items() for _ in range(weight)]
    )


def live(kind: type[Table], seed: int, *, steps: int) -> None:
    """Play one long life by plain dice: more varied than what hypothesis draws, but nobody shortens it."""
    chance, table, made = random.Random(seed), kind(), list[Move]()
    weights = [weight for weight, _ in table.choices.values()]
    try:
        for name in ("begin", *chance.choices(list(table.choices), weights, k=steps)):
            made.append((name, {one: chance.choice(from_) for one, from_ in table.choices[name][1].items()}))
            table.make(made[-1])
    except BaseException as failure:
        failure.add_note(f"seed {seed}, after\n" + "\n".join(f"  {name} {choices}" for name, choices in made))
        raise
    finally:
        table.teardown()


class Table(RuleBasedStateMachine):
    """Whoever plays says in `open` who they are and in `ask` what a call means to them."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()  # a Runner would do a lot about signals for every call
        self.clock = ManualClock()
        self.minter = SeededMinter(7)
        self.known: list[str] = []
        self.lane: dict[str, str] = {}
        self.held: list[Held] = []
        self.grants: list[answers.ClaimGrant] = []
        self.choices = moves_of(type(self))
        self.any_move = strategy_of(type(self))
        self.players = self.run(self.open())

    async def open(self) -> list[Player]:
        """Whoever plays; the rows of the first one say what may happen next."""
        raise NotImplementedError

    def ask(self, call: Call) -> Outcome:
        """Do this, compare, and answer."""
        raise NotImplementedError

    @initialize(made=st.runner().flatmap(lambda table: drawn("begin", table.choices["begin"][1])))
    def begins(self, made: Move) -> None:
        self.make(made)

    @rule(made=st.runner().flatmap(lambda table: table.any_move))
    def moves(self, made: Move) -> None:
        self.make(made)

    def make(self, made: Move) -> None:
        name, choices = made
        getattr(self, name)(**choices)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        for player in self.players:
            for engine in player.engines:
                self.run(engine.close())
        self.run(self.loop.shutdown_asyncgens())
        self.loop.close()

    def do(self, verb: str, *, seat: int = 0, **given: Any) -> Any:
        """Ask everybody for the same, and keep what they hand out."""
        answer = self.ask(Call(verb, given, seat)).answer
        for one in answer if isinstance(answer, list) else [answer]:
            if isinstance(one, answers.Claimed):
                self.held.append(Held(one.handle.kind, one.handle.fields))
            elif isinstance(one, answers.ClaimGrant):
                self.grants.append(one)
        return answer

    # -- picking ------------------------------------------------------------------------------------------------------

    def rows(self) -> list[Execution]:
        """The executions as they are now, the youngest first."""
        rows: list[Execution] = self.run(scan_all(self.players[0].store, Execution))
        return sorted(rows, key=lambda row: -self.known.index(row.execution_id))

    def pick(self, number: int, sense: Callable[[Execution], bool] = lambda row: True) -> str:
        """An execution for which it makes sense; now and then any other, or one that never was."""
        if number == 9 or not self.known:
            return some.MISSING
        fit = [row.execution_id for row in self.rows() if sense(row)] if number < 8 else []
        return fit[number % len(fit)] if fit else self.known[-1 - number % len(self.known)]

    def handle(self, number: int) -> Held:
        """A handle, most often one that is good; else one that was given out long ago."""
        leases = {row.lease_id for row in self.rows() if row.ownership_state.value == "leased"}
        good = [held for held in self.held if held.fields.lease_id in leases] if number < 7 else []
        choice = good or self.held
        return choice[-1 - number % len(choice)]

    def fence(self, held: Held, parts: int) -> Fence:
        """The fence of a handle, or a part of it, or nothing."""
        fields = held.fields
        return Fence(
            fields.lease_id if parts > 0 else None,
            fields.lease_epoch if parts > 1 else None,
            fields.attempt_id if parts > 2 else None,
        )

    def grantee(self, execution_id: str, worker: str) -> str:
        """Whoever has the grant for an execution, else this worker."""
        for row in self.rows():
            if row.execution_id == execution_id and (grant := stored_grant(row)):
                return grant.worker_id
        return worker

    def who(self, worker: str, instance: str = "1") -> dict[str, Any]:
        return {"worker_id": worker, "worker_instance_id": f"{worker}-{instance}"}

    def claimer(self, instance: str) -> int:
        """Which engine an instance pulls through."""
        return int(instance) - 1

    def is_crowded(self) -> bool:
        """Whether there are enough executions: few of them lead fuller lives."""
        rows = self.rows()
        return len(rows) > 15 or sum(row.lifecycle_phase.value != "terminal" for row in rows) > 5

    def new_id(self, lane: str) -> str:
        execution_id = f"{{fp:{some.partition(lane)}}}:{self.minter.uuid()}"
        self.known.append(execution_id)
        self.lane[execution_id] = lane
        return execution_id

    def lane_of(self, execution_id: str) -> str:
        return self.lane.get(execution_id, "default")

    def instant(self, from_now: int | None) -> int | None:
        return None if from_now is None else self.clock.now + from_now
