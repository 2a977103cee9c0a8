"""From one worker of a slot to the next, across a change of generation: what it leaves in the agent's memory."""

from __future__ import annotations

from elastic_train.checkpoint.carry import Carried, leave_state, take_state
from elastic_train.launch.carried import discard
from elastic_train.membership.live import Group
from elastic_train.outside import Outside
from elastic_train.recipe import Recipe
from elastic_train.recovery import Held
from elastic_train.state import TrainState
from elastic_train.step_record import StepRecord


class Handover:
    """One member's part in it: it takes what was left to it, and leaves what it has.

    Args:
      recipe: the trainer, made ready.
      group: the members.
      outside: which records may not be on disk.
      held: the state.
      record: of its newest step.
    """

    def __init__(self, recipe: Recipe, group: Group, outside: Outside, held: Held, record: StepRecord) -> None:
        self._recipe, self._group, self._outside, self._held, self._record = recipe, group, outside, held, record
        self._taken: TrainState | None = None  # the state that is still in the agent's memory, too
        self._descriptor = -1

    def leave(self, descriptor: int, limit_s: float) -> str:
        """Copies what this member has committed into the agent's memory, from another thread. The thread that trains
        may be stuck, but for as long as it replaces the state it is waited for; it never does so again.

        Returns what came of it, and raises OSError if there is not enough memory, TimeoutError if the thread that
        trains takes longer than `limit_s`. Nothing counts then.
        """
        if not self._held.moving.acquire(timeout=limit_s):
            raise TimeoutError(f"the update has not ended within {limit_s:g} s")
        state = self._held.state
        if state is self._taken:
            return "its state where it was"
        if not self._held.counts:
            return ""
        # The record first: the thread that trains hands it over to the others and drops it here, in this order.
        record = self._record.content
        about = Carried(
            step=state.step,
            samples=state.samples,
            epoch=self._group.view.epoch,
            records=tuple(self._outside.pending_records()),
            record=record,
            metrics=self._record.metrics,
            nonfinite=self._held.nonfinite_in_a_row,
        )
        leave_state(descriptor, state, about)
        return f"the state after step {state.step}"

    def take(self, descriptor: int) -> tuple[str, ...] | None:
        """Begins with the state that the slot's last worker left. Returns the records that it had not got rid of; None
        if there is no state, or that of another model."""
        found = take_state(descriptor, self._held.state, self._recipe.device)
        if found is None:
            return None
        self._held.state, about = found
        self._held.counts, self._held.nonfinite_in_a_row = True, about.nonfinite
        self._record.content, self._record.metrics = about.record, about.metrics
        self._taken, self._descriptor = self._held.state, descriptor
        return tuple(about.records)

    def give_back(self) -> None:
        """The members have what was taken: the agent's memory is free again."""
        if self._taken is not None:
            with self._held.moving:
                self._taken = None
                discard(self._descriptor)
