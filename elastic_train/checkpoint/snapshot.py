"""A copy of the state on the host, in memory that another process can read."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  # NumPy learns bfloat16 and the like from it
import numpy as np

from elastic_train.checkpoint.manifest import kind_of
from elastic_train.state import PyTree, from_stored, stored, stored_shape

PARTS = ("params", "model_state", "opt_state")
"""The state's trees; each is an Orbax item of its own, so that parameters can be read without the rest."""

_ALIGNMENT = 64


class NamedArray(NamedTuple):
    """A leaf of the state on the host.

    Attributes:
      keys: its key path; the first one is of `PARTS`.
      array: its value; the key data for random keys.
      random_key: as in `manifest.Leaf`.
    """

    keys: tuple[str, ...]
    array: np.ndarray
    random_key: str = ""

    @property
    def path(self) -> str:
        return "/".join(self.keys)


def named_leaves(tree: PyTree) -> list[tuple[tuple[str, ...], Any]]:
    """Leaves with the names along their key paths, as `state.key_path_leaves` joins them; in the order of the tree."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf) for path, leaf in leaves]


def random_key_name(leaf: Any) -> str:
    """The dtype of random keys, such as "key<fry>"; empty for other arrays."""
    return str(leaf.dtype) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else ""


def with_values(tree: PyTree, found: Mapping[str, np.ndarray], put: Callable[[np.ndarray], jax.Array]) -> PyTree:
    """`tree`, of real arrays, with the values of `found`, by key path; `put` brings one to the device."""

    def value(keys: tuple[str, ...], leaf: Any) -> jax.Array:
        return from_stored(put(found["/".join(keys)]), leaf)

    return jax.tree.unflatten(jax.tree.structure(tree), [value(*item) for item in named_leaves(tree)])


def leaf_kinds(tree: PyTree) -> dict[str, str]:
    """What `manifest.other_leaves` compares: dtype and shape by key path. Shapes suffice, arrays need not be there."""
    kinds = {}
    for keys, leaf in named_leaves(tree):
        held = stored_shape(leaf)
        name = random_key_name(leaf) or np.dtype(held.dtype).name
        kinds["/".join(keys)] = kind_of(name, held.shape)
    return kinds


class Snapshot:
    """Memory for one state. It is allocated once, and read by the process that writes checkpoints.

    Args:
      tree: arrays with the shapes and dtypes of the state.
      descriptor: memory of somebody else's to use; None allocates some.
      offset: where in it the state begins, in bytes.

    Attributes:
      descriptor: the memory, as a file.
      layout: JSON values; where each leaf lies, for `arrays`.
      num_bytes: the size of all of it, `offset` included.
    """

    def __init__(self, tree: PyTree, descriptor: int | None = None, offset: int = 0) -> None:
        self.layout: list[dict[str, Any]] = []
        self.num_bytes = offset
        for keys, leaf in named_leaves(tree):
            held = stored_shape(leaf)
            dtype = np.dtype(held.dtype)
            about = {"keys": keys, "dtype": dtype.name, "shape": held.shape, "random_key": random_key_name(leaf)}
            self.layout.append({**about, "offset": self.num_bytes})
            size = math.prod(held.shape) * dtype.itemsize
            self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.descriptor = os.memfd_create("checkpoint") if descriptor is None else descriptor
        os.ftruncate(self.descriptor, max(1, self.num_bytes))
        self._memory = mmap.mmap(self.descriptor, max(1, self.num_bytes))
        self._arrays = arrays(self._memory, self.layout)

    def touch(self) -> None:
        """Has the kernel give the memory now, which would make the first copy five times as long."""
        for target in self._arrays:
            _bytes(target.array)[:] = 0

    def copy(self, tree: PyTree) -> None:
        """Fills it with the leaves of `tree`; blocks until they may be donated."""
        leaves = [leaf for _, leaf in named_leaves(tree)]
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        for target, leaf in zip(self._arrays, leaves, strict=True):
            np.copyto(_bytes(target.array), _bytes(np.asarray(stored(leaf))))

    def close(self) -> None:
        """Gives the memory back. Nobody may use it any more."""
        self._arrays.clear()
        self._memory.close()
        os.close(self.descriptor)


def _bytes(array: np.ndarray) -> np.ndarray:
    """The array's memory as uint8[num_bytes]: copying that holds no interpreter lock, whatever the dtype."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def arrays(memory: mmap.mmap, layout: Sequence[Mapping[str, Any]]) -> list[NamedArray]:
    """The leaves that lie in `memory`, without copying them."""
    found = []
    for about in layout:
        dtype, shape = np.dtype(about["dtype"]), tuple(about["shape"])
        count = int(np.prod(shape, dtype=np.int64))
        flat = np.frombuffer(memory, dtype, count, about["offset"]) if count else np.zeros(0, dtype)
        found.append(NamedArray(tuple(about["keys"]), flat.reshape(shape), about["random_key"]))
    return found
