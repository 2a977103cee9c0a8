"""What is kept of an attempt that failed, and when it must not be used."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np

from elastic_train.state import TrainState
from elastic_train.step.flat import Layout
from elastic_train.step.kept import MAX_SHARD_BYTES, Kept
from elastic_train.step.plan import Node

RUN = (Node(0, 2), Node(2, 3))
SUMS = {Node(0, 2): (jnp.ones((1, 3)),)}


def state(step: int = 3) -> TrainState:
    return TrainState(step, 10 * step, {"w": jnp.ones(3)}, {}, {})


def after(start: TrainState, num_bad: int = 0) -> Kept:
    """What an attempt from `start` leaves."""
    kept = Kept()
    kept.keep(start, SUMS, jnp.array([[123, 456, num_bad, 0]], jnp.int32))
    return kept


def test_it_is_for_the_very_state_that_it_was_computed_from():
    first, twin = state(), state()
    assert after(first).take(first, RUN) == (SUMS, (2,))
    assert after(first).take(twin, RUN) == ({}, (0, 1, 2))  # it may hold other bits: one that was received
    kept = after(first)
    kept.drop()
    assert kept.take(first, RUN) == ({}, (0, 1, 2))


def test_it_is_taken_once_and_what_is_of_no_use_goes():
    first = state()
    kept = after(first)
    assert kept.take(first, [Node(4, 6)]) == ({}, (4, 5))
    assert kept.take(first, RUN) == ({}, (0, 1, 2))


def test_it_does_not_hold_a_state_that_was_replaced():
    first = state()
    kept, there = after(first), weakref.ref(first)
    del first
    assert there() is None
    assert kept.take(state(), RUN) == ({}, (0, 1, 2))


def test_sums_that_are_not_finite_are_computed_again():
    first = state()
    assert after(first, num_bad=1).take(first, RUN) == ({}, (0, 1, 2))


def test_single_shards_are_kept_only_while_they_take_little_memory():
    spec = jax.ShapeDtypeStruct((1, MAX_SHARD_BYTES // 16), np.float32)
    assert Kept().has_room(4, Layout([spec]))
    assert not Kept().has_room(4, Layout([spec, jax.ShapeDtypeStruct((1, 1), np.int8)]))
