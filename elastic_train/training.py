"""The order of events of a run, on every member: epochs, steps, evaluations, the end."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from elastic_train.checkpoint.keeping import Keeping
from elastic_train.config import shards_note
from elastic_train.errors import NonFiniteError, UserCodeError
from elastic_train.handover import Handover
from elastic_train.membership.group import (
    MAX_JOINERS_PER_STEP,
    Agreed,
    Commit,
    Differ,
    Identity,
    NonFinite,
    Retry,
    Shrink,
    View,
    Vote,
)
from elastic_train.membership.live import Group
from elastic_train.membership.reconcile import STANDING_SIZE
from elastic_train.outside import Outside
from elastic_train.policies import Failures, action_message, stop_message
from elastic_train.recipe import Recipe
from elastic_train.recovery import Held, Recovery
from elastic_train.state import TrainState, key_path_leaves
from elastic_train.step.commit import Stepper
from elastic_train.step_record import StepRecord
from elastic_train.telemetry.leaves import write_leaves
from elastic_train.terminal import say

PAUSE_S = 0.2
"""How long a member below the floor waits between two votes."""


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
      status: "done", or "stopped" if somebody asked for it.
      state: the state after the last committed step.
      metrics: means of the last step and of the last evaluation ("eval_" in front).
    """

    status: str
    state: TrainState
    metrics: dict[str, float]


class OwnCodeFails(Exception):
    """This worker's code keeps raising, and that of others does not: this worker leaves."""


def write_params(run_dir: Path, state: TrainState) -> None:
    """Leaves a description of the parameters in `run_dir`. It is a help for comparing runs: a disk that is full
    must not cost a run that has reached its end, so what goes wrong is only said."""
    try:
        write_leaves(run_dir, state.step, ((path, np.asarray(leaf)) for path, leaf in key_path_leaves(state.params)))
    except OSError as error:
        say(
            f"cannot describe the parameters in {run_dir}: {error}; the run is not affected, but `elastic-train "
            "compare` cannot tell by how much they differ from another run's",
            sys.stderr,
        )


class Training:
    """One member's run, from its first view to the last commit.

    Args:
      recipe: the trainer, made ready.
      group: the members.
      outside: where records go and requests come from.
      min_workers: below this many members no step is tried.
      leave_requested: set when this worker alone was asked to leave.
      checkpoints: the checkpoint directory; None saves nothing.
      last_step: the run stops after this step, whatever `steps` says, which the recipe may compute with; 0 for none.

    Attributes:
      handover: what this member leaves to the slot's next worker, and was left by the last one.
    """

    def __init__(
        self,
        recipe: Recipe,
        group: Group,
        outside: Outside,
        min_workers: int = 1,
        leave_requested: threading.Event | None = None,
        checkpoints: str | None = None,
        last_step: int = 0,
    ) -> None:
        self._recipe, self._group, self._outside, self._min_workers = recipe, group, outside, min_workers
        self._config, self._trainer = recipe.config, recipe.trainer
        self._last_step = min(last_step or recipe.config.steps, recipe.config.steps)
        self._held = Held(recipe.local.give_initial())
        self._keeping = Keeping(recipe, group, outside, checkpoints)
        self._record = StepRecord(recipe, group, outside)
        self.handover = Handover(recipe, group, outside, self._held, self._record)
        self._is_moving = False
        self._stepper = Stepper(
            group, recipe.local, recipe, recipe.batches, self._phase, outside.worked, self._before_update
        )
        self._recovery = Recovery(recipe, group, outside, self._held, self._phase, self._keeping.load)
        self._failure = ""
        self._failures = Failures(self._config.faults.max_step_failures)
        self._leave_requested = leave_requested or threading.Event()

    def run(self, view: View) -> Result:
        """Trains to the last step, beginning as a member of `view`."""
        members = len(view.members)
        note = shards_note(self._recipe.batches.num_shards(members), members)
        if note and self._recipe.device.platform != "cpu":
            print(f"elastic_train: {note}", file=sys.stderr, flush=True)
        try:
            return self._run(view)
        finally:
            self._keeping.close()

    def _run(self, view: View) -> Result:
        if view.members[0] == self._group.me:
            self._keeping.warm_up(self.state)  # importing takes seconds, which a short run would wait for at its end
        self._begin(view)
        self.handover.give_back()
        # What the generation before has left to do, and the step that admitted this member.
        self._evaluate_if_due()
        self._record.send(is_alone=True)
        while self.state.step < self._last_step:
            if len(self._group.view.members) < self._min_workers:
                verdict = self._pause()
            else:
                verdict = self._step()
            if isinstance(verdict, Commit) and self._group.me in verdict.leaving and not verdict.stop:
                if not self._awaits_evaluation:  # otherwise those who stay send it, when they have evaluated
                    self._record.send()
                return Result("left", self.state, self._record.metrics)
            self._follow(verdict)
            self._evaluate_if_due()
            self._record.send()
            if isinstance(verdict, Commit):
                if verdict.stop:
                    break
                self._keeping.committed(self.state, verdict.save, self._record.metrics)
        if self._failure:  # of the last step's hook: no step follows that it could be a failure of
            self._outside.failed(self.state.step, False, False, self._failure)
        self._keeping.last(self.state, self._record.metrics)
        return Result("done" if self.state.step >= self._config.steps else "stopped", self.state, self._record.metrics)

    def refuse_other_checkpoint(self) -> None:
        """Raises UsageError if the newest checkpoint cannot be gone on from with this model and these data."""
        self._keeping.refuse_other()

    @property
    def state(self) -> TrainState:
        """The newest committed state."""
        return self._held.state

    @property
    def schema(self) -> dict[str, str]:
        """What must be the same on all members: see `membership.schema`."""
        return self._recipe.schema

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the members: the one that speaks for all."""
        return self._group.is_first

    # Epochs.

    def _follow(self, verdict: Agreed) -> None:
        """Goes into the next epoch if the verdict names one; makes the members equal if they are not."""
        if isinstance(verdict, Differ):
            self._follow(self._recovery.repair(verdict))
        elif isinstance(verdict, Shrink):
            self._begin(verdict.view, died=verdict.gone)
        elif isinstance(verdict, Commit) and verdict.view.epoch != self._group.view.epoch:
            self._begin(verdict.view, left=verdict.leaving, came=verdict.joining)

    def _begin(
        self,
        view: View,
        died: tuple[Identity, ...] = (),
        left: tuple[Identity, ...] = (),
        came: tuple[Identity, ...] = (),
    ) -> None:
        self._held.owes = self._held.owes or self._awaits_evaluation
        recovered = self._recovery.begin(view, died, left, came)
        self._record.epoch_begun(recovered)
        if recovered["kind"] == "formed":
            self._record.metrics = self._keeping.begun(self.state.step)
        me, step = self._group.me.slot, self.state.step
        self._phase("hook")
        failure = self._trainer._epoch_begun(self._group.view, me, step, recovered)
        self._failure = self._failure or failure

    def _pause(self) -> Agreed:
        """Below the floor: only votes are exchanged, at a slow pace, until joiners bring the number up."""
        self._phase("pause")
        time.sleep(PAUSE_S)
        row = self._vote(self._outside.candidates).pack() + [0] * STANDING_SIZE

        def body() -> tuple[np.ndarray, np.ndarray]:
            rows = self._group.gather(row)
            return rows, rows

        return self._group.attempt(body)[0]

    # Steps.

    def _vote(self, candidates: tuple[Identity, ...]) -> Vote:
        return Vote(
            self.state.step,
            stop=self._outside.stop_requested is not None,
            leave=self._leave_requested.is_set() or self._outside.drained,
            drained=self._outside.drained and not self._leave_requested.is_set(),
            spent=self._failures.next_is_last,
            nonfinite=self._held.nonfinite_in_a_row,
            save=self._group.is_first and self._keeping.wants(),
            joiners=candidates if self._group.is_first else (),
        )

    def _step(self) -> Agreed:
        before = self.state
        # Whoever joined with the last commit would find nothing to do.
        last = before.step + 1 == self._last_step
        candidates = () if last else self._outside.candidates[:MAX_JOINERS_PER_STEP]
        vote = self._vote(candidates if self._group.foresee(candidates) else ())
        every = self._config.faults.fingerprint_every
        if every and before.step % every == 0 and len(self._group.view.members) > 1:
            vote = replace(vote, checked=True)
        try:
            outcome = self._stepper.attempt(before, vote, self._failure)
            self._held.state = outcome.state
            if isinstance(outcome.verdict, Commit):
                skipped = outcome.verdict.skipped
                self._held.nonfinite_in_a_row = skipped.in_a_row if skipped else 0
                self._record.committed(before, outcome, skipped is not None)
        finally:
            if self._is_moving:  # state and record belong together from here on
                self._is_moving = False
                self._held.moving.release()
        step_before = before.step
        del before  # whoever computes in a hook shall not find two states on the device
        if isinstance(outcome.verdict, Commit):
            self._failures.committed()
            self._failure = ""
            if outcome.verdict.skipped:
                self._note_nonfinite(outcome.verdict.skipped, step_before, "skip", outcome.metrics)
            self._phase("hook")
            self._failure = self._trainer._step_committed(
                self.state.step, self.state.samples, outcome.metrics, outcome.verdict.skipped is not None
            )
            self._failures.hook(bool(self._failure))
        elif isinstance(outcome.verdict, Retry) and outcome.verdict.nonfinite:
            self._not_finite(outcome.verdict.nonfinite, outcome.metrics)
        elif isinstance(outcome.verdict, Retry):
            self._retry(outcome.verdict, outcome.failure)
        return outcome.verdict

    def _retry(self, verdict: Retry, failure: str) -> None:
        """Somebody's code raised. The same step again, until the budget of one of them is spent.

        Those whose budget is spent leave; if it is spent on all members, the fault is not with one of them.
        """
        self._failure = ""
        if not failure:
            return
        self._failures.raised()
        spent = self._group.me in verdict.spent
        self._outside.failed(self.state.step, spent, False, failure)
        if spent:
            self._record.send()  # of the step before, if this was in its evaluation
        if spent and len(verdict.spent) == len(self._group.view.members):
            raise UserCodeError(failure)
        if spent:
            raise OwnCodeFails(failure)

    def _not_finite(self, found: NonFinite, metrics: dict[str, float]) -> None:
        """The same step again, if the policy says so and its budget allows it; otherwise the end."""
        faults = self._config.faults
        again = faults.nonfinite == "retry" and found.in_a_row <= faults.max_nonfinite_retries
        self._held.nonfinite_in_a_row = found.in_a_row
        self._note_nonfinite(found, self.state.step, "retry" if again else "stop", metrics)
        if not again:
            raise NonFiniteError(stop_message(found, self.state.step + 1, metrics["loss"], faults))

    def _note_nonfinite(self, found: NonFinite, step: int, action: str, metrics: dict[str, float]) -> None:
        if not self._group.is_first and action != "stop":
            return
        self._outside.noted(
            "gradient_not_finite",
            action_message(found, step + 1, metrics["loss"], action, self._config.faults),
            step=step,
            action=action,
            slots=[member.slot for member in found.members],
            shards=list(found.shards),
            num_shards=found.num_shards,
            in_a_row=found.in_a_row,
            loss=metrics["loss"],
        )

    def _before_update(self) -> None:
        """The state is about to be replaced. Nobody who copies it may be interrupted by that."""
        self._held.moving.acquire()
        self._is_moving = True
        if self._recipe.local.num_states < 3:  # what is being copied for a checkpoint has no room beside the next one
            self._keeping.before_update()

    def _evaluate_if_due(self) -> None:
        """Evaluates the step just committed, so that its record can tell."""
        evaluator, step = self._recipe.evaluator, self.state.step
        has_news = self._record.is_of(step) or self._held.owes
        if evaluator is None or not self._evaluation_is_due or not has_news:
            return
        while True:
            vote = Vote(step, spent=self._failures.next_is_last)
            verdict, means, failure = evaluator.attempt(self._group, self.state, vote, self._phase)
            if isinstance(verdict, Commit):
                break
            if isinstance(verdict, Retry):
                self._retry(verdict, failure)
            self._follow(verdict)
        self._failures.committed()
        self._record.evaluated(step, means)
        self._held.owes = False

    @property
    def _awaits_evaluation(self) -> bool:
        """Whether the record of the newest step is to tell of an evaluation, and cannot yet."""
        return self._record.lacks_evaluation and self._evaluation_is_due

    @property
    def _evaluation_is_due(self) -> bool:
        every, step = self._config.eval_every, self.state.step
        is_due = step >= self._config.steps or (every > 0 and step % every == 0)
        return self._recipe.evaluator is not None and is_due

    def _phase(self, name: str) -> None:
        self._outside.phase(name, self.state.step)
