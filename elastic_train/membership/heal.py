"""The state from donors to receivers: in stripes, every donor sending its share, all receivers at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from elastic_train.membership.packs import PACK_BYTES, Piece, packs
from elastic_train.state import Device, PyTree, as_bytes, from_bytes, from_stored, stored, stored_shape

STRIPE_BYTES = 64 << 20
"""What one donor sends at a time."""


class _Programs(NamedTuple):
    """One pack's programs: zeros[size], leaves -> bytes[size], a stripe out of them, one into them, and back."""

    size: int
    empty: Any
    join: Any
    take: Any
    place: Any
    split: Any


class Healer:
    """Compiled once for a state; only the all-gather depends on who the members are.

    Args:
      state: tree of arrays with the shapes and dtypes of the state.
      device: this worker's device.
      pack_bytes, stripe_bytes: what is sent together, and by one donor at a time.
    """

    def __init__(
        self, state: PyTree, device: Device, pack_bytes: int = PACK_BYTES, stripe_bytes: int = STRIPE_BYTES
    ) -> None:
        self._device = device
        leaves, self._treedef = jax.tree.flatten(state)
        self._leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        self._stored = [stored_shape(leaf) for leaf in self._leaves]
        sizes = [(math.prod(leaf.shape), leaf.dtype.itemsize) for leaf in self._stored]
        self._packs = packs(sizes, pack_bytes)
        self.stripe = min(stripe_bytes, max((self._num_bytes(pack) for pack in self._packs), default=1))
        self._moves: dict[int, tuple[Any, Any, Any]] = {}
        self._programs = [self._compile(pack) for pack in self._packs]
        self._whole = self._compile_wholes()

    def _is_whole(self, piece: Piece) -> bool:
        return (piece.start, piece.stop) == (0, math.prod(self._stored[piece.leaf].shape))

    def _num_bytes(self, pack: list[Piece]) -> int:
        return sum((piece.stop - piece.start) * self._stored[piece.leaf].dtype.itemsize for piece in pack)

    def _part(self, piece: Piece) -> jax.ShapeDtypeStruct:
        """What a piece becomes on a receiver: the leaf itself, or some of its elements."""
        leaf, held = self._leaves[piece.leaf], self._stored[piece.leaf]
        if self._is_whole(piece):
            return self._shape(leaf.shape, leaf.dtype)
        return self._shape((piece.stop - piece.start,), held.dtype)

    def _compile(self, pack: list[Piece]) -> _Programs:
        size = self._num_bytes(pack)
        padded = math.ceil(size / self.stripe) * self.stripe

        def join(*arrays: jax.Array) -> jax.Array:
            # A slice with bounds that are known now: they may lie beyond what an int32 index reaches.
            parts = [
                jax.lax.slice(stored(array).reshape(-1), (piece.start,), (piece.stop,))
                for piece, array in zip(pack, arrays, strict=True)
            ]
            return jnp.pad(jnp.concatenate([as_bytes(part) for part in parts]), (0, padded - size))

        def split(data: jax.Array) -> list[jax.Array]:
            parts, start = [], 0
            for piece in pack:
                num_bytes = self._num_bytes([piece])
                parts.append(from_bytes(data[start : start + num_bytes], self._part(piece)))
                start += num_bytes
            return parts

        empty, take, place = self._compile_moves(padded)
        leaves = [self._shape(self._leaves[piece.leaf].shape, self._leaves[piece.leaf].dtype) for piece in pack]
        return _Programs(
            padded,
            empty,
            jax.jit(join).lower(*leaves).compile(),
            take,
            place,
            jax.jit(split).lower(self._shape((padded,), jnp.uint8)).compile(),
        )

    def _compile_moves(self, padded: int) -> tuple[Any, Any, Any]:
        """The programs of a pack that depend on its size alone: empty, take and place."""
        if padded in self._moves:
            return self._moves[padded]

        def take(data: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(data, (start,), (self.stripe,))[None]

        def place(data: jax.Array, stripe: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(data, stripe, (start,))

        data = self._shape((padded,), jnp.uint8)
        stripe, start = self._shape((self.stripe,), jnp.uint8), self._shape((), jnp.int32)
        self._moves[padded] = (
            jax.jit(lambda: jnp.zeros((padded,), jnp.uint8), out_shardings=data.sharding).lower().compile(),
            jax.jit(take).lower(data, start).compile(),
            jax.jit(place, donate_argnums=0).lower(data, stripe, start).compile(),
        )
        return self._moves[padded]

    def _compile_wholes(self) -> dict[int, Any]:
        """For each leaf that is sent in pieces the program that puts them together."""
        pieces: dict[int, list[Piece]] = {}
        for piece in (piece for pack in self._packs for piece in pack if not self._is_whole(piece)):
            pieces.setdefault(piece.leaf, []).append(piece)

        def compiled(leaf: int) -> Any:
            def whole(*parts: jax.Array) -> jax.Array:
                return from_stored(jnp.concatenate(parts).reshape(self._stored[leaf].shape), self._leaves[leaf])

            return jax.jit(whole).lower(*map(self._part, pieces[leaf])).compile()

        return {leaf: compiled(leaf) for leaf in pieces}

    def _shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(self._device))

    def run(
        self,
        spread: Callable[[jax.Array], Sequence[jax.Array]],
        state: PyTree,
        donors: Sequence[int],
        rank: int,
        receives: bool,
    ) -> PyTree:
        """Returns the donors' state on a receiver, and `state` itself on everybody else. Blocks until done.

        All members call it, in one block; `spread` is theirs (`step.reduce.Spread`). A receiver's own arrays stay as
        they are until the caller drops them.
        """
        leaves = self._treedef.flatten_up_to(state)
        turn = donors.index(rank) if rank in donors else 0
        before: Sequence[jax.Array] = ()
        came: dict[int, list[jax.Array]] = {}
        for pack, programs in zip(self._packs, self._programs, strict=True):
            data = programs.join(*[leaves[piece.leaf] for piece in pack])
            healed = programs.empty() if receives else None
            for first in range(0, programs.size, self.stripe * len(donors)):
                start = min(first + turn * self.stripe, programs.size - self.stripe)
                rows = spread(programs.take(data, jax.device_put(np.int32(start), self._device)))
                # One stripe is under way while the next one is made ready; more would only take memory.
                jax.block_until_ready(before)
                before = rows
                for order, donor in enumerate(donors):
                    place = first + order * self.stripe
                    if healed is not None and place < programs.size:
                        healed = programs.place(healed, rows[donor], jax.device_put(np.int32(place), self._device))
            if healed is None:
                continue
            for piece, part in zip(pack, programs.split(healed), strict=True):
                if self._is_whole(piece):
                    leaves[piece.leaf] = part
                    continue
                came.setdefault(piece.leaf, []).append(part)
                if piece.stop == math.prod(self._stored[piece.leaf].shape):
                    leaves[piece.leaf] = self._whole[piece.leaf](*came.pop(piece.leaf))
        jax.block_until_ready(before)
        return jax.block_until_ready(jax.tree.unflatten(self._treedef, leaves))
