"""The state from donors to receivers: in stripes, every donor sending its share, all receivers at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from elastic_train.state import Device, PyTree, as_bytes, from_bytes

STRIPE_BYTES = 64 << 20
"""What one donor sends at a time."""

PACK_BYTES = 256 << 20
"""Leaves are copied into packs of about this size (or one larger leaf) while they are sent."""


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
    """

    def __init__(self, state: PyTree, device: Device) -> None:
        self._device = device
        self._leaves, self._treedef = jax.tree.flatten(state)
        self._leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self._leaves]
        self._packs = _packs([_num_bytes(leaf) for leaf in self._leaves])
        largest = max(sum(_num_bytes(self._leaves[i]) for i in pack) for pack in self._packs)
        self.stripe = min(STRIPE_BYTES, largest)
        self._programs = [self._compile(pack) for pack in self._packs]

    def _compile(self, pack: list[int]) -> _Programs:
        leaves = [self._leaves[i] for i in pack]
        size = sum(map(_num_bytes, leaves))
        padded = math.ceil(size / self.stripe) * self.stripe

        def join(*arrays: jax.Array) -> jax.Array:
            return jnp.pad(jnp.concatenate([as_bytes(array) for array in arrays]), (0, padded - size))

        def split(data: jax.Array) -> list[jax.Array]:
            arrays, start = [], 0
            for leaf in leaves:
                arrays.append(from_bytes(data[start : start + _num_bytes(leaf)], leaf))
                start += _num_bytes(leaf)
            return arrays

        def take(data: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(data, (start,), (self.stripe,))[None]

        def place(data: jax.Array, stripe: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(data, stripe, (start,))

        data = self._shape((padded,), jnp.uint8)
        stripe, start = self._shape((self.stripe,), jnp.uint8), self._shape((), jnp.int32)
        return _Programs(
            padded,
            jax.jit(lambda: jnp.zeros((padded,), jnp.uint8), out_shardings=data.sharding).lower().compile(),
            jax.jit(join).lower(*[self._shape(leaf.shape, leaf.dtype) for leaf in leaves]).compile(),
            jax.jit(take).lower(data, start).compile(),
            jax.jit(place, donate_argnums=0).lower(data, stripe, start).compile(),
            jax.jit(split).lower(data).compile(),
        )

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
        for pack, programs in zip(self._packs, self._programs, strict=True):
            data = programs.join(*[leaves[i] for i in pack])
            healed = programs.empty() if receives else None
            for first in range(0, programs.size, self.stripe * len(donors)):
                start = min(first + turn * self.stripe, programs.size - self.stripe)
                rows = spread(programs.take(data, jax.device_put(np.int32(start), self._device)))
                for order, donor in enumerate(donors):
                    place = first + order * self.stripe
                    if healed is not None and place < programs.size:
                        healed = programs.place(healed, rows[donor], jax.device_put(np.int32(place), self._device))
            if healed is not None:
                for i, leaf in zip(pack, programs.split(healed), strict=True):
                    leaves[i] = leaf
        return jax.block_until_ready(jax.tree.unflatten(self._treedef, leaves))


def _num_bytes(leaf: Any) -> int:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _packs(sizes: Sequence[int]) -> list[list[int]]:
    packs: list[list[int]] = []
    filled = 0
    for number, size in enumerate(sizes):
        if not packs or filled + size > PACK_BYTES:
            packs.append([])
            filled = 0
        packs[-1].append(number)
        filled += size
    return packs
