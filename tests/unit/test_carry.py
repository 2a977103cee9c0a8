"""A state that a worker leaves in its agent's memory, and the next one finds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_train.checkpoint.carry import Carried, leave_state, take_state
from elastic_train.launch import carried
from elastic_train.state import TrainState, state_sha256


def state(step: int, width: int = 3) -> TrainState:
    """Arrays of several dtypes, one of them empty, and a random key."""
    params = {"w": jnp.full((width, 2), step, jnp.float32), "b": jnp.arange(width, dtype=jnp.bfloat16)}
    opt_state = (jnp.int32(step), jax.random.key(step), jnp.zeros((0, 4)))
    return TrainState(step, 10 * step, params, {"mask": jnp.array([True, False])}, opt_state)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = carried.create(0)
    yield descriptor
    os.close(descriptor)


def test_a_state_is_found_as_it_was_left(memory: int) -> None:
    device = jax.devices()[0]
    about = Carried(7, 70, epoch=4, records=("{}",), record={"step": 7}, metrics={"loss": 0.5}, nonfinite=1)
    left = state(7)
    assert carried.description(memory) is None and take_state(memory, state(0), device) is None
    leave_state(memory, left, about)
    described = carried.description(memory)
    assert described is not None and (described["step"], described["epoch"]) == (7, 4)
    found = take_state(memory, state(0), device)
    assert found is not None
    assert state_sha256(found[0]) == state_sha256(left)
    assert (found[1].step, found[1].record, list(found[1].records)) == (7, {"step": 7}, ["{}"])
    leave_state(memory, state(8, width=3), Carried(8, 80, epoch=5))
    carried.discard(memory)  # what was taken lives on without it
    np.testing.assert_array_equal(found[0].params["w"], left.params["w"])
    assert carried.description(memory) is None


def test_a_state_of_another_model_or_one_that_is_not_complete_is_none(memory: int) -> None:
    device = jax.devices()[0]
    leave_state(memory, state(7), Carried(7, 70, epoch=4))
    assert take_state(memory, state(0, width=4), device) is None
    os.pwrite(memory, bytes(16), 0)  # as while it is being copied
    assert take_state(memory, state(0), device) is None
