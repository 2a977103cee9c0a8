"""How a worker of this host is started: its environment, the memory for its state, and its process, new or held ready.

Used from the agent's one thread, which lives as long as the workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from elastic_train.launch import carried
from elastic_train.launch.environment import (
    CHANNEL_VARIABLE,
    RESTORE_VARIABLE,
    STARTED_VARIABLE,
    STATE_VARIABLE,
    JaxRuntime,
)
from elastic_train.launch.processes import WorkerProcesses
from elastic_train.launch.spares import Spares
from elastic_train.membership.group import Identity

EnvironmentOf = Callable[[Identity, JaxRuntime], Mapping[str, str]]


class State(NamedTuple):
    """A state that a worker has left."""

    slot: int
    step: int
    epoch: int


class Starts:
    """Starts workers, and keeps what is handed on from one worker of a slot to the next.

    Args:
      workers: gets the processes.
      environment: (identity, JAX's coordination service) -> environment of that worker.
      warm: what holds processes ready; started by `open` and closed by `close`.
    """

    def __init__(self, workers: WorkerProcesses, environment: EnvironmentOf, warm: Spares | None) -> None:
        self._workers, self._environment, self._warm = workers, environment, warm
        self._memory: dict[int, int] = {}  # by slot; see `launch.carried`

    def open(self) -> None:
        if self._warm is not None:
            self._warm.start()

    def close(self) -> None:
        """Lets the states go, and ends the processes that are held ready."""
        for descriptor in self._memory.values():
            os.close(descriptor)
        self._memory.clear()
        if self._warm is not None:
            self._warm.close()

    def start(self, identity: Identity, jax: JaxRuntime, restore: bool) -> None:
        """Starts a worker; with `restore` it begins with the state that the slot's last one has left.

        Raises OSError: that was not possible.
        """
        if identity.slot not in self._memory:
            self._memory[identity.slot] = carried.create(identity.slot)
        descriptor = self._memory[identity.slot]
        if not restore:
            carried.discard(descriptor)
        told = {STATE_VARIABLE: str(descriptor), RESTORE_VARIABLE: "1" if restore else "0"}
        told[STARTED_VARIABLE] = str(time.monotonic())
        self._start_process(identity, {**self._environment(identity, jax), **told}, descriptor)

    def states(self) -> Iterator[State]:
        """The states that are here, in ascending order of slots."""
        for slot, descriptor in sorted(self._memory.items()):
            if (found := carried.description(descriptor)) is not None:
                yield State(slot, found["step"], found["epoch"])

    def _start_process(self, identity: Identity, environment: dict[str, str], descriptor: int) -> None:
        if self._warm is None:
            self._workers.start(identity, environment, [descriptor])
            return
        process = self._warm.take(environment, {STATE_VARIABLE: descriptor}, self._workers.log(identity))
        if process is not None:
            self._workers.adopt(identity, process)
            return
        with self._warm.watch() as channel:
            told = {CHANNEL_VARIABLE: str(channel.fileno())}
            self._workers.start(identity, environment | told, [descriptor, channel.fileno()])
