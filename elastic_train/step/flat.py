"""Partial sums as tuples of arrays, and the pieces into which the exchange cuts them.

A large leaf is an array of its own: as output of a worker's program it costs neither a copy nor memory, and it is sent
as it is. Small ones are strung together where they are computed (`Packing`): each array takes the host some 50 us in
every step, and each makes every exchange longer to compile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
Sums = tuple[jax.Array, ...]
"""Arrays, each [1, ...]. The leading axis is the members' axis in the exchange."""

Spec = jax.ShapeDtypeStruct

LARGE_BYTES = 16 * 2**20
"""A leaf of this size is sent by itself: a message of its own takes less time than copying it twice."""


def add(left: jax.Array, right: jax.Array) -> jax.Array:
    """One addition of the canonical tree; traceable.

    Of two numbers of 16 bits the sum is rounded to 16 bits at once. Left to itself XLA may keep more of them within a
    fused program, so that the result would depend on who adds what.
    """
    dtype = left.dtype
    if dtype.itemsize != 2 or not jnp.issubdtype(dtype, jnp.floating):
        return left + right
    total = left.astype(jnp.float32) + right.astype(jnp.float32)
    if dtype != jnp.bfloat16:  # rounding to the width of float16 would lose its smallest numbers
        return jax.lax.optimization_barrier(total.astype(dtype))
    return jax.lax.reduce_precision(total, 8, 7).astype(dtype)


class Layout:
    """The arrays of a partial sum, or its leaves, and what must hold of them.

    Args:
      leaves: shapes of the leaves, each [1, ...].
      checked: for each leaf, whether it must be finite. Integers always are.
      weight: number of the leaf that everything is divided by, a scalar that must not be zero; None if there is none.

    Attributes:
      leaves, weight: as given.
      checked: for each leaf, whether it can and must be looked at.
    """

    def __init__(
        self, leaves: Sequence[Spec], checked: Sequence[bool] | None = None, weight: int | None = None
    ) -> None:
        self.leaves = tuple(leaves)
        self.weight = weight
        self.checked = tuple(
            chosen and jnp.issubdtype(leaf.dtype, jnp.inexact)
            for leaf, chosen in zip(leaves, checked or [False] * len(leaves), strict=True)
        )

    @property
    def num_bytes(self) -> int:
        """Of all leaves."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves)

    def is_finite(self, leaves: Sums) -> jax.Array:
        """Whether everything that must be is finite, as bool[]; traceable."""
        fine = jnp.bool_(True)
        for leaf, is_checked in zip(leaves, self.checked, strict=True):
            if is_checked:
                fine = fine & jnp.all(jnp.isfinite(leaf))
        return fine

    def has_weight(self, leaves: Sums) -> jax.Array:
        """Whether there is something to divide by, as bool[]; traceable."""
        return jnp.bool_(True) if self.weight is None else leaves[self.weight].reshape(()) != 0


class Packing:
    """The leaves of a partial sum as few arrays. Large ones stay as they are, and so does the weight; small ones of the
    same dtype are strung together, those that must be finite apart from the others.

    Args:
      layout: of the leaves.
      large_bytes: see `LARGE_BYTES`.

    Attributes:
      packed: layout of the arrays.
      places: for each leaf, which array it is in, and where it begins there.
    """

    def __init__(self, layout: Layout, large_bytes: int = LARGE_BYTES) -> None:
        self._leaves = layout.leaves
        self._sizes = [math.prod(leaf.shape) for leaf in layout.leaves]
        self._groups: list[list[int]] = []
        strings: dict[tuple[str, bool], list[int]] = {}
        for i, leaf in enumerate(layout.leaves):
            if self._sizes[i] * leaf.dtype.itemsize >= large_bytes or i == layout.weight:
                self._groups.append([i])
            else:
                strings.setdefault((str(leaf.dtype), layout.checked[i]), []).append(i)
        self._groups += [strings[key] for key in sorted(strings)]
        self.places = {
            i: (number, start) for number, group in enumerate(self._groups) for i, start in _placed(group, self._sizes)
        }
        arrays = [
            layout.leaves[group[0]]
            if len(group) == 1
            else Spec((1, sum(self._sizes[i] for i in group)), layout.leaves[group[0]].dtype)
            for group in self._groups
        ]
        weight = None if layout.weight is None else self.places[layout.weight][0]
        self.packed = Layout(arrays, [layout.checked[group[0]] for group in self._groups], weight)

    def pack(self, leaves: Sums) -> Sums:
        """The arrays of leaves [1, ...]; traceable."""
        return tuple(
            leaves[group[0]] if len(group) == 1 else jnp.concatenate([leaves[i].reshape(1, -1) for i in group], axis=1)
            for group in self._groups
        )

    def leaf(self, i: int, array: jax.Array) -> jax.Array:
        """Leaf `i`, [1, ...], out of the array that it is in; traceable."""
        number, start = self.places[i]
        if len(self._groups[number]) == 1:
            return array
        return jax.lax.slice(array, (0, start), (1, start + self._sizes[i])).reshape(self._leaves[i].shape)

    def unpack(self, arrays: Sums) -> Sums:
        """Inverse of `pack`; traceable."""
        return tuple(self.leaf(i, arrays[self.places[i][0]]) for i in range(len(self._leaves)))


class Cut:
    """A partial sum in pieces, each of which is cut into equal parts, one for each member.

    A large array is a piece, if it can be cut evenly. The others are strung together, one piece for each dtype, and
    padded with zeros. `Packing` leaves several of a dtype: what must be finite, what need not, the weight, and large
    ones that cannot be cut evenly. Fewer pieces are fewer messages.

    Args:
      layout: of a partial sum.
      num_parts: the number of members.
      large_bytes: see `LARGE_BYTES`.
    """

    def __init__(self, layout: Layout, num_parts: int, large_bytes: int = LARGE_BYTES) -> None:
        self._layout, self._num_parts = layout, num_parts
        self._sizes = [math.prod(leaf.shape) for leaf in layout.leaves]
        large: list[list[int]] = []
        strings: dict[str, list[int]] = {}
        for i, (leaf, size) in enumerate(zip(layout.leaves, self._sizes, strict=True)):
            if size * leaf.dtype.itemsize >= large_bytes and size % num_parts == 0:
                large.append([i])
            elif size:
                strings.setdefault(str(leaf.dtype), []).append(i)
        # What is checked comes first, so that one number says where it ends.
        self._pieces = large + [sorted(strings[name], key=lambda i: not layout.checked[i]) for name in sorted(strings)]

    def pieces(self, leaves: Sums) -> list[jax.Array]:
        """array[parts, size] each; traceable."""
        found = []
        for piece in self._pieces:
            vectors = [leaves[i].reshape(-1) for i in piece]
            padding = -sum(self._sizes[i] for i in piece) % self._num_parts
            if padding:
                vectors.append(jnp.zeros(padding, vectors[0].dtype))
            joined = jnp.concatenate(vectors) if len(vectors) > 1 else vectors[0]
            found.append(joined.reshape(self._num_parts, -1))
        return found

    def leaves(self, pieces: Sequence[jax.Array]) -> Sums:
        """The leaves from whole pieces, array[parts * size] each; traceable."""
        # Those without elements are in no piece.
        found: list[Any] = [
            None if math.prod(leaf.shape) else jnp.zeros(leaf.shape, leaf.dtype) for leaf in self._layout.leaves
        ]
        for piece, vector in zip(self._pieces, pieces, strict=True):
            for i, start in _placed(piece, self._sizes):
                values = jax.lax.slice(vector, (start,), (start + self._sizes[i],))
                found[i] = values.reshape(self._layout.leaves[i].shape)
        return tuple(found)

    def part_is_finite(self, parts: Sequence[jax.Array], number: jax.Array | int) -> jax.Array:
        """Whether everything that must be is finite in one part of each piece, as bool[]; traceable.

        Args:
          parts: array[size] each.
          number: which part they are.
        """
        fine = jnp.bool_(True)
        for piece, part in zip(self._pieces, parts, strict=True):
            num_checked = sum(self._sizes[i] for i in piece if self._layout.checked[i])
            if num_checked:
                inside = [min(max(num_checked - start * part.size, 0), part.size) for start in range(self._num_parts)]
                is_checked = jnp.arange(part.size, dtype=jnp.uint32) < jnp.array(inside, jnp.uint32)[number]
                fine = fine & jnp.all(jnp.isfinite(part) | ~is_checked)
        return fine


def _placed(group: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The leaves of a group, and where each begins when they are strung together; `sizes` are those of all leaves."""
    ends = itertools.accumulate(sizes[i] for i in group)
    return [(i, end - sizes[i]) for i, end in zip(group, ends, strict=True)]
