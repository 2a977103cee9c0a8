"""A worker's state across a change of generation: into the agent's memory, and out of it again."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from elastic_train.checkpoint.manifest import kind_of
from elastic_train.checkpoint.snapshot import Snapshot, arrays, leaf_kinds, with_values
from elastic_train.launch import carried
from elastic_train.state import Device, TrainState


@dataclass(frozen=True)
class Carried:
    """What one member knows besides the arrays.

    Attributes:
      step, samples: of the state.
      epoch: in which it was.
      records: JSON of the committed steps that the coordinator may not have on disk, oldest first.
      record: that of the newest step, while it is not finished.
      metrics: the newest ones.
      nonfinite: how often in a row the gradient was not finite.
    """

    step: int
    samples: int
    epoch: int
    records: Sequence[str] = ()
    record: dict[str, Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    nonfinite: int = 0


def leave_state(descriptor: int, state: TrainState, about: Carried) -> None:
    """Copies a state into the agent's memory. Until that is done, nothing counts there.

    Raises OSError: there is not enough memory.
    """
    carried.discard(descriptor)
    snapshot = Snapshot(state.arrays, descriptor, carried.HEADER_BYTES)
    snapshot.copy(state.arrays)
    carried.describe(descriptor, snapshot.num_bytes, {**asdict(about), "layout": snapshot.layout})


def take_state(descriptor: int, like: TrainState, device: Device) -> tuple[TrainState, Carried] | None:
    """The state that the last worker of this slot left; None if there is none, or one of another model. It stays there.

    Args:
      descriptor: the agent's memory.
      like: a state with the shapes and dtypes that are wanted.
      device: where to.
    """
    found = carried.description(descriptor)
    if found is None:
        return None
    layout = found.pop("layout")
    about = Carried(**found)
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ)
    try:
        named = {leaf.path: leaf for leaf in arrays(memory, layout)}
        kinds = {
            path: kind_of(leaf.random_key or leaf.array.dtype.name, leaf.array.shape) for path, leaf in named.items()
        }
        if kinds != leaf_kinds(like.arrays):
            return None
        with jax.default_device(device):
            values = {path: leaf.array for path, leaf in named.items()}
            # Copies: on the CPU an array may otherwise share this memory, which would be donated with it.
            tree = with_values(like.arrays, values, lambda array: jax.device_put(jnp.array(array, copy=True), device))
            jax.block_until_ready(tree)
        del named, values
    finally:
        with contextlib.suppress(BufferError):  # an array still looks at it; it goes with that
            memory.close()
    return TrainState(about.step, about.samples, **tree), about
