"""What a worker computes on its own device: gradients of one shard, sums, the update, evaluation.

Nothing here crosses workers, so nothing here is compiled again when the members change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from elastic_train.checkpoint.snapshot import leaf_kinds
from elastic_train.membership.group import MARKS_START, MARKS_STOP
from elastic_train.state import Device, PyTree, TrainState, fingerprint, leaf_fingerprints
from elastic_train.step.flat import Layout, Packing, Sums, add
from elastic_train.step.plan import most_partials
from elastic_train.telemetry.phase_times import PhaseTimes

if TYPE_CHECKING:
    from elastic_train.config import Config
    from elastic_train.trainer import Trainer


_HOST_HAS_A_SAY = re.compile(
    r" (while|conditional|infeed|outfeed|send|recv)(-start)?\(" r'|custom_call_target="[^"]*callback'
)

RATES_AT_ONCE = 64
"""For how many steps the learning rate is computed at a time. A call takes as long for one, and the device waits."""


class WeightedSum(NamedTuple):
    """A sum over samples (or tokens) and the weight it stands for; the framework divides after the last addition.

    Attributes:
      value: float[], the weighted sum.
      weight: float[], the sum of the weights.
    """

    value: jax.Array
    weight: jax.Array


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


Means = dict[str, WeightedSum]
Marks = jax.Array
"""int32[1, 4] on the device: see `group.MARKS_START`."""


class LocalProgram:
    """The compiled local programs of one worker.

    Args:
      trainer: the user's trainer.
      device: where the state lives and everything here runs.
      batch: one shard's samples, for their shapes; a dict of numpy arrays [rows, ...].
      eval_batch: the same for evaluation, or None.
      times: told when making the model ("model") and the programs ("compile") begins.
    """

    def __init__(
        self,
        trainer: Trainer,
        device: Device,
        batch: Mapping[str, np.ndarray],
        eval_batch: Mapping[str, np.ndarray] | None,
        times: PhaseTimes,
    ) -> None:
        times.enter("model")
        self._trainer = trainer
        self._device = device
        self._transform = trainer.optimizer()
        # Parameters and streams follow from the seed alone, so every worker starts from the same bits.
        with jax.default_device(device):
            self._build_model(trainer)
            self._seed_key = jax.random.fold_in(jax.random.key(trainer.config.seed), 1)
        times.enter("compile")
        example = self.put(batch, _ones(batch))
        numbers = jax.ShapeDtypeStruct((2,), jnp.uint32)
        sums = jax.eval_shape(self._sums, *self.initial.arrays.values(), *example, numbers)
        self._tree = jax.tree.structure(sums)
        self._packing = Packing(self._layout(sums))
        self.layout = self._packing.packed
        self._compile(example, eval_batch)
        self._log_device = _cheapest_for_scalars(device)
        schedule = trainer.schedule()
        self._schedule = None if schedule is None else jax.jit(partial(_many_rates, schedule, trainer.config.steps - 1))
        self._rates: tuple[int, np.ndarray] = -1, np.empty(0)
        self.learning_rate(0)

    def _build_model(self, trainer: Trainer) -> None:
        model = trainer.model(nnx.Rngs(trainer.config.seed))
        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"{type(trainer).__name__}.model() must return a flax.nnx.Module; got {type(model).__name__}"
            )
        self._graphdef, self._params, self._streams, self._rest = _parts(model)
        params, rest = self._own(nnx.to_pure_dict(self._params)), self._own(nnx.to_pure_dict(self._rest))
        # Only their structure is needed from now on. Arrays would be a second set of parameters, held for ever.
        del model
        self._params, self._rest = _shapes(self._params), _shapes(self._rest)
        opt_state = jax.jit(self._fresh_opt_state, out_shardings=jax.sharding.SingleDeviceSharding(self._device))(
            params
        )
        self.initial = TrainState(step=0, samples=0, params=params, model_state=rest, opt_state=opt_state)
        paths = jax.tree_util.tree_flatten_with_path(self.initial.arrays)[0]
        self.leaf_paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]

    def _fresh_opt_state(self, params: PyTree) -> PyTree:
        # Copies: what a program returns as it was given would be the same array, which must not be donated twice.
        return jax.tree.map(jnp.copy, self._transform.init(params))

    def _layout(self, sums: PyTree) -> Layout:
        """Gradients and loss must be finite. What a metric says is the user's affair, and model state may hold
        infinities on purpose, such as a mask."""
        yes, no = (jax.tree.map(lambda _, value=value: value, sums) for value in (True, False))
        loss = yes["means"]["loss"]
        chosen = {**no, "grads": yes["grads"], "means": {**no["means"], "loss": loss}}
        weight = {**no, "means": {**no["means"], "loss": loss._replace(value=False)}}
        leaves = [jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype) for leaf in self._tree.flatten_up_to(sums)]
        number = self._tree.flatten_up_to(weight).index(True)
        return Layout(leaves, self._tree.flatten_up_to(chosen), number)

    def _own(self, tree: PyTree) -> PyTree:
        """Copies on this worker's device: the state is donated, and must not take anybody else's arrays along."""
        return jax.tree.map(lambda leaf: jax.device_put(jnp.array(leaf, copy=True), self._device), tree)

    def _compile(self, example: tuple[Any, Any], eval_batch: Mapping[str, np.ndarray] | None) -> None:
        arrays = self.initial.arrays
        numbers = jax.ShapeDtypeStruct((2,), jnp.uint32)
        sums = self.layout.leaves
        marks = jax.ShapeDtypeStruct((1, MARKS_STOP - MARKS_START), jnp.int32)
        self._shard = self._aot(self._marked_sums, (), *arrays.values(), *example, numbers, marks)
        self._add = self._aot(lambda a, b: tuple(add(x, y) for x, y in zip(a, b, strict=True)), (), sums, sums)
        self.num_states = self._states_with_room()
        # A CPU may run what it is given at once, in the thread that gives it. Whoever gives it an exchange would wait
        # for the others, and seem to be still computing.
        self.queues_ahead = self._device.platform != "cpu"
        # Each worker compiles and applies the update by itself, and all must come to the same bits. On a GPU,
        # autotuning may choose another kernel in each process, which adds up a norm, say, in another order.
        same = {"xla_gpu_deterministic_ops": True} if self._device.platform == "gpu" else {}
        donated = (0, 1, 2) if self.num_states == 1 else ()
        self._update = self._aot(self._apply, donated, *arrays.values(), sums, *self.scale(1), options=same)
        # Whoever gives a GPU a program in which the host has a say waits for all that was given before. It would seem
        # to be waiting for its own gradients, and may in truth be waiting for the others.
        self.update_waits = _waits_for_host(self._update)
        self._fingerprint = self._aot(fingerprint, (), arrays)
        self._as_marks = self._aot(_as_marks, (), jax.ShapeDtypeStruct((2,), jnp.uint32))
        self._no_marks = self._aot(lambda: jnp.zeros(marks.shape, marks.dtype), ())()
        self._zeros = self._aot(lambda: tuple(jnp.zeros(spec.shape, spec.dtype) for spec in sums), ())
        leaves, structure = jax.tree.flatten(jax.tree.unflatten(self._tree, range(self._tree.num_leaves))["means"])
        # Only what it needs, since each argument takes time.
        self._of_means = sorted({self._packing.places[i][0] for i in leaves})

        def means(arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
            given = dict(zip(self._of_means, arrays, strict=True))
            found = [self._packing.leaf(i, given[self._packing.places[i][0]])[0] for i in leaves]
            return _means(jax.tree.unflatten(structure, found))

        self._means = self._aot(means, (), [sums[number] for number in self._of_means])
        self._leaf_fingerprints: Any = None
        self._evaluate = None
        self.eval_names: list[str] = []
        if eval_batch is not None:
            inputs = (self.initial.params, self.initial.model_state, *self.put(eval_batch, _ones(eval_batch)))
            self.eval_names = sorted(jax.eval_shape(self._eval_sums, *inputs))
            self._evaluate = self._aot(self._eval_sums, (), *inputs)

    def _aot(
        self, function: Any, donate: tuple[int, ...], *args: Any, options: Mapping[str, bool] | None = None
    ) -> Any:
        where = jax.sharding.SingleDeviceSharding(self._device)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args)
        lowered = jax.jit(function, donate_argnums=donate, out_shardings=where).lower(*shapes)
        return lowered.compile(compiler_options=dict(options or {}) or None)

    def _states_with_room(self) -> int:
        """How many states fit beside each other: 1, 2 (those before and after a step) or 3 (and one that is copied)."""
        config = self._trainer.config
        if config.early_update == "never":
            return 1
        if self._device.platform == "cpu":
            return 3
        found, stats = self._shard.memory_analysis(), self._device.memory_stats() or {}
        peak = 0
        if found is not None:
            peak = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
        fitting = states_with_room(
            sum(leaf.nbytes for leaf in jax.tree.leaves(self.initial.arrays)),
            self.layout.num_bytes,
            # Under `per_worker` each member is one shard.
            1 if config.batch_policy == "per_worker" else most_partials(config.shards),
            max(peak, stats.get("bytes_limit", 0) // 2),
        )
        return max(2, fitting) if config.early_update == "always" else fitting

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
        self.initial = TrainState(given.step, given.samples, **_shapes(given.arrays))
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
        return self._means([total[i] for i in self._of_means])

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
        if self._schedule is None:
            return None
        start = step - step % RATES_AT_ONCE
        if self._rates[0] != start:
            with jax.default_device(self._log_device):
                self._rates = start, np.asarray(self._schedule(np.int32(start)))
        return float(self._rates[1][step - start])

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

    # Traced.

    def _model(self, params: PyTree, model_state: PyTree, key: jax.Array | None) -> nnx.Module:
        streams = nnx.to_pure_dict(self._streams)
        if key is not None:
            leaves, treedef = jax.tree.flatten(streams)
            fresh = [
                jax.random.fold_in(key, number)
                if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                else jnp.zeros_like(leaf)
                for number, leaf in enumerate(leaves)
            ]
            streams = jax.tree.unflatten(treedef, fresh)
        parts = ((self._params, params), (self._streams, streams), (self._rest, model_state))
        return nnx.merge(self._graphdef, *(_filled(template, values) for template, values in parts))

    def _sums(
        self,
        params: PyTree,
        model_state: PyTree,
        opt_state: PyTree,
        batch: Any,
        weight: Any,
        numbers: Any,
    ) -> PyTree:
        del opt_state
        step, shard = numbers
        key = jax.random.fold_in(jax.random.fold_in(self._seed_key, step), shard)

        def loss_sum(params: PyTree) -> tuple[jax.Array, tuple[Means, PyTree]]:
            model = self._model(params, model_state, jax.random.fold_in(key, 0))
            model.train()
            result = self._trainer.loss(model, batch, nnx.Rngs(jax.random.fold_in(key, 1)))
            loss, metrics = (
                result if isinstance(result, tuple) and not isinstance(result, WeightedSum) else (result, {})
            )
            means = {name: _weighted(f"loss(), metric {name!r}", x, weight) for name, x in metrics.items()}
            means["loss"] = _weighted("loss()", loss, weight)
            after = nnx.to_pure_dict(_parts(model)[3])
            return means["loss"].value, (means, after)

        grads, (means, after) = jax.grad(loss_sum, has_aux=True)(params)
        # A full shard counts as exactly 1, so that one shard alone leaves its state untouched by rounding.
        share = jnp.sum(weight) / weight.size
        scaled = jax.tree.map(lambda x: _share_of(x, share, shard), after)
        grads = jax.tree.map(self._for_exchange, grads)
        return {"grads": grads, "means": means, "share": share, "model_state": scaled}

    def _for_exchange(self, grad: jax.Array) -> jax.Array:
        """A shard's gradient as it is added and sent."""
        if self._trainer.config.exchange_dtype and grad.dtype == jnp.float32:
            return grad.astype(self._trainer.config.exchange_dtype)
        return grad

    def _marked_sums(self, *args: Any) -> tuple[Sums, Marks]:
        *inputs, marks = args
        sums = tuple(leaf[None] for leaf in self._tree.flatten_up_to(self._sums(*inputs)))
        if self._device.platform == "cpu":
            # Fused with looking at them, LLVM may contract the arithmetic in another way: kept apart, the gradients are
            # bit for bit those of a plain loop. On a GPU the separate copy would cost time and memory.
            sums = jax.lax.optimization_barrier(sums)
        sums = self._packing.pack(sums)
        bad = ~self.layout.is_finite(sums)
        first, second, num_bad, first_bad = marks[0]
        first_bad = jnp.where(bad & (num_bad == 0), inputs[-1][1].astype(jnp.int32), first_bad)
        return sums, jnp.stack([first, second, num_bad + bad.astype(jnp.int32), first_bad])[None]

    def _apply(
        self, params: PyTree, model_state: PyTree, opt_state: PyTree, sums: Sums, *scale: jax.Array
    ) -> tuple[Any, ...]:
        leaves = self._packing.unpack(sums)
        if self._device.platform == "cpu":
            leaves = jax.lax.optimization_barrier(leaves)  # see `_marked_sums`
        total = jax.tree.unflatten(self._tree, [leaf[0] for leaf in leaves])
        means, share = total["means"], total["share"]
        weight = means["loss"].weight
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype) / weight.astype(p.dtype), total["grads"], params)
        updates, opt_state = self._transform.update(grads, opt_state, params)
        for factor in scale:
            updates = jax.tree.map(lambda update: update * factor.astype(update.dtype), updates)  # noqa: B023
        params = optax.apply_updates(params, updates)
        is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        model_state = jax.tree.map(lambda x: x / share.astype(x.dtype) if is_float(x) else x, total["model_state"])
        return params, model_state, opt_state

    def _eval_sums(self, params: PyTree, model_state: PyTree, batch: Any, weight: Any) -> Means:
        model = self._model(params, model_state, None)
        model.eval()
        metrics = self._trainer.evaluate(model, batch)
        return {name: _weighted(f"evaluate(), metric {name!r}", x, weight) for name, x in metrics.items()}


def states_with_room(state_bytes: int, sum_bytes: int, num_partials: int, room_bytes: int) -> int:
    """How many states have room beside an exchange, from 1 to 3; 1 also if there is no room for a single one.

    Args:
      state_bytes, sum_bytes: size of a state; of a partial sum.
      num_partials: how many partial sums a member brings at the most.
      room_bytes: how much memory may be taken in all.
    """
    # Each partial sum is there three times: as it is, as it is sent, and received. What they add up to is there once.
    exchange = (3 * num_partials + 1) * sum_bytes
    return next((number for number in (3, 2) if number * state_bytes + exchange <= room_bytes), 1)


def _many_rates(schedule: Any, last: int, start: jax.Array) -> jax.Array:
    """The learning rates of `RATES_AT_ONCE` steps from `start` on, int32[], none after `last`; traceable. One by one,
    so that a rate does not depend on which others are computed beside it."""
    steps = jnp.minimum(start + jnp.arange(RATES_AT_ONCE, dtype=jnp.int32), last)
    return jax.lax.map(lambda step: jnp.asarray(schedule(step)), steps)


def _means(means: Means) -> dict[str, jax.Array]:
    return {name: mean.value / mean.weight for name, mean in means.items()}


def _waits_for_host(program: Any) -> bool:
    """Whether a compiled program branches, loops, or exchanges anything with the host; true if that is not known."""
    text = program.as_text()
    return text is None or _HOST_HAS_A_SAY.search(text) is not None


def _as_marks(fingerprint: jax.Array) -> Marks:
    """Marks from a fingerprint, uint32[2]. Apart from its program, which is then compiled only once."""
    words = jax.lax.bitcast_convert_type(fingerprint, jnp.int32)
    return jnp.concatenate([words, jnp.zeros((MARKS_STOP - MARKS_START - 2,), jnp.int32)])[None]


def leaf_kinds_of(trainer_class: type[Trainer], config: Config) -> dict[str, str] | None:
    """The state's leaves, `checkpoint.snapshot.leaf_kinds` of them, without computing them; None if the model cannot
    be built abstractly."""

    def build() -> dict[str, PyTree]:
        trainer = trainer_class(config)
        _, params, _, rest = _parts(trainer.model(nnx.Rngs(trainer.config.seed)))
        params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
        return {"params": params, "model_state": rest, "opt_state": trainer.optimizer().init(params)}

    try:
        return leaf_kinds(jax.eval_shape(build))
    except Exception:  # the user's code may want real arrays; then the workers compare
        return None


def _parts(model: nnx.Module) -> tuple[Any, Any, Any, Any]:
    """A model's structure, parameters, random streams, and everything else."""
    graphdef, params, streams, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)
    return graphdef, params, streams, rest


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _ones(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.ones(len(next(iter(batch.values()))), np.float32)


def _filled(template: Any, values: PyTree) -> Any:
    state = jax.tree.map(lambda leaf: leaf, template)
    nnx.replace_by_pure_dict(state, values)
    return state


def _weighted(name: str, result: Any, weight: jax.Array) -> WeightedSum:
    """A user's per-sample values, or sum and weight, as a sum and weight of at least float32."""
    if isinstance(result, WeightedSum):
        value, total = (jnp.asarray(x) for x in result)
        if value.shape or total.shape:
            raise ValueError(f"{name}: a WeightedSum holds two scalars; got shapes {value.shape} and {total.shape}")
        dtype = jnp.promote_types(value.dtype, jnp.float32)
        return WeightedSum(value.astype(dtype), total.astype(dtype))
    values = jnp.asarray(result)
    if values.shape != weight.shape:
        raise ValueError(
            f"{name}: expected one value per sample, shape {weight.shape}; got shape {values.shape}. Do not average: "
            "return the values themselves, or et.WeightedSum(sum, weight), so that shards weigh right."
        )
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    mask = weight.astype(values.dtype)
    # A padding row may hold anything, infinities included: select, do not multiply by zero.
    return WeightedSum(jnp.sum(jnp.where(mask > 0, values, 0)), jnp.sum(mask))


def _share_of(leaf: jax.Array, share: jax.Array, shard: jax.Array) -> jax.Array:
    """A shard's part in the model state: its weighted value; for integers, shard 0's value and zero from the others."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf * share.astype(leaf.dtype)
    return jnp.where(shard == 0, leaf, jnp.zeros_like(leaf))


def _cheapest_for_scalars(device: Device) -> Device:
    """The CPU, where a few scalar operations cost microseconds, unless `JAX_PLATFORMS` leaves it out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return device
