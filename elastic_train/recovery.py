"""The beginning of an epoch: the members meet, compare their states, and whoever lacks the newest receives it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastic_train.errors import StatesDifferError
from elastic_train.membership.group import (
    VOTE_SIZE,
    Agreed,
    Commit,
    Differ,
    Identity,
    Shrink,
    View,
    Vote,
    name_slots,
    signed,
)
from elastic_train.membership.live import Group, leave
from elastic_train.membership.reconcile import (
    STANDING_SIZE,
    Agreement,
    Standing,
    agree,
    differing,
    name_some,
    pack,
    unpack,
)
from elastic_train.outside import Outside
from elastic_train.recipe import Recipe
from elastic_train.state import TrainState

MAX_HEALING_ROUNDS = 3
MAX_PATHS = 12
"""How many key paths an event names."""


@dataclass
class Held:
    """What this member holds: the one reference to the state, so that replacing it lets the old one go.

    Attributes:
      state: the newest committed state.
      counts: False while it is only what the seed gives, or was received and not yet compared; then it is not donated.
      owes: the evaluation of this step is due, and has not been made.
      nonfinite_in_a_row: how many times in a row, up to this step, the gradient was not finite.
      moving: held by the thread that replaces the state, and by one that copies it: only one of them may.
    """

    state: TrainState
    counts: bool = False
    owes: bool = False
    nonfinite_in_a_row: int = 0
    moving: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class _Equal:
    """All members hold the same state. Ranks in the view's order.

    Attributes:
      fresh: nobody had any state before; it is the one that the seed gives.
      new: those who had none.
      healed: those who received it.
      heal_s: how long that took.
      owes: some of those whose state counts have yet to evaluate it, so all do.
    """

    fresh: bool
    new: tuple[int, ...]
    healed: tuple[int, ...]
    heal_s: float
    owes: bool


class Recovery:
    """Begins epochs.

    Args:
      recipe: the trainer, made ready.
      group: the members.
      outside: told of views.
      held: the state that is compared, donated or replaced.
      phase: told what is being done.
      load: gives the state of the newest good checkpoint, like the one it is given; None if there is none. Asked on the
        first member, when nobody has a state.
    """

    def __init__(
        self,
        recipe: Recipe,
        group: Group,
        outside: Outside,
        held: Held,
        phase: Callable[[str], None],
        load: Callable[[TrainState], TrainState | None],
    ) -> None:
        self._recipe, self._group, self._outside = recipe, group, outside
        self._held, self._phase, self._local, self._load = held, phase, recipe.local, load
        self._num_repairs, self._repaired_step = 0, -1

    def begin(
        self,
        view: View,
        died: tuple[Identity, ...] = (),
        left: tuple[Identity, ...] = (),
        came: tuple[Identity, ...] = (),
    ) -> dict[str, Any]:
        """Begins an epoch: meets the members of `view`, and makes all states equal. Shrinks again if it must.

        Returns what it took, as the record of the next step tells it.
        """
        started = time.monotonic()
        # Only a state from the generation before is there before anybody has been met.
        kind = "generation" if self._held.counts and not (died or left or came) else "admission"
        while True:
            reason = "death" if died else "leave" if left else kind
            self._outside.viewed(view, reason, (*died, *left), came, self._held.state.step, time.time())
            self._phase("compile")
            expected = self._recipe.healer.stripe if came or not self._held.counts else None
            self._group.prepare(view, expected)
            outcome = self._make_equal("new epoch")
            if isinstance(outcome, _Equal):
                break
            view, died = outcome.view, (*died, *outcome.gone)
        self._held.counts, self._held.owes = True, outcome.owes
        # In a new generation anybody's records may be those of the newest steps.
        if self._group.is_first or kind == "generation":
            self._outside.resend()
        # A joiner was not told who else is new, but all members see who had no state.
        new = [view.members[rank].slot for rank in outcome.new]
        return {
            "epoch": view.epoch,
            "step": self._held.state.step,
            "kind": "formed" if outcome.fresh else "death" if died else "leave" if left else kind,
            "gone": [member.slot for member in (*died, *left)],
            "came": new,
            "healed": [view.members[rank].slot for rank in outcome.healed],
            "heal_s": outcome.heal_s,
            "rebuild_s": time.monotonic() - started - outcome.heal_s,
        }

    def repair(self, found: Differ) -> Agreed:
        """The fingerprints in a step's votes differ: makes the members equal again, within the epoch.

        Returns `Shrink` if members went meanwhile; else a verdict that changes nothing. Raises StatesDifferError if
        there is no majority.
        """
        step = self._held.state.step
        self._num_repairs = 1 + (self._num_repairs if self._repaired_step == step else 0)
        self._repaired_step = step
        if self._num_repairs > MAX_HEALING_ROUNDS and self._group.me not in found.groups[0]:
            leave(f"slot {self._group.me.slot}: its fingerprints differ again after {MAX_HEALING_ROUNDS} repairs")
        outcome = self._make_equal("fingerprints")
        if isinstance(outcome, Shrink):
            return outcome
        self._held.counts = True
        view = self._group.view
        slots = [view.members[rank].slot for rank in outcome.healed]
        if self._group.is_first:
            show = f"{name_slots(slots)} received the others' state after step {step}: going on"
            if not slots:
                show = f"all members hold the same state after step {step} after all: going on"
            self._outside.noted("state_repaired", show, step=step, slots=slots, heal_s=outcome.heal_s)
        return Commit(view)

    def _make_equal(self, why: str) -> _Equal | Shrink:
        """Compares the members' states and transfers the one that counts, until all are equal.

        Args:
          why: what began it, for the event.
        """
        outcome = self._reconcile()
        if isinstance(outcome, Shrink):
            return outcome
        agreement, standings = outcome
        wrong = [rank for rank in agreement.receivers if _holds_another(standings[rank], standings, agreement)]
        if wrong and isinstance(verdict := self._explain(agreement, wrong, why), Shrink):
            return verdict
        new = tuple(rank for rank, standing in enumerate(standings) if not standing.has_state)
        fresh = agreement.fresh
        if fresh:
            outcome = self._from_checkpoint()
            if isinstance(outcome, Shrink):
                return outcome
            agreement, standings = outcome
        healed, heal_s, num_rounds = agreement.receivers, 0.0, 0
        while agreement.receivers and num_rounds < MAX_HEALING_ROUNDS:
            num_rounds += 1
            started = time.monotonic()
            verdict = self._heal(agreement, standings)
            heal_s += time.monotonic() - started
            outcome = verdict if isinstance(verdict, Shrink) else self._reconcile()
            if isinstance(outcome, Shrink):
                return outcome
            agreement, standings = outcome
            wrong = list(agreement.receivers)
            if wrong and isinstance(verdict := self._explain(agreement, wrong, "transfer"), Shrink):
                return verdict
        if self._group.rank in agreement.receivers:
            leave(f"slot {self._group.me.slot}: the state still differs after {MAX_HEALING_ROUNDS} transfers")
        # Those still unequal are about to leave.
        owes = any(standings[rank].owes for rank in agreement.donors)
        return _Equal(fresh, new, tuple(rank for rank in healed if rank not in agreement.receivers), heal_s, owes)

    def _explain(self, agreement: Agreement, wrong: list[int], why: str) -> Agreed:
        """Says in which leaves the members `wrong` differ. Raises StatesDifferError if nobody can say who is right."""
        self._phase("compile")
        rows = self._local.leaf_fingerprints(self._held.state)
        mine = Vote(self._held.state.step).pack() + [signed(int(word)) for word in rows.ravel()]
        gather = self._group.gather_of(len(mine))
        self._phase("gather")

        def body() -> tuple[np.ndarray, np.ndarray]:
            gathered = gather(mine)
            return gathered, gathered

        verdict, gathered = self._group.attempt(body)
        if not isinstance(verdict, Commit):
            return verdict
        view, step = self._group.view, self._held.state.step
        tables = gathered[:, VOTE_SIZE:].reshape(len(view.members), -1, 2)
        paths = differing(tables, agreement.donors[0], wrong, self._local.leaf_paths)
        slots = [view.members[rank].slot for rank in wrong]
        stops = agreement.undecided and self._recipe.config.faults.undecided == "stop"
        donors = [view.members[rank].slot for rank in agreement.donors]
        where = f"the state after step {step} differs between {name_slots(donors)} and {name_slots(slots)}"
        where += f", in {name_some(paths)}"
        if self._group.is_first or stops:
            doing = f"transferred from {name_slots(donors)} to {name_slots(slots)}"
            if why == "transfer":
                doing = f"damaged on the way; at most {MAX_HEALING_ROUNDS} transfers are tried"
            if stops:
                doing = "no majority, stopping"
            about = {"step": step, "slots": slots, "key_paths": paths[:MAX_PATHS], "num_key_paths": len(paths)}
            self._outside.noted("state_differs", f"{where}: {doing}", **about, why=why, undecided=stops)
        if stops:
            raise StatesDifferError(
                f"{where}, and as many members hold the one as the other, so nobody can say which is right. Nothing "
                "was trained on it. Go back to a state from before; with three workers or more a majority decides, and "
                "--set faults.undecided=oldest takes the state of the worker that was started first. On GPUs, --set "
                "deterministic=true makes all workers run the same kernels. If it happens again on one host, test its "
                "memory and devices."
            )
        return verdict

    def _reconcile(self) -> tuple[Agreement, list[Standing]] | Shrink:
        """All members say which state they hold."""
        self._phase("compute")
        fingerprint = self._local.fingerprint(self._held.state)
        state = self._held.state
        mine = Standing(state.step, state.samples, fingerprint, self._recipe.layout, self._held.counts, self._held.owes)
        row = Vote(mine.step, fingerprint=fingerprint).pack() + pack(mine)
        self._phase("reconcile")

        def body() -> tuple[np.ndarray, np.ndarray]:
            rows = self._group.gather(row)
            return rows, rows

        verdict, rows = self._group.attempt(body)
        if isinstance(verdict, Shrink):
            return verdict
        standings: list[Standing] = []
        for each in rows:
            vote = Vote.unpack(each)
            standings.append(unpack(vote.step, vote.fingerprint, each[VOTE_SIZE:]))
        agreement = agree(standings)
        if self._group.rank in agreement.refused:
            leave(f"slot {self._group.me.slot}: runs another model, dtype or config than the other members")
        return agreement, standings

    def _from_checkpoint(self) -> tuple[Agreement, list[Standing]] | Shrink:
        """Nobody has a state: the first member looks for one on disk, and all compare again."""
        if self._group.is_first:
            self._phase("load")
            loaded = self._load(self._held.state)
            if loaded is not None:
                self._held.state, self._held.counts = loaded, True
        return self._reconcile()

    def _heal(self, agreement: Agreement, standings: list[Standing]) -> Agreed:
        """The donors' state to the receivers. A receiver's own state is replaced only if everybody was there."""
        rank = self._group.rank
        receives = rank in agreement.receivers
        donor = standings[agreement.donors[0]]
        spread = self._group.spread(self._recipe.healer.stripe)

        def told(stripe: Any) -> Any:
            self._phase("heal")
            return spread(stripe)

        def body() -> tuple[Any, np.ndarray]:
            arrays = self._recipe.healer.run(told, self._held.state.arrays, agreement.donors, rank, receives)
            return arrays, self._group.gather(Vote(self._held.state.step).pack() + [0] * STANDING_SIZE)

        verdict, arrays = self._group.attempt(body)
        if receives and isinstance(verdict, Commit):
            with self._held.moving:
                self._held.counts = False
                self._held.state = TrainState(donor.step, donor.samples, **arrays)
        return verdict


def _holds_another(standing: Standing, standings: list[Standing], agreement: Agreement) -> bool:
    """Whether somebody has a state of the same step as the donors, but not theirs."""
    return standing.has_state and standing.step == standings[agreement.donors[0]].step
