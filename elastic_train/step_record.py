"""The record of the newest step: made at its commit, completed by the step's evaluation, handed on."""

from __future__ import annotations

import time
from typing import Any

from elastic_train.membership.live import Group
from elastic_train.outside import Outside
from elastic_train.recipe import Recipe
from elastic_train.state import TrainState
from elastic_train.step.commit import Outcome


class StepRecord:
    """What one member has to tell of the step that it has committed last.

    Args:
      recipe: the trainer, made ready.
      group: the members.
      outside: where the record goes.

    Attributes:
      content: the record, with fields as in `telemetry.step_lines`; None if it was handed on.
      metrics: newest means: those of the last step, and of the last evaluation ("eval_" in front).
    """

    def __init__(self, recipe: Recipe, group: Group, outside: Outside) -> None:
        self._recipe, self._group, self._outside = recipe, group, outside
        self.content: dict[str, Any] | None = None
        self.metrics: dict[str, float] = {}
        self._recovered: dict[str, Any] | None = None
        self._last_commit = time.monotonic()

    def epoch_begun(self, recovered: dict[str, Any]) -> None:
        """The next record tells what the beginning took; see `Recovery.begin`."""
        self._recovered = recovered

    def committed(self, before: TrainState, outcome: Outcome, skipped: bool) -> None:
        """A step counts.

        Args:
          before: the state before it.
          outcome: what the attempt came to.
          skipped: whether it was left out, since its gradient was not finite.
        """
        now = time.monotonic()
        after, metrics = outcome.state, outcome.metrics
        sampler = self._recipe.batches.sampler
        num_samples = after.samples - before.samples
        record: dict[str, Any] = {
            "step": after.step,
            "samples": after.samples,
            "first_sample": before.samples,
            "num_samples": num_samples,
            "passes": [list(span) for span in sampler.spans(before.samples, num_samples)],
            "pass_size": sampler.num_samples,
            **metrics,
            "learning_rate": self._recipe.local.learning_rate(before.step),
            "workers": sorted(member.slot for member in self._group.view.members),
            "epoch": self._group.view.epoch,
            "step_time_s": now - self._last_commit,
            "time": time.time(),
            "phases": self._outside.times.take(),
        }
        if skipped:
            record["skipped"] = True
        if self._recovered is not None:
            record["recovered"] = {**self._recovered, "shards_reused": outcome.num_reused}
            self._recovered = None
        self._last_commit = now
        self.metrics = {**self.metrics, **metrics}
        self.content = record

    def is_of(self, step: int) -> bool:
        """Whether there is one, and of this step."""
        return self.content is not None and self.content["step"] == step

    @property
    def lacks_evaluation(self) -> bool:
        """Whether there is one, and no evaluation in it."""
        return self.content is not None and "evaluation" not in self.content

    def evaluated(self, step: int, means: dict[str, float]) -> None:
        """The state after `step` was evaluated. The time that took belongs to no step."""
        self._last_commit = time.monotonic()
        self.metrics = {**self.metrics, **{f"eval_{name}": value for name, value in means.items()}}
        if self.content is not None and self.content["step"] == step:
            self.content["evaluation"] = means

    def send(self, is_alone: bool = False) -> None:
        """Hands it on, if there is one. Every member keeps a record until it is known to be on disk; the first one
        sends it, or the one that may be alone in having it."""
        if self.content is not None:
            urgent = "recovered" in self.content or "evaluation" in self.content
            self._outside.record(self.content, flush=urgent, send=is_alone or self._group.is_first)
            self.content = None
