"""A tree of arrays as a few flat vectors, one per dtype, and back. What members exchange is flat."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
Flats = tuple[jax.Array, ...]
"""One array[1, size] per dtype. The leading axis is the members' axis in the exchange."""


class Flattener:
    """Fixed once for a tree structure; both directions are traceable.

    Args:
      example: tree of arrays or `jax.ShapeDtypeStruct`.
    """

    def __init__(self, example: PyTree) -> None:
        self._leaves, self._treedef = jax.tree.flatten(example)
        dtypes = sorted({str(leaf.dtype) for leaf in self._leaves})
        self._groups = [[i for i, leaf in enumerate(self._leaves) if str(leaf.dtype) == name] for name in dtypes]
        self.specs = tuple(
            jax.ShapeDtypeStruct((1, sum(math.prod(self._leaves[i].shape) for i in group)), jnp.dtype(name))
            for name, group in zip(dtypes, self._groups, strict=True)
        )

    def flatten(self, tree: PyTree) -> Flats:
        leaves = self._treedef.flatten_up_to(tree)
        return tuple(
            jnp.concatenate([leaves[i].astype(spec.dtype).reshape(-1) for i in group])[None]
            for group, spec in zip(self._groups, self.specs, strict=True)
        )

    def unflatten(self, flats: Flats) -> PyTree:
        leaves: list[Any] = [None] * len(self._leaves)
        for group, flat in zip(self._groups, flats, strict=True):
            vector, start = flat.reshape(-1), 0
            for i in group:
                shape = self._leaves[i].shape
                size = math.prod(shape)
                leaves[i] = jax.lax.slice(vector, (start,), (start + size,)).reshape(shape)
                start += size
        return jax.tree.unflatten(self._treedef, leaves)
