"""The trainer: the few methods a user overrides, and `fit`.

What happens in a run, and where it is written:

1. `recipe.Recipe`: the model is built, the local programs are compiled, the data are opened.
2. `training.Training.run`: an epoch begins (`recovery.py`, `membership/reconcile.py`, `membership/heal.py`), then
   steps follow.
3. `step/commit.py`: one step. Local gradients (`step/local.py`, which compiles `step/mathematics.py`), the exchange
   (`step/reduce.py`), the barrier and its verdict (`membership/live.py`, `membership/group.py`), the update.
4. `step/evaluate.py`: evaluation, after the steps that `eval_every` names and after the last.
"""

from __future__ import annotations

import abc
import traceback
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import jax
import optax
from flax import nnx

from elastic_train.config import Config
from elastic_train.data.source import DataSource
from elastic_train.membership.group import View
from elastic_train.state import TrainState
from elastic_train.step.mathematics import WeightedSum

Batch = Mapping[str, jax.Array]
PerSample = jax.Array
"""float[rows]: one value per sample."""

Loss = PerSample | WeightedSum
Metrics = Mapping[str, PerSample | WeightedSum]


@dataclass(frozen=True)
class StepCommitted:
    """A step counts, on all members.

    Attributes:
      step: completed optimizer updates.
      samples: samples consumed.
      metrics: means over the batch, "loss" among them.
      skipped: the step was left out, since its gradient was not finite (`faults.nonfinite = "skip"`).
    """

    step: int
    samples: int
    metrics: dict[str, float]
    skipped: bool = False


@dataclass(frozen=True)
class MembersChanged:
    """An epoch has begun, and all its members hold the same state.

    Attributes:
      epoch: version of the member list.
      step: completed optimizer updates.
      slots: the members.
      gone: slots whose worker is gone since the last epoch.
      came: slots whose worker is new.
    """

    epoch: int
    step: int
    slots: tuple[int, ...]
    gone: tuple[int, ...]
    came: tuple[int, ...]


@dataclass(frozen=True)
class Recovered:
    """This worker received its state from its peers.

    Attributes:
      epoch: version of the member list.
      step: the step it received.
      seconds: how long the transfer took.
    """

    epoch: int
    step: int
    seconds: float


class Trainer(abc.ABC):
    """What to train. Subclass it, annotate `config` with your config class, and override the abstract methods.

    The methods say nothing about devices, processes or failures. They must give the same result on every worker:
    randomness comes from the keys that are passed in.

    Example:
      >>> class Line(Trainer):
      ...     config: Config
      ...     def model(self, rngs): return nnx.Linear(1, 1, rngs=rngs)
      ...     def optimizer(self): return optax.sgd(0.1)
      ...     def loss(self, model, batch, rngs): return jnp.square(model(batch["x"]) - batch["y"])[:, 0]
      ...     def train_data(self): return ArraySource(x=np.ones((8, 1)), y=np.ones((8, 1)))
    """

    config: Config

    requires: ClassVar[Mapping[str, str]] = {}
    """Modules without which it cannot train, and how each is installed. They are looked for, not imported, before any
    worker starts: {"sklearn": "pip install scikit-learn"}."""

    def __init__(self, config: Config | None = None) -> None:
        """Raises TypeError if `config` is not of the class that the subclass names."""
        wanted = self.config_class()
        self.config = wanted() if config is None else config
        if not isinstance(self.config, wanted):
            raise TypeError(f"{type(self).__name__} takes a {wanted.__name__}; got a {type(config).__name__}")

    @classmethod
    @final
    def config_class(cls) -> type[Config]:
        """The class that annotates `config`."""
        return typing.get_type_hints(cls)["config"]

    # To override.

    @abc.abstractmethod
    def model(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model, with its parameters initialised from `rngs`."""

    @abc.abstractmethod
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer. Clipping and schedules are Optax's business."""

    @abc.abstractmethod
    def loss(self, model: nnx.Module, batch: Batch, rngs: nnx.Rngs) -> Loss | tuple[Loss, Metrics]:
        """The loss of some samples; traced.

        Args:
          model: in training mode. What it changes in itself is kept: averaged over the shards if it is floating-point
            (batch statistics), and otherwise (an integer counter) as shard 0 has it.
          batch: what `train_data` gives, stacked: arrays [rows, ...].
          rngs: keys of this step and shard.

        Returns:
          One value per sample, float[rows], or `WeightedSum(sums, weights)`; never a mean. With metrics to log
          as a second value: a dict of the same kinds of thing.
        """

    @abc.abstractmethod
    def train_data(self) -> DataSource:
        """Samples by number: `len(source)` and `source[i]`, a dict of numpy arrays or numbers."""

    # Hooks: may be overridden.

    def eval_data(self) -> DataSource | None:
        """Samples to evaluate on, or None for no evaluation."""
        return None

    def evaluate(self, model: nnx.Module, batch: Batch) -> Metrics:
        """Evaluation metrics of some samples; traced. `model` is in evaluation mode. By default the loss."""
        result = self.loss(model, batch, nnx.Rngs(0))
        loss, metrics = result if isinstance(result, tuple) and not isinstance(result, WeightedSum) else (result, {})
        return {"loss": loss, **metrics}

    def schedule(self) -> optax.Schedule | None:
        """The learning rate by step, to be logged; use it in `optimizer` as well."""
        return None

    def learning_rate_scale(self, batch_size: int) -> float:
        """What every update is multiplied with after a step of so many samples.

        For `batch_policy = "per_worker"`, where the batch grows and shrinks with the group: the linear scaling rule,
        for example, is `batch_size / reference`. Not asked unless overridden.
        """
        return 1.0

    def on_step(self, event: StepCommitted) -> None:
        """Called on every member after each commit."""

    def on_members(self, event: MembersChanged) -> None:
        """Called on every member when an epoch has begun."""

    def on_recovered(self, event: Recovered) -> None:
        """Called on a worker that has received its state from its peers."""

    # Not to override.

    @final
    def fit(self) -> TrainState:
        """Trains in this process alone, without launcher, and returns the last state.

        `elastic-train run` trains the same recipe on many workers, and `et.main` adds options and a run directory.
        """
        from elastic_train.plain import fit_alone

        return fit_alone(self).state

    @final
    def _scales_updates(self) -> bool:
        return type(self).learning_rate_scale is not Trainer.learning_rate_scale

    @final
    def _step_committed(self, step: int, samples: int, metrics: dict[str, float], skipped: bool) -> str:
        """Calls the hook. What it raises is returned, and counts as a failure of the step that follows."""
        return self._call("on_step", step, lambda: self.on_step(StepCommitted(step, samples, metrics, skipped)))

    @final
    def _epoch_begun(self, view: View, me: int, step: int, change: dict[str, Any]) -> str:
        slots = tuple(member.slot for member in view.members)
        changed = MembersChanged(view.epoch, step, slots, tuple(change["gone"]), tuple(change["came"]))
        failure = self._call("on_members", step, lambda: self.on_members(changed))
        if me in change["healed"]:
            recovered = Recovered(view.epoch, step, change["heal_s"])
            failure = failure or self._call("on_recovered", step, lambda: self.on_recovered(recovered))
        return failure

    @staticmethod
    def _call(name: str, step: int, hook: Any) -> str:
        try:
            hook()
        except (Exception, SystemExit) as error:
            error.add_note(f"in {name}, after step {step}")
            return traceback.format_exc()
        return ""
