"""What a worker's local programs hold in memory."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import elastic_train as et
from elastic_train.recipe import Recipe
from elastic_train.step import memory

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


class Accelerator:
    """A device that does not say how much memory it has."""

    platform = "gpu"

    def memory_stats(self):
        return None


@pytest.mark.parametrize(
    ("settings", "num_partials"),
    [({"shards": 4}, 1), ({"shards": 8}, 2), ({"shards": 32}, 4), ({"batch_policy": "per_worker"}, 1)],
)
def test_how_many_partial_sums_a_member_may_bring_follows_from_the_settings(monkeypatch, settings, num_partials):
    recipe = Recipe(Wide(et.Config(**settings)), jax.local_devices()[0])
    try:
        monkeypatch.setattr(recipe.local, "_device", Accelerator())
        monkeypatch.setattr(memory, "states_with_room", lambda state, sums, num_partials, room: num_partials)
        assert recipe.local._states_with_room() == num_partials
    finally:
        recipe.close()


def halved(updates, params):
    """Halved until they are small: nobody knows beforehand how often."""

    def too_large(updates):
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(updates)) > 1.0

    return jax.lax.while_loop(too_large, lambda updates: jax.tree.map(lambda x: x / 2, updates), updates)


def told(updates, params):
    jax.debug.callback(lambda x: None, jax.tree.leaves(updates)[0][0])
    return updates


@pytest.mark.parametrize("further", [None, halved, told])
def test_an_update_in_which_the_host_has_a_say_is_known(further):
    class Chosen(Wide):
        def optimizer(self):
            plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
            return optax.chain(plain, optax.stateless(further)) if further else plain

    recipe = Recipe(Chosen(et.Config()), jax.local_devices()[0])
    try:
        assert recipe.local.update_waits == (further is not None)
    finally:
        recipe.close()


def test_the_learning_rate_told_is_that_of_the_step():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 20, 150)

    class Scheduled(Wide):
        def schedule(self):
            return schedule

        def optimizer(self):
            return optax.adam(schedule)

    recipe = Recipe(Scheduled(et.Config(steps=150)), jax.local_devices()[0])
    try:
        expected = [float(jax.jit(schedule)(np.int32(step))) for step in (*range(150), 0)]
        found = [recipe.local.learning_rate(step) for step in (*range(150), 0)]
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
        assert found[0] == found[-1]
    finally:
        recipe.close()
