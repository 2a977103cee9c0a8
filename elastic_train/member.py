"""A trainer on one worker of a job: connected, made ready, admitted, trained, reported."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import jax

from elastic_train import jax_private
from elastic_train.membership.abort_cpu import GlooSockets
from elastic_train.membership.group import Identity, View
from elastic_train.membership.live import Group
from elastic_train.training import Outside, Recipe, Training, finish

if TYPE_CHECKING:
    from elastic_train.trainer import Trainer

FORM_REPORT_S = 30.0
"""How often a waiting worker says that it waits."""


class Coordinator(Outside, Protocol):
    """The worker's end of the control plane (`coordinator.client.Link`)."""

    on_abort: object
    stopped_now: threading.Event

    @property
    def dead(self) -> frozenset[int]: ...
    def ready(self) -> None: ...
    def wait_formed(self, timeout: float) -> View | None: ...
    def wait_dead(self, nodes: frozenset[int], timeout: float) -> bool: ...


@dataclass(frozen=True)
class Settings:
    """What the agent told this worker.

    Attributes:
      me: which start of which slot this is.
      min_workers: the floor.
      cache_dir: where compiled programs are kept for the workers to come; None keeps none.
      own_ports: ports of the coordinator and the relay, whose sockets are never gloo's.
    """

    me: Identity
    min_workers: int
    cache_dir: Path | None
    own_ports: frozenset[int]


def use_compilation_cache(settings: Settings) -> None:
    """Compiled programs are shared by all workers, so that a worker that comes back finds them."""
    if settings.cache_dir is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(settings.cache_dir))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    if settings.me.slot == 0:
        jax_private.write_compilation_cache()


def fit_member(trainer: Trainer, link: Coordinator, settings: Settings) -> Training:
    """Trains as a member of the job to its end. The worker is connected to JAX's service already.

    Raises what the user's code raises before the worker is ready, and `UserCodeError` if it fails everywhere.
    """
    use_compilation_cache(settings)
    me = settings.me
    devices: dict[int, jax.Device] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id, reverse=True):
        devices[device.process_index] = device
    link.phase("compile", 0)
    recipe = Recipe(trainer, devices[me.node])
    sockets = None
    if devices[me.node].platform == "cpu":
        sockets = GlooSockets(lambda local, remote: bool({local[1], remote[1]} & settings.own_ports))
    group = Group(me, devices, recipe.local.specs, trainer.config.shards, link, trainer.config.faults, sockets)
    # Tracing collectives for the first time is slow. Nothing is sent, so any second node will do.
    group.prepare(View(0, tuple(sorted((me, Identity(me.slot + 1, 0, 0))))))
    link.on_abort = group.on_dead
    for node in link.dead:
        group.on_dead(node)
    training = Training(recipe, group, link, settings.min_workers)
    link.ready()
    link.phase("ready", 0)
    finish(link, training.run(_admission(link, me)))
    return training


def _admission(link: Coordinator, me: Identity) -> View:
    """Waits to be made a member. The coordinator ends the wait in any case: by a view, or by ending this process."""
    while True:
        view = link.wait_formed(FORM_REPORT_S)
        if view is not None:
            return view
        print(f"slot {me.slot}: ready, waiting to be admitted by the members", file=sys.stderr, flush=True)


def depart(link: Coordinator, limit_s: float) -> None:
    """Waits until the coordinator says that all is done, and ends the process without disturbing the others."""
    if not link.stopped_now.wait(limit_s):
        print(f"the coordinator did not end the job within {limit_s:g} s; leaving", file=sys.stderr, flush=True)
    jax_private.disconnect_worker()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of gloo and XLA may still hold sockets, and must not delay the end.
    os._exit(0)
