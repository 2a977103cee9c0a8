"""The exchange: the only program that crosses workers, built anew for every member list.

Each member brings partial sums (the maximal subtrees of the canonical tree inside its run of shards) and its
control vector. An all-to-all gives each member its 1/n slice of every partial, it finishes the tree on that
slice, and an all-gather returns the result. The order of additions is that of the one tree on all shards,
whatever n is. Padding is moved but never added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from elastic_train.membership.group import FINITE_BIT, FLAGS_WORD, MARKS_START, MARKS_STOP, VOTE_SIZE
from elastic_train.state import Device
from elastic_train.step.flat import Checks, Flats, is_finite
from elastic_train.step.plan import Plan

AXIS = "members"


class Meeting:
    """A mesh with one device per member, and this worker's place in it.

    Args:
      devices: one device per member, in the view's order.
      mine: this worker's device.
    """

    def __init__(self, devices: Sequence[Device], mine: Device) -> None:
        self.size = len(devices)
        self.mine = mine
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
        shape = jax.ShapeDtypeStruct((1, width), jnp.int32)
        self._program = meeting.program(lambda row: jax.lax.all_gather(row[0], AXIS), shape)

    def __call__(self, row: Sequence[int]) -> np.ndarray:
        """Returns int32[members, width]. Blocks until all have taken part."""
        mine = self._meeting.put(np.array(row, np.int32))
        rows = self._program(self._meeting.mine_of_all(mine))
        return np.asarray(self._meeting.local(jax.block_until_ready(rows)))


class Spread:
    """All-gather of one stripe of bytes per member; used to hand the state to those who lack it."""

    def __init__(self, meeting: Meeting, stripe: int) -> None:
        self._meeting = meeting

        def body(mine: jax.Array) -> tuple[jax.Array, ...]:
            rows = jax.lax.all_gather(mine[0], AXIS)
            return tuple(rows[member] for member in range(meeting.size))

        self._program = meeting.program(body, jax.ShapeDtypeStruct((1, stripe), jnp.uint8))

    def __call__(self, mine: jax.Array) -> tuple[jax.Array, ...]:
        """uint8[1, stripe] -> one uint8[stripe] per member. Blocks until all have taken part."""
        rows = self._program(self._meeting.mine_of_all(mine))
        return self._meeting.local(jax.block_until_ready(rows))


class Exchange:
    """Sum of all shards over the canonical tree, whether it is finite, and everybody's control vector.

    Args:
      meeting: the members' devices.
      plan: who holds which partial sum, and the additions that are left.
      specs: shapes of one partial sum, array[1, size] per dtype.
      checks: which entries of the sum must be finite.
    """

    def __init__(self, meeting: Meeting, plan: Plan, specs: tuple[jax.ShapeDtypeStruct, ...], checks: Checks) -> None:
        self._meeting, self._plan, self._specs, self._checks = meeting, plan, specs, checks
        vote = jax.ShapeDtypeStruct((1, VOTE_SIZE), jnp.int32)
        marks = jax.ShapeDtypeStruct((1, MARKS_STOP - MARKS_START), jnp.int32)
        self._program = meeting.program(self._body, (specs,) * plan.slots_per_member, vote, marks)

    def __call__(self, partials: Sequence[Flats], vote: Sequence[int], marks: jax.Array) -> tuple[Flats, np.ndarray]:
        """Returns the total and int32[members, VOTE_SIZE]. Blocks until all have taken part.

        Args:
          partials: this member's partial sums.
          vote: its control vector, as the host knows it.
          marks: int32[1, 4] on the device, for the place that `group.MARKS_START` names.
        """
        # Members with fewer partials than the widest repeat one; the plan never reads it.
        padded = tuple(partials) + (partials[0],) * (self._plan.slots_per_member - len(partials))
        mine = (padded, self._meeting.put(np.array(vote, np.int32)), marks)
        total, votes = jax.block_until_ready(self._program(*self._meeting.mine_of_all(mine)))
        return self._meeting.local(total), np.asarray(self._meeting.local(votes))

    def _body(self, partials: tuple[Flats, ...], vote: jax.Array, marks: jax.Array) -> tuple[Flats, jax.Array]:
        total = tuple(self._sum([flats[i] for flats in partials]) for i in range(len(self._specs)))
        row = jnp.concatenate([vote[0, :MARKS_START], marks[0], vote[0, MARKS_STOP:]])
        rows = jax.lax.all_gather(row, AXIS)
        # All members hold the same total, so all clear the same bit.
        usable = is_finite(total, self._checks) & self._checks.has_weight(total)
        flags = rows[:, FLAGS_WORD]
        return total, rows.at[:, FLAGS_WORD].set(jnp.where(usable, flags, flags & ~FINITE_BIT))

    def _sum(self, partials: list[jax.Array]) -> jax.Array:
        members = self._meeting.size
        if members == 1:
            return partials[0]
        size = partials[0].shape[1]
        slice_size = -(-size // members)
        padded = [jnp.pad(x[0], (0, slice_size * members - size)).reshape(members, slice_size) for x in partials]
        # [partials, members, slice]: the middle axis is the receiver before and the sender after.
        received = jax.lax.all_to_all(jnp.stack(padded), AXIS, split_axis=1, concat_axis=1, tiled=True)
        registers = [received[index, member] for member in range(members) for index in range(len(partials))]
        for left, right, _ in self._plan.additions:
            registers.append(registers[left] + registers[right])
        root = registers[self._plan.root]
        return jax.lax.all_gather(root, AXIS, tiled=True)[None, :size]
