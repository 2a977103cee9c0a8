"""A tree of arrays as a few flat vectors, one per dtype, and back. What members exchange is flat."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any
Flats = tuple[jax.Array, ...]
"""One array[1, size] per dtype. The leading axis is the members' axis in the exchange."""


class Checks(NamedTuple):
    """What must hold of a sum before it may be used.

    Attributes:
      spans: for each vector, the ranges (start, stop) that must be finite.
      weight: vector and position of what gradients are divided by, which must not be zero; None if that is nowhere.
    """

    spans: tuple[tuple[tuple[int, int], ...], ...] = ()
    weight: tuple[int, int] | None = None

    def has_weight(self, flats: Flats) -> jax.Array:
        """bool[]; traceable."""
        return jnp.bool_(True) if self.weight is None else flats[self.weight[0]][0, self.weight[1]] != 0


def is_finite(flats: Flats, checks: Checks) -> jax.Array:
    """Whether everything in the spans is, as bool[]; traceable."""
    fine = jnp.bool_(True)
    for flat, spans in zip(flats, checks.spans, strict=False):
        for start, stop in spans:
            fine = fine & jnp.all(jnp.isfinite(jax.lax.slice(flat, (0, start), (1, stop))))
    return fine


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

    def checks(self, chosen: PyTree, weight: PyTree) -> Checks:
        """Checks of the leaves that `chosen` says True for, and of the one that `weight` does.

        Both have the example's structure. Leaves that are no floating-point numbers are always finite.
        """
        chosen, weight = self._treedef.flatten_up_to(chosen), self._treedef.flatten_up_to(weight)
        spans: list[tuple[tuple[int, int], ...]] = []
        place = None
        for number, (group, spec) in enumerate(zip(self._groups, self.specs, strict=True)):
            found: list[tuple[int, int]] = []
            start = 0
            for i in group:
                stop = start + math.prod(self._leaves[i].shape)
                if weight[i]:
                    place = (number, start)
                if chosen[i] and stop > start and jnp.issubdtype(spec.dtype, jnp.inexact):
                    if found and found[-1][1] == start:
                        found[-1] = (found[-1][0], stop)
                    else:
                        found.append((start, stop))
                start = stop
            spans.append(tuple(found))
        return Checks(tuple(spans), place)

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
