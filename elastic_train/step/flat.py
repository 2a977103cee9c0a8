"""Partial sums as tuples of leaves, and as a few long vectors, one per dtype. What members exchange is vectors.

A worker's own sums stay leaves: as outputs of its programs they cost neither a copy nor memory. The exchange strings
them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
Sums = tuple[jax.Array, ...]
"""Leaves, each array[1, ...]. The leading axis is the members' axis in the exchange."""

Vectors = tuple[jax.Array, ...]
"""One array[1, size] per dtype."""

Spec = jax.ShapeDtypeStruct

DIVISOR = 6720
"""Vectors are padded to a multiple of it, so that they can be cut into equal parts for 1 to 8 members, and for most
numbers up to 64, without being copied once more."""

WORTHWHILE = 100 * DIVISOR
"""Shorter vectors are not padded."""


def add(left: jax.Array, right: jax.Array) -> jax.Array:
    """One addition of the canonical tree; traceable.

    Of two numbers of 16 bits the sum is rounded to 16 bits at once. Left to itself XLA may keep more of them within a
    fused program, so that the result would depend on who adds what.
    """
    dtype = left.dtype
    if dtype.itemsize != 2 or not jnp.issubdtype(dtype, jnp.floating):
        return left + right
    about = jnp.finfo(dtype)
    total = left.astype(jnp.float32) + right.astype(jnp.float32)
    return jax.lax.reduce_precision(total, about.nexp, about.nmant).astype(dtype)


class Layout:
    """How partial sums lie in vectors, and what must hold of them.

    Args:
      leaves: shapes of the leaves, each [1, ...].
      checked: for each leaf, whether it must be finite. Integers always are.
      weight: number of the leaf that everything is divided by, a scalar that must not be zero; None if there is none.

    Attributes:
      leaves: as given.
      vectors: shapes of the vectors.
    """

    def __init__(
        self, leaves: Sequence[Spec], checked: Sequence[bool] | None = None, weight: int | None = None
    ) -> None:
        self.leaves = tuple(leaves)
        self._weight = weight
        self._checked = [
            chosen and jnp.issubdtype(leaf.dtype, jnp.inexact)
            for leaf, chosen in zip(leaves, checked or [False] * len(leaves), strict=True)
        ]
        dtypes = sorted({str(leaf.dtype) for leaf in leaves})
        # What is checked comes first, so that one number says where it ends.
        self._groups = [
            sorted((i for i, leaf in enumerate(leaves) if str(leaf.dtype) == name), key=lambda i: not self._checked[i])
            for name in dtypes
        ]
        sizes = [sum(math.prod(leaves[i].shape) for i in group) for group in self._groups]
        self._num_checked = [
            sum(math.prod(leaves[i].shape) for i in group if self._checked[i]) for group in self._groups
        ]
        self._padding = [-size % DIVISOR if size >= WORTHWHILE else 0 for size in sizes]
        self.vectors = tuple(
            Spec((1, size + padding), jnp.dtype(name))
            for name, size, padding in zip(dtypes, sizes, self._padding, strict=True)
        )

    @property
    def num_bytes(self) -> int:
        """Of all leaves."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves)

    def join(self, leaves: Sums) -> Vectors:
        """Traceable."""
        found = []
        for group, padding, spec in zip(self._groups, self._padding, self.vectors, strict=True):
            parts = [leaves[i].reshape(-1) for i in group]
            found.append(jnp.concatenate([*parts, jnp.zeros(padding, spec.dtype)] if padding else parts)[None])
        return tuple(found)

    def split(self, vectors: Vectors) -> Sums:
        """Traceable. The leaves lack the leading axis."""
        leaves: list[Any] = [None] * len(self.leaves)
        for group, vector in zip(self._groups, vectors, strict=True):
            start, flat = 0, vector.reshape(-1)
            for i in group:
                shape = self.leaves[i].shape[1:]
                size = math.prod(shape)
                leaves[i] = jax.lax.slice(flat, (start,), (start + size,)).reshape(shape)
                start += size
        return tuple(leaves)

    def is_finite(self, leaves: Sums) -> jax.Array:
        """Whether everything that must be is finite, as bool[]; traceable."""
        fine = jnp.bool_(True)
        for leaf, chosen in zip(leaves, self._checked, strict=True):
            if chosen:
                fine = fine & jnp.all(jnp.isfinite(leaf))
        return fine

    def part_is_finite(self, parts: Sequence[jax.Array], part: jax.Array | int, num_parts: int) -> jax.Array:
        """Whether everything that must be is finite in one of `num_parts` equal parts of each vector, as bool[];
        traceable.

        Args:
          parts: array[size] each; the last ones may be longer than the vector is.
          part: which one they are.
        """
        fine = jnp.bool_(True)
        for values, num_checked in zip(parts, self._num_checked, strict=True):
            if num_checked:
                inside = [min(max(num_checked - number * values.size, 0), values.size) for number in range(num_parts)]
                is_checked = jnp.arange(values.size, dtype=jnp.uint32) < jnp.array(inside, jnp.uint32)[part]
                fine = fine & jnp.all(jnp.isfinite(values) | ~is_checked)
        return fine

    def has_weight(self, vectors: Vectors) -> jax.Array:
        """Whether there is something to divide by, as bool[]; traceable."""
        return jnp.bool_(True) if self._weight is None else self.split(vectors)[self._weight] != 0
