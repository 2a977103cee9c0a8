"""One process of a training without elastic_train: the plain loop, and the loop of JAX's guide to fault tolerance.

Model, loss, optimizer and samples are a recipe's. Started by `step_time.py` and `seed_fault.py`.

- plain: one `jit` over all devices with the state donated; the loss is read after every step.
- plain_late: the same, the loss is read one step late, so that a step is queued while the one before runs.
- seed: as in the guide's first example, the whole step in `live_devices`, with nothing donated.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from report import add_recipe
from turns import END, Turns, memory

from elastic_train.config_files import resolve
from elastic_train.data.sampler import Sampler
from elastic_train.data.source import read
from elastic_train.launch.bond import die_with_parent
from elastic_train.launch.recipe import config_class_of, load_recipe

AXIS = "data"


def main() -> None:
    parser = parser_of_process(__doc__)
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument("--turns", type=Path, required=True)
    parser.add_argument("--block", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    tolerant = "seed" in arguments.variants
    connect(arguments, tolerant)
    model = Model(arguments)
    loop = SeedLoop(model) if tolerant else PlainLoop(model)
    turns = Turns(arguments.turns, arguments.rank)
    while (turn := turns.wait(*arguments.variants)).name != END:
        times = loop.steps(arguments.block, late=turn.name == "plain_late")
        turns.done(turn, {"step_time_s": times, **memory()})
    os._exit(0)  # whoever leaves JAX in order waits for the others


def parser_of_process(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe(parser)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--num", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="ends with this process")
    return parser


def connect(arguments: argparse.Namespace, tolerant: bool) -> None:
    """Connects this process with the others; the one of rank 0 holds the coordination service."""
    if tolerant:
        jax.config.update("jax_enable_recoverability", True)
    elif arguments.num == 1:
        return
    jax.distributed.initialize(
        f"127.0.0.1:{arguments.port}", arguments.num, arguments.rank, heartbeat_timeout_seconds=10
    )


class Model:
    """A recipe's parts as a plain program needs them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        trainer_class = load_recipe(arguments.recipe)
        config = resolve(config_class_of(trainer_class), arguments.config, arguments.set)
        self.trainer = trainer = trainer_class(config)
        self.batch_size, self.num = config.batch_size, arguments.num
        if self.batch_size % self.num:
            raise SystemExit(f"batch_size {self.batch_size} must be a multiple of {self.num} workers")
        model = trainer.model(nnx.Rngs(config.seed))
        self._graph, params, rest = nnx.split(model, nnx.Param, ...)
        self._transform = trainer.optimizer()
        self._key = jax.random.key(config.seed)
        self.state: Any = (params, rest, jax.jit(self._transform.init)(params))
        self._source = trainer.train_data()
        self._sampler = Sampler(len(self._source), self.batch_size, self.num, config.seed)

    def rows(self, step: int, part: int) -> dict[str, np.ndarray]:
        """One of `num` equal parts of a step's batch, as arrays [rows, ...]: the samples of elastic_train's shards."""
        ids, _ = self._sampler.shard_ids(step * self.batch_size, part)
        return read(self._source, ids)

    def step(self, params: Any, rest: Any, opt_state: Any, batch: Any, number: Any) -> tuple[Any, Any, Any, jax.Array]:
        """The state after a step, and the mean loss."""
        key = jax.random.fold_in(self._key, number)

        def mean_loss(params: Any) -> tuple[jax.Array, Any]:
            model = nnx.merge(self._graph, params, rest)
            model.train()
            losses = self.trainer.loss(model, batch, nnx.Rngs(key))
            losses = losses[0] if isinstance(losses, tuple) else losses
            return jnp.mean(losses), nnx.split(model, nnx.Param, ...)[2]

        (loss, rest), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
        updates, opt_state = self._transform.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), rest, opt_state, loss


class Ahead:
    """Reads this process's samples of the next step while the present one is computed."""

    def __init__(self, model: Model, part: int) -> None:
        self._read = partial(model.rows, part=part)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._next = self._pool.submit(self._read, 0)

    def take(self, step: int) -> dict[str, np.ndarray]:
        rows = self._next.result()
        self._next = self._pool.submit(self._read, step + 1)
        return rows


class PlainLoop:
    """`jit` over the mesh of all devices, donated."""

    def __init__(self, model: Model) -> None:
        self._mesh = Mesh(np.array(jax.devices(), dtype=object), (AXIS,))
        whole, self._split = NamedSharding(self._mesh, P()), NamedSharding(self._mesh, P(AXIS))
        self._state = jax.tree.map(partial(replicated, mesh=self._mesh), model.state)
        model.state = None
        self._program = jax.jit(model.step, donate_argnums=(0, 1, 2), out_shardings=whole)
        self._ahead = Ahead(model, jax.process_index())
        self._number = 0

    def steps(self, num: int, late: bool) -> list[float]:
        """So many steps; the seconds from the end of each to the end of the next."""
        ends, waiting = [], []
        for _ in range(num):
            waiting.append(self._dispatch())
            if not late or len(waiting) > 1:
                float(waiting.pop(0))
            ends.append(time.perf_counter())
        jax.block_until_ready(self._state)
        return list(np.diff(ends))

    def _dispatch(self) -> jax.Array:
        rows = self._ahead.take(self._number)
        batch = jax.tree.map(lambda x: jax.make_array_from_process_local_data(self._split, x), rows)
        *state, loss = self._program(*self._state, batch, np.uint32(self._number))
        self._state, self._number = tuple(state), self._number + 1
        return loss


class SeedLoop:
    """The guide's loop: arrays are laid out anew over the live devices of each step, which runs in their block."""

    def __init__(self, model: Model) -> None:
        self._state: Any = model.state
        model.state = None
        self._program = jax.jit(model.step)
        self._ahead = Ahead(model, jax.process_index())
        self._number = 0

    def steps(self, num: int, late: bool = False) -> list[float]:
        """As `PlainLoop.steps`. Raises what a step raises."""
        ends = []
        for _ in range(num):
            self._step()
            ends.append(time.perf_counter())
        return list(np.diff(ends))

    def _step(self) -> None:
        from jax.experimental.multihost_utils import live_devices

        with live_devices(jax.devices()) as devices:
            mesh = Mesh(np.array(devices, dtype=object), (AXIS,))
            state = jax.tree.map(partial(replicated, mesh=mesh), self._state)
            split = NamedSharding(mesh, P(AXIS))
            rows = self._ahead.take(self._number)
            batch = jax.tree.map(lambda x: jax.make_array_from_process_local_data(split, x), rows)
            *state, loss = jax.block_until_ready(self._program(*state, batch, np.uint32(self._number)))
        float(loss)
        self._state, self._number = tuple(state), self._number + 1


def replicated(array: jax.Array, mesh: Mesh) -> jax.Array:
    """The same array as one that all devices of the mesh hold; moves nothing."""
    local = array.addressable_shards[0].data
    return jax.make_array_from_single_device_arrays(local.shape, NamedSharding(mesh, P()), [local])


if __name__ == "__main__":
    main()
