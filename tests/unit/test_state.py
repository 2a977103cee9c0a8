"""Digests follow the written format; fingerprints see every bit; bytes go there and back."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_train.state import (
    TrainState,
    as_bytes,
    fingerprint,
    from_bytes,
    key_path_leaves,
    params_sha256,
    state_sha256,
)


def state(**changes) -> TrainState:
    values = {
        "step": 3,
        "samples": 96,
        "params": {"b": jnp.arange(6, dtype=jnp.float32).reshape(2, 3), "a": {0: jnp.ones((2,), jnp.bfloat16)}},
        "model_state": {"mean": jnp.zeros((3,))},
        "opt_state": (jnp.int32(3), {"mu": jnp.full((2,), 0.5)}),
    }
    return TrainState(**{**values, **changes})


def test_params_digest_follows_the_written_format():
    held = state()
    digest = hashlib.sha256()
    digest.update(b"a/0\0bfloat16\x002\0" + np.asarray(held.params["a"][0]).tobytes())
    digest.update(b"b\0float32\x002,3\0" + np.asarray(held.params["b"]).tobytes())
    assert params_sha256(held) == digest.hexdigest()


def test_state_digest_covers_position_and_optimizer_but_params_digest_does_not():
    assert params_sha256(state()) == params_sha256(state(samples=97))
    assert state_sha256(state()) != state_sha256(state(samples=97))
    assert state_sha256(state()) != state_sha256(state(step=4))
    assert state_sha256(state()) != state_sha256(state(opt_state=(jnp.int32(4), {"mu": jnp.full((2,), 0.5)})))


def test_key_paths_are_sorted_and_name_list_places():
    paths = [path for path, _ in key_path_leaves({"z": [jnp.zeros(1), jnp.zeros(1)], "a": {"k": jnp.zeros(1)}})]
    assert paths == ["a/k", "z/0", "z/1"]


LEAVES = {
    "float32": jnp.array([1.5, -0.0, np.inf], jnp.float32),
    "bfloat16": jnp.array([[1, 2], [3, 4]], jnp.bfloat16),
    "int32": jnp.int32(-7),
    "int8": jnp.array([-1, 2, 3], jnp.int8),
    "bool": jnp.array([True, False]),
    "uint32": jnp.arange(5, dtype=jnp.uint32),
    "key": jax.random.split(jax.random.key(0), 3),
    "empty": jnp.zeros((0, 4)),
}


@pytest.mark.parametrize("name", LEAVES)
def test_bytes_there_and_back(name):
    leaf = LEAVES[name]
    back = jax.jit(lambda x: from_bytes(as_bytes(x), x))(leaf)
    assert back.dtype == leaf.dtype and back.shape == leaf.shape
    np.testing.assert_array_equal(np.asarray(as_bytes(back)), np.asarray(as_bytes(leaf)))


@pytest.mark.parametrize("name", [name for name in LEAVES if name != "empty"])
def test_fingerprint_sees_one_flipped_bit(name):
    leaf = LEAVES[name]
    data = np.array(as_bytes(leaf))
    data[-1] ^= 1
    flipped = from_bytes(jnp.array(data), leaf)
    assert fingerprint({"x": leaf}).tolist() != fingerprint({"x": flipped}).tolist()


def test_fingerprint_sees_places_and_signs_of_zero():
    first, second = jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])
    assert fingerprint([first]).tolist() != fingerprint([second]).tolist()
    assert fingerprint([first, second]).tolist() != fingerprint([second, first]).tolist()
    assert fingerprint([jnp.array([0.0])]).tolist() != fingerprint([jnp.array([-0.0])]).tolist()
