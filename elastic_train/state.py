"""The training state: what must survive a restart, its digest and its fingerprint."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elastic_train.digests import add_leaf
from elastic_train.errors import StateLostError

PyTree = Any
Device = Any
"""A `jax.Device`; that name is a variable to type checkers."""


@dataclass(frozen=True)
class TrainState:
    """Everything a step reads and writes, the same on every member.

    Attributes:
      step: completed optimizer updates.
      samples: samples consumed; the global position in the data.
      params: nested dict of arrays, the model's `nnx.Param` values.
      model_state: nested dict of the other variables (batch statistics and the like), without random state.
      opt_state: Optax's state.
    """

    step: int
    samples: int
    params: PyTree
    model_state: PyTree
    opt_state: PyTree

    @property
    def arrays(self) -> dict[str, PyTree]:
        """The part that lives on the device."""
        return {"params": self.params, "model_state": self.model_state, "opt_state": self.opt_state}


def key_path_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Leaves with their key paths ("layers/0/kernel"), in sorted key-path order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
    return sorted(named, key=lambda item: item[0])


def sha256_of_leaves(named: Iterable[tuple[str, Any]]) -> str:
    """SHA-256 over leaves, each as `digests.add_leaf` has it."""
    digest = hashlib.sha256()
    for path, leaf in named:
        add_leaf(digest, path, np.asarray(stored(leaf)))
    return digest.hexdigest()


def params_sha256(state: TrainState) -> str:
    """Digest of the parameters alone."""
    return sha256_of_leaves(key_path_leaves(state.params))


def state_sha256(state: TrainState) -> str:
    """Digest of everything that must survive a restart, the position in the data included."""
    counters = {"step": np.int64(state.step), "samples": np.int64(state.samples)}
    return sha256_of_leaves(key_path_leaves({**state.arrays, **counters}))


def stored_shape(like: jax.ShapeDtypeStruct | jax.Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what holds the array's bits: of random keys those of their key data."""
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    held = jax.eval_shape(jax.random.key_data, like) if is_key else like
    return jax.ShapeDtypeStruct(held.shape, held.dtype)


def stored(array: jax.Array) -> jax.Array:
    """The array, or the key data of random keys; traceable."""
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def from_stored(array: jax.Array, like: jax.ShapeDtypeStruct | jax.Array) -> jax.Array:
    """Inverse of `stored` for an array of the dtype of `like`; traceable."""
    if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return array
    # `key_impl` takes arrays only, also traced ones, and no shapes.
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(array, impl=impls[0])


def as_bytes(array: jax.Array) -> jax.Array:
    """The array's bits as uint8[num_bytes]; traceable."""
    array = stored(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(array, jnp.uint8).reshape(-1)


def from_bytes(data: jax.Array, like: jax.ShapeDtypeStruct | jax.Array) -> jax.Array:
    """Inverse of `as_bytes` for an array of the shape and dtype of `like`; traceable."""
    held = stored_shape(like)
    if held.dtype == jnp.bool_:
        return data.reshape(held.shape).astype(jnp.bool_)
    size = held.dtype.itemsize
    shape = held.shape if size == 1 else (*held.shape, size)
    return from_stored(jax.lax.bitcast_convert_type(data.reshape(shape), held.dtype).reshape(held.shape), like)


def failure_of(state: TrainState) -> str:
    """The traceback, if a state is not to be had because what computed it has failed on the device; empty if it is
    there. Nobody waits for an update: it shows in what is computed from its state, and only then this is asked.
    """
    try:
        try:
            jax.block_until_ready(state.arrays)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise StateLostError(
                f"the state after step {state.step} is lost: its update failed on the device: {reason}"
            ) from error
    except StateLostError:  # raised, so that it has a traceback of its own
        return traceback.format_exc()
    return ""


def fingerprint(tree: PyTree) -> jax.Array:
    """uint32[2] that depends on every bit of every leaf and on its place; traceable.

    A sum of mixed words modulo 2**32: integer sums do not depend on the order of summation, so every
    backend and every split of the work gives the same value. Each mix is a bijection of the word, so that a change
    within one word always shows. Two mixes, whose words know their places by different numbers, make it 64 bits.
    """
    return jnp.sum(leaf_fingerprints(tree), axis=0, dtype=jnp.uint32)


def leaf_fingerprints(tree: PyTree) -> jax.Array:
    """uint32[leaves, 2]: what each leaf adds to `fingerprint`, in the order of `jax.tree.leaves`; traceable."""
    rows = []
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        words = _words(leaf)
        first = _mix(words ^ _places(words.size, number, 0x9E3779B1, 0x85EBCA77), 0x7FEB352D, 0x846CA68B)
        second = _mix(words + _places(words.size, number, 0xA3C59AC3, 0x68E31DA5), 0xC2B2AE35, 0x27D4EB2F)
        rows.append(jnp.stack([jnp.sum(mixed, dtype=jnp.uint32) for mixed in (first, second)]))
    return jnp.stack(rows)


def _places(size: int, leaf: int, element_step: int, leaf_step: int) -> jax.Array:
    """A number, uint32[size], for every word of a leaf. Steps are odd, so that no two words of a leaf share one."""
    return jax.lax.iota(jnp.uint32, size) * jnp.uint32(element_step) + jnp.uint32(leaf * leaf_step % 2**32)


def _words(leaf: jax.Array) -> jax.Array:
    """The leaf's bits as uint32[n]: whole words where the dtype allows, else one word per byte."""
    leaf = jnp.asarray(stored(leaf))
    if leaf.dtype != jnp.bool_ and leaf.dtype.itemsize in (4, 8):
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32).reshape(-1)
    return as_bytes(leaf).astype(jnp.uint32)


def _mix(words: jax.Array, first: int, second: int) -> jax.Array:
    words = (words ^ (words >> 16)) * jnp.uint32(first)
    words = (words ^ (words >> 15)) * jnp.uint32(second)
    return words ^ (words >> 16)
