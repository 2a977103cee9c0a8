"""The mathematics of a step, as it is traced: sums over one shard, the update, metrics, evaluation.

Here are functions only. `step/local.py` compiles them, and knows where they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from elastic_train.membership.group import MARKS_START, MARKS_STOP
from elastic_train.state import PyTree
from elastic_train.step.flat import Layout, Packing, Sums
from elastic_train.step.model import Parts, parts_of

if TYPE_CHECKING:
    from elastic_train.trainer import Trainer


class WeightedSum(NamedTuple):
    """Sums over samples (or tokens) and the weights they stand for; the framework divides after the last addition.

    Attributes:
      value: float[rows], the weighted sum of each sample. Or float[], that of all: it cannot leave padding rows out, so
        that is refused where there are any.
      weight: float[rows] or float[], the sum of the weights.
    """

    value: jax.Array
    weight: jax.Array


Means = dict[str, WeightedSum]
Marks = jax.Array
"""int32[1, 4] on the device: see `group.MARKS_START`."""


class Mathematics:
    """What a trainer's programs are compiled from. All methods are traced.

    Args:
      trainer: gives loss and evaluation.
      transform: its optimizer.
      parts: its model.
      seed_key: from which the random keys of all steps follow.
      platform: that of the device on which the programs will run.
      example: parameters, model state, optimizer state, batch and weight of a shard, for their shapes.
      has_padding: whether shards may have padding rows; whether batches of an evaluation may.

    Attributes:
      layout: of a partial sum.
      of_means: numbers of the arrays of a sum in which the metrics are.
    """

    def __init__(
        self,
        trainer: Trainer,
        transform: optax.GradientTransformation,
        parts: Parts,
        seed_key: jax.Array,
        platform: str,
        example: Sequence[Any],
        has_padding: tuple[bool, bool],
    ) -> None:
        self._has_padding, self._eval_has_padding = has_padding
        self._trainer, self._transform, self._parts = trainer, transform, parts
        self._seed_key, self._platform = seed_key, platform
        sums = jax.eval_shape(self.sums, *example, jax.ShapeDtypeStruct((2,), jnp.uint32))
        leaves, self._tree = jax.tree.flatten(sums)
        self._packing = Packing(_layout(sums))
        self.layout = self._packing.packed
        numbers = jax.tree.unflatten(self._tree, range(len(leaves)))["means"]
        self._leaves_of_means, self._tree_of_means = jax.tree.flatten(numbers)
        self.of_means = sorted({self._packing.places[i][0] for i in self._leaves_of_means})

    def sums(
        self, params: PyTree, model_state: PyTree, opt_state: PyTree, batch: Any, weight: Any, numbers: Any
    ) -> PyTree:
        """Sums over one shard, before they are packed. `numbers`, uint32[2], are the step and the shard."""
        del opt_state
        step, shard = numbers
        key = jax.random.fold_in(jax.random.fold_in(self._seed_key, step), shard)

        def loss_sum(params: PyTree) -> tuple[jax.Array, tuple[Means, PyTree]]:
            model = self._parts.merged(params, model_state, jax.random.fold_in(key, 0))
            model.train()
            result = self._trainer.loss(model, batch, nnx.Rngs(jax.random.fold_in(key, 1)))
            loss, metrics = (
                result if isinstance(result, tuple) and not isinstance(result, WeightedSum) else (result, {})
            )
            padded = self._has_padding
            means = {name: _weighted(f"loss(), metric {name!r}", x, weight, padded) for name, x in metrics.items()}
            means["loss"] = _weighted("loss()", loss, weight, padded)
            after = nnx.to_pure_dict(parts_of(model).rest)
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

    def marked_sums(self, *args: Any) -> tuple[Sums, Marks]:
        """Sums over one shard, and the marks of this one and those before. Takes what `sums` does, and marks."""
        *inputs, marks = args
        sums = tuple(leaf[None] for leaf in self._tree.flatten_up_to(self.sums(*inputs)))
        sums = self._packing.pack(self._kept_apart(sums))
        bad = ~self.layout.is_finite(sums)
        first, second, num_bad, first_bad = marks[0]
        first_bad = jnp.where(bad & (num_bad == 0), inputs[-1][1].astype(jnp.int32), first_bad)
        return sums, jnp.stack([first, second, num_bad + bad.astype(jnp.int32), first_bad])[None]

    def _kept_apart(self, leaves: Sums) -> Sums:
        """The same leaves. On a CPU what they are computed from is not fused with what is done with them."""
        # Fused with looking at them, LLVM may contract the arithmetic in another way: kept apart, the gradients are
        # bit for bit those of a plain loop. On a GPU the separate copy would cost time and memory.
        return jax.lax.optimization_barrier(leaves) if self._platform == "cpu" else leaves

    def update(
        self, params: PyTree, model_state: PyTree, opt_state: PyTree, sums: Sums, *scale: jax.Array
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Parameters, model state and optimizer state after a step, from the sum over all shards. The update is
        multiplied with `scale`, if that is given."""
        leaves = self._kept_apart(self._packing.unpack(sums))
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

    def means(self, arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """The metrics of a step, float32[] each, from the arrays `of_means` of the sum over all shards."""
        given = dict(zip(self.of_means, arrays, strict=True))
        found = [self._packing.leaf(i, given[self._packing.places[i][0]])[0] for i in self._leaves_of_means]
        means: Means = jax.tree.unflatten(self._tree_of_means, found)
        return {name: mean.value / mean.weight for name, mean in means.items()}

    def eval_sums(self, params: PyTree, model_state: PyTree, batch: Any, weight: Any) -> Means:
        """Sums of the evaluation metrics over one batch."""
        model = self._parts.merged(params, model_state, None)
        model.eval()
        metrics = self._trainer.evaluate(model, batch)
        padded = self._eval_has_padding
        return {name: _weighted(f"evaluate(), metric {name!r}", x, weight, padded) for name, x in metrics.items()}


def as_marks(fingerprint: jax.Array) -> Marks:
    """Marks from a fingerprint, uint32[2]; traceable. Apart from its program, which is then compiled only once."""
    words = jax.lax.bitcast_convert_type(fingerprint, jnp.int32)
    return jnp.concatenate([words, jnp.zeros((MARKS_STOP - MARKS_START - 2,), jnp.int32)])[None]


def _layout(sums: PyTree) -> Layout:
    """Gradients and loss must be finite. What a metric says is the user's affair, and model state may hold infinities
    on purpose, such as a mask."""
    yes, no = (jax.tree.map(lambda _, value=value: value, sums) for value in (True, False))
    loss = yes["means"]["loss"]
    chosen = {**no, "grads": yes["grads"], "means": {**no["means"], "loss": loss}}
    weight = {**no, "means": {**no["means"], "loss": loss._replace(value=False)}}
    leaves = [jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(sums)]
    return Layout(leaves, jax.tree.leaves(chosen), jax.tree.leaves(weight).index(True))


def _weighted(name: str, result: Any, weight: jax.Array, has_padding: bool) -> WeightedSum:
    """A user's per-sample values, or sums and weights, as a sum and weight of at least float32."""
    if isinstance(result, WeightedSum):
        value, total = (jnp.asarray(x) for x in result)
        if value.shape != total.shape or value.shape not in ((), weight.shape):
            raise ValueError(
                f"{name}: a WeightedSum holds two scalars, or two arrays of one number per sample, shape "
                f"{weight.shape}; got shapes {value.shape} and {total.shape}"
            )
        if has_padding and not value.shape:
            raise ValueError(
                f"{name}: a WeightedSum of two scalars counts padding rows, too, and there are some: a training batch "
                "has them unless batch_size is a multiple of shards, the last batch of an evaluation unless the number "
                "of its samples is a multiple of the rows of a shard. Return et.WeightedSum(sums, weights) with one "
                "number per sample in each (loss.sum(-1), say, if loss is [rows, tokens]), or choose such numbers."
            )
        dtype = jnp.promote_types(value.dtype, jnp.float32)
        return WeightedSum(_sum_of_real(value.astype(dtype), weight), _sum_of_real(total.astype(dtype), weight))
    values = jnp.asarray(result)
    if values.shape != weight.shape:
        raise ValueError(
            f"{name}: expected one value per sample, shape {weight.shape}; got shape {values.shape}. Do not average: "
            "return the values themselves, or et.WeightedSum(sums, weights), so that shards weigh right."
        )
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    return WeightedSum(_sum_of_real(values, weight), jnp.sum(weight.astype(values.dtype)))


def _sum_of_real(values: jax.Array, weight: jax.Array) -> jax.Array:
    """float[rows] -> float[], without padding rows; a scalar as it is."""
    # A padding row may hold anything, infinities included: select, do not multiply by zero.
    return jnp.sum(jnp.where(weight > 0, values, 0)) if values.shape else values


def _share_of(leaf: jax.Array, share: jax.Array, shard: jax.Array) -> jax.Array:
    """A shard's part in the model state: its weighted value; of what has no mean, such as an integer counter, shard 0's
    value, and zero from the others."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf * share.astype(leaf.dtype)
    return jnp.where(shard == 0, leaf, jnp.zeros_like(leaf))
