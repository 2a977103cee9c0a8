"""The user's model: built once, taken apart, and put together again wherever a step is traced; and the first state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from elastic_train.checkpoint.snapshot import leaf_kinds
from elastic_train.state import Device, PyTree, TrainState

if TYPE_CHECKING:
    from elastic_train.config import Config
    from elastic_train.trainer import Trainer


class Parts(NamedTuple):
    """A model taken apart.

    Attributes:
      graphdef: its structure.
      params, streams, rest: `nnx.State` of its parameters, its random streams, and everything else.
    """

    graphdef: Any
    params: Any
    streams: Any
    rest: Any

    def merged(self, params: PyTree, model_state: PyTree, key: jax.Array | None) -> nnx.Module:
        """The model with these values; traceable. Its streams follow from `key`; without one they are those that it was
        built with."""
        streams = nnx.to_pure_dict(self.streams)
        if key is not None:
            leaves, treedef = jax.tree.flatten(streams)
            fresh = [
                _keys(jax.random.fold_in(key, number), leaf.shape)
                if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                else jnp.zeros_like(leaf)
                for number, leaf in enumerate(leaves)
            ]
            streams = jax.tree.unflatten(treedef, fresh)
        parts = ((self.params, params), (self.streams, streams), (self.rest, model_state))
        return nnx.merge(self.graphdef, *(_filled(template, values) for template, values in parts))


def _keys(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Keys of this shape: layers that `nnx.vmap` made, for `nnx.scan` to go through, have their streams in one leaf."""
    return jax.random.split(key, shape) if shape else key


def parts_of(model: nnx.Module) -> Parts:
    """Takes a model apart; traceable."""
    return Parts(*nnx.split(model, nnx.Param, nnx.RngState, ...))


def build(trainer: Trainer, transform: optax.GradientTransformation, device: Device) -> tuple[Parts, TrainState]:
    """The trainer's model taken apart, and the state that the seed gives. Of parameters and everything else but random
    streams the parts hold only shapes: arrays would be a second set of parameters, held for ever.

    Raises:
      TypeError: if the trainer's model is none.
    """
    model = trainer.model(nnx.Rngs(trainer.config.seed))
    if not isinstance(model, nnx.Module):
        raise TypeError(f"{type(trainer).__name__}.model() must return a flax.nnx.Module; got {type(model).__name__}")
    parts = parts_of(model)
    params, rest = (_owned(nnx.to_pure_dict(part), device) for part in (parts.params, parts.rest))
    del model  # before the optimizer's state needs the memory
    parts = parts._replace(params=shapes_of(parts.params), rest=shapes_of(parts.rest))

    def fresh_opt_state(params: PyTree) -> PyTree:
        # Copies: what a program returns as it was given would be the same array, which must not be donated twice.
        return jax.tree.map(jnp.copy, transform.init(params))

    where = jax.sharding.SingleDeviceSharding(device)
    opt_state = jax.jit(fresh_opt_state, out_shardings=where)(params)
    return parts, TrainState(step=0, samples=0, params=params, model_state=rest, opt_state=opt_state)


def leaf_kinds_of(trainer_class: type[Trainer], config: Config) -> dict[str, str] | None:
    """The state's leaves, `checkpoint.snapshot.leaf_kinds` of them, without computing them; None if the model cannot
    be built abstractly."""

    def state() -> dict[str, PyTree]:
        trainer = trainer_class(config)
        parts = parts_of(trainer.model(nnx.Rngs(trainer.config.seed)))
        params, rest = nnx.to_pure_dict(parts.params), nnx.to_pure_dict(parts.rest)
        return {"params": params, "model_state": rest, "opt_state": trainer.optimizer().init(params)}

    try:
        return leaf_kinds(jax.eval_shape(state))
    except Exception:  # the user's code may want real arrays; then the workers compare
        return None


def shapes_of(tree: Any) -> Any:
    """The same tree with shapes and dtypes in place of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _owned(tree: PyTree, device: Device) -> PyTree:
    """Copies on this worker's device: the state is donated, and must not take anybody else's arrays along."""
    return jax.tree.map(lambda leaf: jax.device_put(jnp.array(leaf, copy=True), device), tree)


def _filled(template: Any, values: PyTree) -> Any:
    state = jax.tree.map(lambda leaf: leaf, template)
    nnx.replace_by_pure_dict(state, values)
    return state
