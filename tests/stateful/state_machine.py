"""The state machine: its players, the objects that calls may use, and how the next operation is drawn.

A *move* is a method marked with the values from which its arguments are drawn. There is one hypothesis rule for all
moves, so that every sequence has all of them; hypothesis would otherwise leave many rules out of each sequence and few
would get far. Picking prefers objects for which an operation makes sense, and sometimes takes any: an execution in a
wrong state, a missing one, a lease that ended long ago.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Hashable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from flowfabric.clock import ManualClock
from flowfabric.ids import SeededMinter
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.execution.grant import stored_grant
from flowfabric.testing.invariants import scan_all
from tests.stateful import choices as some
from tests.stateful.players import Call, Held, Outcome, Player

Move = tuple[str, dict[str, Any]]

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., None])


def move(weight: int = 1, **choices: Sequence[Any]) -> Callable[[M], M]:
    """Mark a method as a move: its relative frequency, and the values its arguments are chosen from."""

    def mark(method: M) -> M:
        method.move = (weight, choices)  # type: ignore[attr-defined]
        return method

    return mark


@lru_cache
def moves_of(table: Hashable) -> dict[str, tuple[int, dict[str, Sequence[Any]]]]:
    """Return every move of a class: its weight and its choices."""
    marked = {name: getattr(getattr(table, name), "move", None) for name in dir(table)}
    return {name: found for name, found in marked.items() if isinstance(found, tuple)}


def drawn(name: str, choices: dict[str, Sequence[Any]]) -> st.SearchStrategy[Move]:
    """Return one move as hypothesis draws it."""
    return st.tuples(
        st.just(name), st.fixed_dictionaries({one: st.sampled_from(from_) for one, from_ in choices.items()})
    )


@lru_cache
def strategy_of(table: Hashable) -> st.SearchStrategy[Move]:
    """Return a strategy for any move of a class."""
    return st.one_of(
        [drawn(name, choices) for name, (weight, choices) in moves_of(table).items() for _ in range(weight)]
    )


def run_drawn_sequences(kind: type[Table], *, examples: int, steps: int) -> None:
    """Run sequences that hypothesis draws, and shrink a failing one."""
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            phases=(Phase.reuse, Phase.generate, Phase.shrink),  # The explain phase would trace every line.
        ),
    )


def live(kind: type[Table], seed: int, *, steps: int) -> None:
    """Run one long sequence from a seed: more varied than what hypothesis draws, but without shrinking."""
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
    """Subclasses define the players in `open` and the meaning of a call in `ask`."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()  # A Runner would handle signals for every call.
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
        """Return the players; the rows of the first one decide what may happen next."""
        raise NotImplementedError

    def ask(self, call: Call) -> Outcome:
        """Execute a call, compare, and answer."""
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
        """Ask all players for the same, and keep the handles and grants that they return."""
        answer = self.ask(Call(verb, given, seat)).answer
        for one in answer if isinstance(answer, list) else [answer]:
            if isinstance(one, answers.Claimed):
                self.held.append(Held(one.handle.kind, one.handle.fields))
            elif isinstance(one, answers.ClaimGrant):
                self.grants.append(one)
        return answer

    # -- picking ------------------------------------------------------------------------------------------------------

    def rows(self) -> list[Execution]:
        """Return the executions as they are now, the youngest first."""
        rows: list[Execution] = self.run(scan_all(self.players[0].store, Execution))
        return sorted(rows, key=lambda row: -self.known.index(row.execution_id))

    def pick(self, number: int, sense: Callable[[Execution], bool] = lambda row: True) -> str:
        """Return an execution for which it makes sense; sometimes any other, or a missing one."""
        if number == 9 or not self.known:
            return some.MISSING
        fit = [row.execution_id for row in self.rows() if sense(row)] if number < 8 else []
        return fit[number % len(fit)] if fit else self.known[-1 - number % len(self.known)]

    def handle(self, number: int) -> Held:
        """Return a handle, most often a valid one; otherwise an old one."""
        leases = {row.lease_id for row in self.rows() if row.ownership_state.value == "leased"}
        good = [held for held in self.held if held.fields.lease_id in leases] if number < 7 else []
        choice = good or self.held
        return choice[-1 - number % len(choice)]

    def fence(self, held: Held, parts: int) -> Fence:
        """Return the fence of a handle, or a part of it, or nothing."""
        fields = held.fields
        return Fence(
            fields.lease_id if parts > 0 else None,
            fields.lease_epoch if parts > 1 else None,
            fields.attempt_id if parts > 2 else None,
        )

    def grantee(self, execution_id: str, worker: str) -> str:
        """Return the worker that has the grant for an execution, else this worker."""
        for row in self.rows():
            if row.execution_id == execution_id and (grant := stored_grant(row)):
                return grant.worker_id
        return worker

    def who(self, worker: str, instance: str = "1") -> dict[str, Any]:
        return {"worker_id": worker, "worker_instance_id": f"{worker}-{instance}"}

    def claimer(self, instance: str) -> int:
        """Return the engine through which an instance claims."""
        return int(instance) - 1

    def is_crowded(self) -> bool:
        """Return True if there are enough executions: with few, each goes through more operations."""
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
