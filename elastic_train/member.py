"""A trainer on one worker of a job: made ready, admitted, trained, reported."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import jax

from elastic_train import jax_private
from elastic_train.errors import EXIT_REJOIN, EXIT_USER_CODE, UserCodeError
from elastic_train.membership.abort_cpu import GlooSockets
from elastic_train.membership.group import Identity, View
from elastic_train.membership.live import Group
from elastic_train.state import params_sha256, state_sha256
from elastic_train.training import Outside, OwnCodeFails, Recipe, Training

if TYPE_CHECKING:
    from elastic_train.trainer import Trainer

ADMISSION_REPORT_S = 30.0
"""How often a waiting worker says that it waits."""


class Coordinator(Outside, Protocol):
    """The worker's end of the control plane (`coordinator.client.Link`)."""

    on_abort: Callable[[int], None]
    dead: frozenset[int]
    stopped_now: threading.Event

    def ready(self) -> None: ...
    def finished(
        self,
        status: str,
        step: int,
        samples: int,
        params_sha256: str,
        state_sha256: str,
        result: Mapping[str, object],
    ) -> None: ...
    def wait_formed(self, timeout: float) -> View | None: ...
    def wait_dead(self, nodes: frozenset[int], timeout: float) -> bool: ...


def share_compiled_programs(directory: Path, me: Identity) -> None:
    """Keeps compiled programs where the workers to come find them. Call it before anything is compiled."""
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    if me.slot == 0:
        jax_private.write_compilation_cache()


def prepare_member(
    trainer: Trainer,
    link: Coordinator,
    me: Identity,
    min_workers: int,
    own_ports: frozenset[int],
    leave_requested: threading.Event,
) -> Training:
    """Does everything slow, so that the worker stalls nobody when it is admitted.

    Args:
      trainer: what to train; jax is connected to the job's coordination service already.
      link: the control plane.
      me: which start of which slot this is.
      min_workers: the floor.
      own_ports: ports of the coordinator and the relay; their sockets are never gloo's.
      leave_requested: set when this worker alone was asked to leave.

    Raises what the user's code raises.
    """
    devices: dict[int, jax.Device] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id, reverse=True):
        devices[device.process_index] = device
    link.phase("prepare", 0)
    recipe = Recipe(trainer, devices[me.node])
    sockets = None
    if devices[me.node].platform == "cpu":
        sockets = GlooSockets(lambda local, remote: bool({local[1], remote[1]} & own_ports))
    group = Group(me, devices, recipe.local.specs, trainer.config.shards, link, trainer.config.faults, sockets)
    # Tracing collectives for the first time is slow. Nothing is sent, so any second node will do.
    group.prepare(View.of(0, (me, Identity(me.slot + 1, 0, max(devices)))))
    link.on_abort = group.on_dead
    for node in link.dead:
        group.on_dead(node)
    return Training(recipe, group, link, min_workers, leave_requested)


def run_member(training: Training, link: Coordinator, me: Identity) -> int:
    """Waits for admission, trains to the end, and reports it. Returns the process's exit code."""
    link.ready()
    link.phase("ready", 0)
    view = _admission(link, me)
    if view is None:
        return 0
    try:
        result = training.run(view)
    except UserCodeError:
        state = training.state
        link.finished("failed", state.step, state.samples, "", "", {})
        return UserCodeError.exit_code
    except OwnCodeFails:
        return EXIT_USER_CODE
    except Exception:
        # Ours, or the state is half updated: this worker is of no more use, but the others are.
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        link.failed(step=training.state.step, fatal=True, startup=False, traceback=traceback.format_exc())
        return EXIT_REJOIN
    if result.status == "left":
        return EXIT_REJOIN  # at once: code 0 waits for the end of the job
    state = result.state
    digests = params_sha256(state), state_sha256(state)
    # The member that reports the steps may die before it has reported the last one, and no epoch follows.
    link.resend()
    link.finished(result.status, state.step, state.samples, *digests, result.metrics)
    return 0


def _admission(link: Coordinator, me: Identity) -> View | None:
    """Waits to be made a member; None if the job ends before. The coordinator ends the wait in any case."""
    while (view := link.wait_formed(ADMISSION_REPORT_S)) is None:
        if link.stopped_now.is_set():
            return None
        print(f"slot {me.slot}: ready, waiting to be admitted by the members", file=sys.stderr, flush=True)
    return view
