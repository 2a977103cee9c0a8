"""One process of the second example of JAX's guide to fault tolerance, adapted to a recipe's model.

Started by `seed_fault.py`, which says what was changed. Writes one line per attempt at a step.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import live_devices
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from loops import AXIS, Model, connect, parser_of_process, replicated

from elastic_train.launch.bond import die_with_parent


def main() -> None:
    parser = parser_of_process(__doc__)
    parser.add_argument("--lines", type=Path, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    connect(arguments, tolerant=True)
    model = Model(arguments)
    state, step = model.state, 0
    devices: Sequence[Any] = ()
    program = jax.jit(model.step)
    with arguments.lines.open("a", buffering=1) as lines:
        while True:
            about: dict[str, Any] = {"began": time.time(), "error": None}
            try:
                with live_devices(jax.devices()) as devices:
                    # Its entry takes the answer of the exit before, so what began before is the first entry only.
                    state, step = level(state, step, devices, about)
                    mesh = Mesh(np.array(devices, dtype=object), (AXIS,))
                    inputs = jax.tree.map(partial(replicated, mesh=mesh), state)
                    split = NamedSharding(mesh, P(AXIS))
                    rows = model.rows(step, jax.process_index())
                    batch = jax.tree.map(partial(jax.make_array_from_process_local_data, split), rows)
                    *after, loss = jax.block_until_ready(program(*inputs, batch, np.uint32(step)))
            except Exception as error:
                about["error"] = f"{type(error).__name__}: {error}"[:200]
            else:
                float(loss)
                state, step = tuple(after), step + 1
            about |= {"ended": time.time(), "step": step, "devices": len(devices)}
            lines.write(json.dumps(about) + "\n")


def level(state: Any, step: int, devices: Sequence[Any], about: dict[str, Any]) -> tuple[Any, int]:
    """Process 0 sends state and step to those whose step is another; when that was done goes into `about`."""
    steps = allgather(step, devices)
    about["met"] = time.time()
    me = jax.process_index()
    for device, other in zip(devices, steps, strict=True):
        if other != steps[0] and me in (devices[0].process_index, device.process_index):
            pair = [devices[0], device]
            state = jax.tree.map(partial(hand_over, pair=pair, sends=me == pair[0].process_index), state)
    about["healed"] = time.time()
    return state, int(steps[0])


def allgather(value: int, devices: Sequence[Any]) -> list[int]:
    """Everybody's value, in the order of the devices."""
    mesh = Mesh(np.array(devices, dtype=object), (AXIS,))
    mine = jax.device_put(np.array([value], np.int32), jax.local_devices()[0])
    values = jax.make_array_from_single_device_arrays((len(devices),), NamedSharding(mesh, P(AXIS)), [mine])
    return np.asarray(jax.block_until_ready(gather_over(mesh)(values)).addressable_data(0)).tolist()


def hand_over(array: jax.Array, pair: Sequence[Any], sends: bool) -> jax.Array:
    """The sender's array, on both: a sum to which the receiver brings zeros. Random keys need not be sent."""
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    mesh = Mesh(np.array(pair, dtype=object), (AXIS,))
    local = array.addressable_data(0)
    return jax.block_until_ready(sum_over(mesh)(replicated(local if sends else jnp.zeros_like(local), mesh)))


# Kept for each mesh. The guide makes a new function at every call, which is compiled each time.


@functools.cache
def gather_over(mesh: Mesh) -> Any:
    def gather(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, AXIS, tiled=True)

    return jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False))


@functools.cache
def sum_over(mesh: Mesh) -> Any:
    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, AXIS)

    return jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


if __name__ == "__main__":
    main()
