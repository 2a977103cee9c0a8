"""What a worker's local programs hold in memory."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import elastic_train as et
from elastic_train.recipe import Recipe

WIDTH = 200


class Wide(et.Trainer):
    config: et.Config

    def model(self, rngs):
        return nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs))

    def optimizer(self):
        return optax.adam(0.1)

    def loss(self, model, batch, rngs):
        return jnp.mean(model(batch["x"]) ** 2, axis=1)

    def train_data(self):
        return et.ArraySource(x=np.ones((64, WIDTH), np.float32))


def in_use() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_there_is_one_state_and_no_second_set_of_parameters():
    before = in_use()
    recipe = Recipe(Wide(et.Config()), jax.local_devices()[0])
    try:
        state = recipe.local.give_initial()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.arrays))
        assert in_use() - before < size + 1000
        recipe.local.rehearse(recipe.local.place(0, 0, *recipe.read(0, 0)), state)
        assert in_use() - before < size + 1000
    finally:
        recipe.close()
