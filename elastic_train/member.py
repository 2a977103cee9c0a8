"""A trainer on one worker of a job: made ready, admitted, trained, reported."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import jax

from elastic_train import jax_private
from elastic_train.errors import EXIT_REJOIN, EXIT_USER_CODE, NonFiniteError, StatesDifferError, UserCodeError
from elastic_train.launch.versions import versions
from elastic_train.membership.abort_cpu import GlooSockets
from elastic_train.membership.group import Identity, View
from elastic_train.membership.live import Group, Trace
from elastic_train.outside import Outside
from elastic_train.recipe import Recipe
from elastic_train.state import Device, params_sha256, state_sha256
from elastic_train.telemetry.phase_times import PhaseTimes
from elastic_train.training import OwnCodeFails, Result, Training, write_params

if TYPE_CHECKING:
    from elastic_train.trainer import Trainer

REPORT_S = 30.0
"""How often a waiting worker says that it waits."""

END_LIMIT_S = 600.0
"""How long a worker that has finished waits for the others to finish."""

COMPLETE = "complete"

NUMERIC = ("python", "elastic-train", "jax", "jaxlib", "flax", "optax", "numpy")
"""What must have the same version on all members, because the numbers depend on it."""


class Coordinator(Outside, Protocol):
    """The worker's end of the control plane (`coordinator.client.Link`)."""

    on_expect: Callable[[View], None]
    on_abort: Callable[[int], None]
    dead: frozenset[int]
    stopped_now: threading.Event

    def ready(self, schema: Mapping[str, str], start_s: Mapping[str, float] | None = None) -> None: ...
    def finished(
        self,
        status: str,
        step: int,
        samples: int,
        params_sha256: str,
        state_sha256: str,
        result: Mapping[str, object],
        message: str = "",
    ) -> None: ...
    def wait_formed(self, timeout: float) -> View | None: ...
    def wait_dead(self, nodes: frozenset[int], timeout: float) -> bool: ...


def compiled_directory(run_dir: Path, platform: str, *, deterministic: bool) -> Path:
    """Where compiled programs are kept: in the run directory, or in the user's own cache (JAX_COMPILATION_CACHE_DIR).

    With `deterministic` a run on GPUs keeps its own, which are what makes its bits.
    """
    users = jax.config.jax_compilation_cache_dir
    if users and not (deterministic and platform == "cuda"):
        return Path(users)
    return run_dir / "compiled"


class CompiledPrograms:
    """Compiled programs, kept where the workers to come find them.

    One worker writes, the first that takes the lock on `writer` in the directory; all others only read. The kernel
    gives the lock back when that worker is gone, and the next one that starts, or waits, takes it.

    Args:
      directory: in the run directory.
      me: this worker.
    """

    def __init__(self, directory: Path, me: Identity) -> None:
        self._directory, self._me = directory, me
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(directory / "writer", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._writes = False

    def share(self, *, wait: bool) -> None:
        """Call it before anything is compiled.

        Args:
          wait: whether to wait until the one that writes has compiled everything once. Autotuning may choose other
            kernels in each process; if all are to compute the same bits, all must run what one of them has chosen.
        """
        jax.config.update("jax_compilation_cache_dir", str(self._directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        said = time.monotonic()
        # No limit of its own: the coordinator ends a worker that is not ready within `start_timeout_s`.
        while not self._take() and wait and not (self._directory / COMPLETE).exists():
            time.sleep(0.1)
            if time.monotonic() - said > REPORT_S:
                said = time.monotonic()
                text = f"slot {self._me.slot}: waiting for {self._writer()} to compile the programs"
                print(text, file=sys.stderr, flush=True)

    def complete(self) -> None:
        """Everything that a worker needs to be ready is compiled: lets go those that wait in `share`."""
        if self._writes:
            (self._directory / COMPLETE).touch()

    def _take(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # A parallel file system may know no locks. Then slot 0 writes, and nobody takes over.
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES) or self._me.slot != 0:
                return False
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, f"slot {self._me.slot}'s worker".encode(), 0)
        jax_private.write_compilation_cache()
        self._writes = True
        return True

    def _writer(self) -> str:
        return os.pread(self._lock, 100, 0).decode() or "another worker"


def prepare_member(
    trainer: Trainer,
    link: Coordinator,
    me: Identity,
    min_workers: int,
    own_ports: frozenset[int],
    leave_requested: threading.Event,
    checkpoints: str,
    trace: Trace | None = None,
    times: PhaseTimes | None = None,
    last_step: int = 0,
) -> Training:
    """Does everything slow, so that the worker stalls nobody when it is admitted.

    Args:
      trainer: what to train; jax is connected to the job's coordination service already.
      link: the control plane.
      me: which start of which slot this is.
      min_workers: the floor.
      own_ports: ports of the coordinator and the relay; their sockets are never gloo's.
      leave_requested: set when this worker alone was asked to leave.
      checkpoints: the checkpoint directory.
      trace: told of every barrier.
      times: told when the parts of it begin, see `Recipe`.
      last_step: see `Training`.

    Raises what the user's code raises.
    """
    devices: dict[int, Device] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id, reverse=True):
        devices[device.process_index] = device
    link.phase("prepare", 0)
    recipe = Recipe(trainer, devices[me.node], times)
    sockets = None
    if devices[me.node].platform == "cpu":
        sockets = GlooSockets(lambda local, remote: bool({local[1], remote[1]} & own_ports))
    num_shards = recipe.batches.num_shards
    local = recipe.local
    faults = trainer.config.faults
    group = Group(me, devices, local.layout, num_shards, link, faults, sockets, trace=trace)
    # Tracing collectives for the first time is slow. Nothing is sent, so any second node will do.
    others = [node for node in devices if node != me.node]
    second = (Identity(me.slot + 1, 0, max(others)),) if others and num_shards(2) > 1 else ()
    group.prepare(View.of(0, (me, *second)), recipe.healer.stripe)
    group.finish_compiling()
    link.on_abort, link.on_expect = group.on_dead, group.expect
    for node in link.dead:
        group.on_dead(node)
    training = Training(recipe, group, link, min_workers, leave_requested, checkpoints, last_step)
    training.refuse_other_checkpoint()
    return training


def run_member(
    training: Training,
    link: Coordinator,
    me: Identity,
    run_dir: Path,
    code: Mapping[str, str] | None = None,
    start_s: Mapping[str, float] | None = None,
) -> int:
    """Waits for admission, trains to the end, and reports it. Returns the process's exit code.

    The first member leaves a description of the parameters in `run_dir`, for `elastic-train compare`.

    Args:
      code: digests of the recipe's files, which must be the same on all members.
      start_s: what this worker's start took, by part.
    """
    code_entries = {f"code/{path}": digest for path, digest in (code or {}).items()}
    link.ready({**training.schema, **code_entries, **_version_entries()}, start_s)
    link.phase("ready", training.state.step)
    view = _admission(link, me)
    if view is None:
        return 0
    try:
        result = training.run(view)
    except (UserCodeError, StatesDifferError) as error:
        state = training.state
        status = "failed" if isinstance(error, UserCodeError) else "gave_up"
        message = str(error) if isinstance(error, NonFiniteError | StatesDifferError) else ""
        link.resend()  # the job ends with the first report, whoever's it is
        link.finished(status, state.step, state.samples, "", "", {}, message)
        return error.exit_code
    except OwnCodeFails:
        return EXIT_USER_CODE
    except jax_private.BarrierRefused as refused:
        text = "the barrier lets this worker in no more, as it is with one that was declared dead"
        print(f"elastic_train: leaving: slot {me.slot}: {text}: {refused.__cause__!r}", file=sys.stderr, flush=True)
        return EXIT_REJOIN
    except Exception:
        # Ours, or the state is half updated: this worker is of no more use, but the others are.
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        link.failed(step=training.state.step, fatal=True, startup=False, traceback=traceback.format_exc())
        return EXIT_REJOIN
    if result.status == "left":
        print(f"slot {me.slot}: left the group on request, after a commit", file=sys.stderr, flush=True)
        return 0
    if training.is_first:
        link.phase("leaves", result.state.step)
        write_params(run_dir, result.state)
    _report_and_wait(link, result)
    return 0


def _version_entries() -> dict[str, str]:
    found = versions()
    found["python"] = ".".join(found["python"].split(".")[:2])
    return {f"versions/{name}": found[name] for name in NUMERIC if name in found}


def _report_and_wait(link: Coordinator, result: Result) -> None:
    state = result.state
    link.phase("end", state.step)
    digests = params_sha256(state), state_sha256(state)
    # The member that reports the steps may die before it has reported the last one, and no epoch follows.
    link.resend()
    link.finished(result.status, state.step, state.samples, *digests, result.metrics)
    if not link.stopped_now.wait(END_LIMIT_S):
        print(f"the coordinator did not end the job within {END_LIMIT_S:g} s", file=sys.stderr, flush=True)


def _admission(link: Coordinator, me: Identity) -> View | None:
    """Waits to be made a member; None if the job ends before. The coordinator ends the wait in any case."""
    while (view := link.wait_formed(REPORT_S)) is None:
        if link.stopped_now.is_set():
            return None
        print(f"slot {me.slot}: ready, waiting to be admitted by the members", file=sys.stderr, flush=True)
    return view
