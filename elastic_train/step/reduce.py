"""The exchange: the only program that crosses workers, built anew for every member list.

Each member brings partial sums (the maximal subtrees of the canonical tree inside its run of shards) and its
control vector. An all-to-all gives each member its 1/n slice of every partial, it finishes the tree on that
slice, and an all-gather returns the result. The order of additions is that of the one tree on all shards,
whatever n is. Padding is moved but never added.

A collective that is broken off need not raise: where NCCL goes over a network, the program ends as if all were well,
with whatever was in the memory for its results. So all that the host reads is sealed: `DamagedError`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from elastic_train.membership.group import FINITE_BIT, FLAGS_WORD, MARKS_START, MARKS_STOP, VOTE_SIZE, signed
from elastic_train.state import Device
from elastic_train.step.flat import LARGE_BYTES, Cut, Layout, Sums, add
from elastic_train.step.plan import Plan

AXIS = "members"


class DamagedError(Exception):
    """What came out of a collective is not what the members have sent in this block."""


def seal(row: Sequence[int], block: tuple[int, int]) -> int:
    """A checksum of int32 numbers that holds in one block only: another one may have left its rows in the memory."""
    return signed(zlib.crc32(struct.pack(f"<{len(row)}i2q", *row, *block)))


def _unsealed(rows: np.ndarray, sealed: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """int32[members, size + 1] -> int32[members, size]. Raises DamagedError if a seal, the last number, is not that of
    the row in `sealed`, int32[members, size]."""
    if any(seal(numbers, block) != told for numbers, told in zip(sealed.tolist(), rows[:, -1].tolist(), strict=True)):
        raise DamagedError("a collective was broken off: what arrived is not what the members have sent")
    return rows[:, :-1]


class Meeting:
    """A mesh with one device per member, and this worker's place in it.

    Args:
      devices: one device per member, in the view's order.
      mine: this worker's device.

    Attributes:
      block: epoch, and number in it, of the `live_devices` block that is run.
    """

    def __init__(self, devices: Sequence[Device], mine: Device) -> None:
        self.size = len(devices)
        self.mine = mine
        self.block: tuple[int, int] = (0, 0)
        self._mesh = Mesh(np.array(devices, dtype=object), (AXIS,))
        self._split = NamedSharding(self._mesh, P(AXIS))

    def program(self, body: Any, *shapes: Any) -> Any:
        """Compiles `body`, which sees each argument with a leading axis of 1 and returns replicated values."""
        mapped = jax.shard_map(body, mesh=self._mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False)
        specs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.size, *x.shape[1:]), x.dtype, sharding=self._split), shapes
        )
        return jax.jit(mapped).lower(*specs).compile()

    def mine_of_all(self, tree: Any) -> Any:
        """Local arrays [1, ...] as this member's rows of arrays [members, ...]; moves nothing."""

        def wrap(array: jax.Array) -> jax.Array:
            shape = (self.size, *array.shape[1:])
            return jax.make_array_from_single_device_arrays(shape, self._split, [array])

        return jax.tree.map(wrap, tree)

    def local(self, tree: Any) -> Any:
        """Replicated results as arrays of this worker alone."""
        return jax.tree.map(lambda array: array.addressable_data(0), tree)

    def put(self, array: np.ndarray) -> jax.Array:
        """A host array as this member's row."""
        return jax.device_put(array[None], self.mine)


class Gather:
    """All-gather of one small row of int32 per member."""

    def __init__(self, meeting: Meeting, width: int) -> None:
        self._meeting = meeting
        shape = jax.ShapeDtypeStruct((1, width + 1), jnp.int32)
        self._program = meeting.program(lambda row: jax.lax.all_gather(row[0], AXIS), shape)

    def __call__(self, row: Sequence[int]) -> np.ndarray:
        """Returns int32[members, width]. Blocks until all have taken part. Raises DamagedError."""
        block = self._meeting.block
        mine = self._meeting.put(np.array([*row, seal(row, block)], np.int32))
        rows = self._program(self._meeting.mine_of_all(mine))
        told = np.asarray(self._meeting.local(jax.block_until_ready(rows)))
        return _unsealed(told, told[:, :-1], block)


class Spread:
    """All-gather of one stripe of bytes per member; used to hand the state to those who lack it."""

    def __init__(self, meeting: Meeting, stripe: int) -> None:
        self._meeting = meeting

        def body(mine: jax.Array) -> tuple[jax.Array, ...]:
            rows = jax.lax.all_gather(mine[0], AXIS)
            return tuple(rows[member] for member in range(meeting.size))

        self._program = meeting.program(body, jax.ShapeDtypeStruct((1, stripe), jnp.uint8))

    def __call__(self, mine: jax.Array) -> tuple[jax.Array, ...]:
        """uint8[1, stripe] -> one uint8[stripe] per member, which need not be there yet."""
        return self._meeting.local(self._program(self._meeting.mine_of_all(mine)))


class Exchange:
    """Sum of all shards over the canonical tree, whether it is finite, and everybody's control vector.

    Args:
      meeting: the members' devices.
      plan: who holds which partial sum, and the additions that are left.
      layout: of one partial sum.
      large_bytes: leaves of this size are sent by themselves.
      rides: whether control vectors travel with a part of the sum. By default so on CPUs, where each message waits for
        a core, and what is broken off raises.
    """

    def __init__(
        self, meeting: Meeting, plan: Plan, layout: Layout, large_bytes: int = LARGE_BYTES, rides: bool | None = None
    ) -> None:
        self._meeting, self._plan, self._layout = meeting, plan, layout
        self._rides = meeting.mine.platform == "cpu" if rides is None else rides
        self._cut = Cut(layout, meeting.size, large_bytes)
        vote = jax.ShapeDtypeStruct((1, VOTE_SIZE + 1), jnp.int32)
        marks = jax.ShapeDtypeStruct((1, MARKS_STOP - MARKS_START), jnp.int32)
        self._program = meeting.program(self._body, (layout.leaves,) * plan.slots_per_member, vote, marks)

    def __call__(self, partials: Sequence[Sums], vote: Sequence[int], marks: jax.Array) -> tuple[Sums, jax.Array]:
        """The total and the control vectors, neither of which is there yet: see `wait`. With one member the total are
        the very arrays that it brought.

        Args:
          partials: this member's partial sums, which may not be there yet either.
          vote: its control vector, as the host knows it.
          marks: int32[1, 4] on the device, for the place that `group.MARKS_START` names.
        """
        # Members with fewer partials than the widest repeat one; the plan never reads it.
        padded = tuple(partials) + (partials[0],) * (self._plan.slots_per_member - len(partials))
        sealed = [*vote, seal(_fixed(np.array(vote, np.int32)).tolist(), self._meeting.block)]
        mine = (padded, self._meeting.put(np.array(sealed, np.int32)), marks)
        total, votes = self._meeting.local(self._program(*self._meeting.mine_of_all(mine)))
        votes.copy_to_host_async()
        return total or partials[0], votes

    def wait(self, votes: jax.Array) -> np.ndarray:
        """int32[members, VOTE_SIZE] of what `__call__` gave. Blocks until all have taken part. Raises DamagedError; if
        not, the total is what it should be, too."""
        told = np.asarray(votes)[:, : VOTE_SIZE + 1]
        return _unsealed(told, _fixed(told[:, :-1]), self._meeting.block)

    def _body(self, partials: tuple[Sums, ...], vote: jax.Array, marks: jax.Array) -> tuple[Sums, jax.Array]:
        if self._meeting.size == 1:
            whole, fine = partials[0], self._layout.is_finite(partials[0])
            total, rows = (), self._row(vote, marks, fine)[None]  # a program's result would be a copy
        else:
            parts = self.parts(partials)
            fine = self._cut.part_is_finite(parts, jax.lax.axis_index(AXIS))
            whole, rows = self.gathered(parts, self._row(vote, marks, fine))
            total = whole
        # All members see the same, so all clear the same bit.
        usable = jnp.all(rows[:, VOTE_SIZE + 1]) & self._layout.has_weight(whole)
        flags = rows[:, FLAGS_WORD]
        return total, rows.at[:, FLAGS_WORD].set(jnp.where(usable, flags, flags & ~FINITE_BIT))

    def _row(self, vote: jax.Array, marks: jax.Array, fine: jax.Array) -> jax.Array:
        """int32[VOTE_SIZE + 2]: a control vector, its seal, and whether this member's part of the sum is finite."""
        return jnp.concatenate([vote[0, :MARKS_START], marks[0], vote[0, MARKS_STOP:], fine.astype(jnp.int32)[None]])

    def parts(self, partials: tuple[Sums, ...]) -> list[jax.Array]:
        """This member's part of the sum of each piece, array[size]; traceable."""
        pieces = zip(*(self._cut.pieces(leaves) for leaves in partials), strict=True)
        return [self._sum_part(jnp.stack(piece)) for piece in pieces]

    def gathered(self, parts: Sequence[jax.Array], row: jax.Array) -> tuple[Sums, jax.Array]:
        """The whole sum, and int32[members, size or more] from the `row` of each member, int32[size]; traceable.

        Rows come last. A number in them is made of all the rest, so no compiler can send them before it, and whoever
        has them as they were sent has the sum: if one collective is broken off, those after it are as well. But where
        that raises they travel with the smallest part whose elements are of their width: a message of their own takes
        nearly as long as that part.
        """
        fitting = [number for number, part in enumerate(parts) if part.dtype.itemsize == row.dtype.itemsize]
        carrier = min(fitting, key=lambda number: parts[number].size, default=None) if self._rides else None
        whole = [jax.lax.all_gather(part, AXIS, tiled=True) if i != carrier else part for i, part in enumerate(parts)]
        if carrier is None:
            seen = sum((array[0] != 0).astype(row.dtype) for array in whole)
            return self._cut.leaves(whole), jax.lax.all_gather(jnp.append(row, seen), AXIS)
        part = parts[carrier]
        both = jax.lax.all_gather(jnp.concatenate([jax.lax.bitcast_convert_type(part, row.dtype), row]), AXIS)
        whole[carrier] = jax.lax.bitcast_convert_type(both[:, : part.size].reshape(-1), part.dtype)
        return self._cut.leaves(whole), both[:, part.size :]

    def _sum_part(self, mine: jax.Array) -> jax.Array:
        """array[partials, members, size] -> array[size]: this member's part of the sum of a piece."""
        # The middle axis is the receiver before and the sender after.
        received = jax.lax.all_to_all(mine, AXIS, split_axis=1, concat_axis=1, tiled=True)
        registers = [received[index, member] for member in range(mine.shape[1]) for index in range(mine.shape[0])]
        for left, right, _ in self._plan.additions:
            registers.append(add(registers[left], registers[right]))
        return registers[self._plan.root]


def _fixed(votes: np.ndarray) -> np.ndarray:
    """Control vectors, int32[..., VOTE_SIZE], without what devices write into them."""
    votes = votes.copy()
    votes[..., MARKS_START:MARKS_STOP] = 0
    votes[..., FLAGS_WORD] &= ~FINITE_BIT
    return votes
