"""What a worker computes on its own device, compiled: gradients of one shard, sums, the update, evaluation.

Nothing here crosses workers, so nothing here is compiled again when the members change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from elastic_train.membership.group import MARKS_START, MARKS_STOP
from elastic_train.state import Device, TrainState, fingerprint, leaf_fingerprints
from elastic_train.step.flat import Sums, add
from elastic_train.step.mathematics import Marks, Mathematics, Means, as_marks
from elastic_train.step.memory import num_states
from elastic_train.step.model import build, shapes_of
from elastic_train.step.rates import LearningRates
from elastic_train.telemetry.phase_times import PhaseTimes

if TYPE_CHECKING:
    from elastic_train.trainer import Trainer


_HOST_HAS_A_SAY = re.compile(
    r" (while|conditional|infeed|outfeed|send|recv)(-start)?\(" r'|custom_call_target="[^"]*callback'
)


class Inputs(NamedTuple):
    """What a shard's program takes besides the state, on the device.

    Attributes:
      step: whose random keys they are for.
      batch, weight: samples, and their weights.
      numbers: uint32[2], the step and the shard.
    """

    step: int
    batch: dict[str, jax.Array]
    weight: jax.Array
    numbers: jax.Array


class LocalProgram:
    """The compiled local programs of one worker.

    Args:
      trainer: the user's trainer.
      device: where the state lives and everything here runs.
      batch: one shard's samples, for their shapes; a dict of numpy arrays [rows, ...].
      eval_batch: the same for evaluation, or None.
      times: told when making the model ("model") and the programs ("compile") begins.
      has_padding: whether shards may have padding rows; whether batches of an evaluation may.

    Attributes:
      initial: the state that the seed gives, until `give_initial` was called; then shapes alone.
      leaf_paths: key paths of the state's leaves, in the order of `leaf_fingerprints`.
      layout: of a partial sum.
      num_states: how many states are held beside each other, see `memory.num_states`.
      queues_ahead: whether an exchange may be queued before the gradients are there.
      update_waits: whether queueing the update may have to wait for what was queued before.
      eval_names: metrics of an evaluation, in ascending order.
    """

    def __init__(
        self,
        trainer: Trainer,
        device: Device,
        batch: Mapping[str, np.ndarray],
        eval_batch: Mapping[str, np.ndarray] | None,
        times: PhaseTimes,
        has_padding: tuple[bool, bool] = (True, True),
    ) -> None:
        times.enter("model")
        self._trainer = trainer
        self._device = device
        transform = trainer.optimizer()
        # Parameters and streams follow from the seed alone, so every worker starts from the same bits.
        with jax.default_device(device):
            parts, self.initial = build(trainer, transform, device)
            seed_key = jax.random.fold_in(jax.random.key(trainer.config.seed), 1)
        paths = jax.tree_util.tree_flatten_with_path(self.initial.arrays)[0]
        self.leaf_paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
        times.enter("compile")
        example = (*self.initial.arrays.values(), *self.put(batch, _ones(batch)))
        self._mathematics = Mathematics(trainer, transform, parts, seed_key, device.platform, example, has_padding)
        self.layout = self._mathematics.layout
        self._compile(example, eval_batch)
        self._rates = LearningRates(trainer.schedule(), trainer.config.steps, device)

    def _compile(self, example: tuple[Any, ...], eval_batch: Mapping[str, np.ndarray] | None) -> None:
        mathematics, arrays, sums = self._mathematics, self.initial.arrays, self.layout.leaves
        numbers = jax.ShapeDtypeStruct((2,), jnp.uint32)
        marks = jax.ShapeDtypeStruct((1, MARKS_STOP - MARKS_START), jnp.int32)
        self._shard = self._aot(mathematics.marked_sums, (), *example, numbers, marks)
        self._add = self._aot(lambda a, b: tuple(add(x, y) for x, y in zip(a, b, strict=True)), (), sums, sums)
        self.num_states = self._states_with_room()
        # A CPU may run what it is given at once, in the thread that gives it. Whoever gives it an exchange would wait
        # for the others, and seem to be still computing.
        self.queues_ahead = self._device.platform != "cpu"
        # Each worker compiles and applies the update by itself, and all must come to the same bits. On a GPU,
        # autotuning may choose another kernel in each process, which adds up a norm, say, in another order.
        same = {"xla_gpu_deterministic_ops": True} if self._device.platform == "gpu" else {}
        donated = (0, 1, 2) if self.num_states == 1 else ()
        self._update = self._aot(mathematics.update, donated, *arrays.values(), sums, *self.scale(1), options=same)
        # Whoever gives a GPU a program in which the host has a say waits for all that was given before. It would seem
        # to be waiting for its own gradients, and may in truth be waiting for the others.
        self.update_waits = _waits_for_host(self._update)
        self._fingerprint = self._aot(fingerprint, (), arrays)
        self._as_marks = self._aot(as_marks, (), jax.ShapeDtypeStruct((2,), jnp.uint32))
        self._no_marks = self._aot(lambda: jnp.zeros(marks.shape, marks.dtype), ())()
        self._zeros = self._aot(lambda: tuple(jnp.zeros(spec.shape, spec.dtype) for spec in sums), ())
        # Only what it needs, since each argument takes time.
        self._means = self._aot(mathematics.means, (), [sums[number] for number in mathematics.of_means])
        self._leaf_fingerprints: Any = None
        self._evaluate = None
        self.eval_names: list[str] = []
        if eval_batch is not None:
            inputs = (self.initial.params, self.initial.model_state, *self.put(eval_batch, _ones(eval_batch)))
            self.eval_names = sorted(jax.eval_shape(mathematics.eval_sums, *inputs))
            self._evaluate = self._aot(mathematics.eval_sums, (), *inputs)

    def _aot(
        self, function: Any, donate: tuple[int, ...], *args: Any, options: Mapping[str, bool] | None = None
    ) -> Any:
        where = jax.sharding.SingleDeviceSharding(self._device)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args)
        lowered = jax.jit(function, donate_argnums=donate, out_shardings=where).lower(*shapes)
        return lowered.compile(compiler_options=dict(options or {}) or None)

    def _states_with_room(self) -> int:
        """How many states are held beside each other; see `memory.num_states`."""
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.initial.arrays))
        return num_states(self._trainer.config, state_bytes, self.layout.num_bytes, self._room_bytes())

    def _room_bytes(self) -> float:
        """How much of the device's memory a step may take in all; infinite where it is the host's."""
        if self._device.platform == "cpu":
            return math.inf
        found, stats = self._shard.memory_analysis(), self._device.memory_stats() or {}
        peak = 0
        if found is not None:
            peak = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
        return max(peak, stats.get("bytes_limit", 0) // 2)

    def rehearse(self, inputs: Inputs, state: TrainState) -> None:
        """Runs the programs of a step once, and forgets what they give. A device loads kernels and libraries when they
        are first used, which takes as long as some steps: better now than when all others wait.
        """
        arrays = state.arrays
        sums, marks = self._shard(*arrays.values(), *inputs[1:], self._no_marks)
        jax.block_until_ready((self.means(sums), self._as_marks(self._fingerprint(arrays)), marks))
        # These give something large. A model that leaves no room for it may never need them.
        if self._num_bytes_free() > 2 * self.layout.num_bytes:
            jax.block_until_ready(self._add(sums, sums))
        if self.num_states > 1:
            jax.block_until_ready(self._update(*arrays.values(), sums, *self.scale(1)))

    def _num_bytes_free(self) -> float:
        """What is left of the device's memory; infinite where it is the host's."""
        stats = self._device.memory_stats() or {}
        return stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)

    def give_initial(self) -> TrainState:
        """The state that the seed gives, once. Shapes are what is left here: a worker that begins with another state
        would else hold two of them for ever."""
        given = self.initial
        self.initial = TrainState(given.step, given.samples, **shapes_of(given.arrays))
        return given

    # Called by the step, in this order.

    def put(self, batch: Mapping[str, np.ndarray], weight: np.ndarray) -> tuple[dict[str, jax.Array], jax.Array]:
        """One shard's samples and their weights (1, or 0 for padding) on the device."""
        return jax.device_put((dict(batch), weight), self._device)

    def place(self, step: int, shard: int, batch: Mapping[str, Any], weight: Any) -> Inputs:
        """What the step after `step` updates needs of a shard, on the device; its samples may be there already."""
        numbers = np.array([step % 2**32, shard], np.uint32)
        return Inputs(step, *jax.device_put((dict(batch), weight, numbers), self._device))

    def marks(self, state: TrainState, checked: bool) -> Marks:
        """The marks of a step before any shard: the state's fingerprint, if it is to be compared."""
        return self._as_marks(self._fingerprint(state.arrays)) if checked else self._no_marks

    def shard_sums(self, state: TrainState, inputs: Inputs, marks: Marks) -> tuple[Sums, Marks]:
        """Sums over one shard: gradients, loss, metrics, model state. Marks tell of what is not finite."""
        return self._shard(*state.arrays.values(), *inputs[1:], marks)

    def add(self, left: Sums, right: Sums) -> Sums:
        """One addition of the canonical tree."""
        return self._add(left, right)

    def zeros(self) -> Sums:
        """What a member contributes whose own code failed."""
        return self._zeros()

    def means(self, total: Sums) -> dict[str, jax.Array]:
        """The metrics of a step, float32[] each. From a program of their own: whoever reads them does not wait for the
        update, if that comes after."""
        return self._means([total[i] for i in self._mathematics.of_means])

    def update(self, state: TrainState, total: Sums, num_samples: int, scale: tuple[jax.Array, ...]) -> TrainState:
        """The state after the step. If there is room for one state only, the old one's arrays are gone."""
        arrays = self._update(*state.arrays.values(), total, *scale)
        return TrainState(state.step + 1, state.samples + num_samples, *arrays)

    def scale(self, num_samples: int) -> tuple[jax.Array, ...]:
        """The factor on the update, float32[]; nothing if the trainer does not ask for one. Asks the user's code."""
        if not self._trainer._scales_updates():
            return ()
        return (jax.device_put(np.float32(self._trainer.learning_rate_scale(num_samples)), self._device),)

    def learning_rate(self, step: int) -> float | None:
        """The learning rate of the update that follows `step` updates, if the trainer has a schedule."""
        return self._rates.of(step)

    def fingerprint(self, state: TrainState) -> tuple[int, int]:
        """64 bits that depend on every bit of the state; see `state.fingerprint`."""
        first, second = np.asarray(self._fingerprint(state.arrays))
        return int(first), int(second)

    def leaf_fingerprints(self, state: TrainState) -> np.ndarray:
        """uint32[leaves, 2], the leaves in the order of `leaf_paths`. Compiled when it is first needed."""
        if self._leaf_fingerprints is None:
            self._leaf_fingerprints = self._aot(leaf_fingerprints, (), self.initial.arrays)
        return np.asarray(self._leaf_fingerprints(state.arrays))

    def eval_sums(self, state: TrainState, batch: tuple[Any, Any]) -> Means:
        """Sums of the evaluation metrics over one batch."""
        assert self._evaluate is not None
        return self._evaluate(state.params, state.model_state, *batch)


def _waits_for_host(program: Any) -> bool:
    """Whether a compiled program branches, loops, or exchanges anything with the host; true if that is not known."""
    text = program.as_text()
    return text is None or _HOST_HAS_A_SAY.search(text) is not None


def _ones(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.ones(len(next(iter(batch.values()))), np.float32)
