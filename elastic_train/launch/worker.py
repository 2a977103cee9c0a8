"""A worker process, from its first line to the end of `Trainer.fit`."""

import os

from elastic_train.launch.bond import BEGAN, die_with_parent

if __name__ == "__main__":
    # Before anything slow: an agent that dies while this process imports must not leave it behind.
    die_with_parent(int(os.environ["ELASTIC_TRAIN_AGENT_PID"]))

import contextlib
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from elastic_train import jax_private
from elastic_train.checkpoint.resume import checkpoint_directory
from elastic_train.config_files import resolve
from elastic_train.coordinator.client import Link
from elastic_train.coordinator.security import Tls
from elastic_train.errors import EXIT_CARRIED, EXIT_LOST, EXIT_REJOIN, EXIT_USER_CODE, ElasticTrainError
from elastic_train.launch.channel import READY, send
from elastic_train.launch.environment import SECRET_VARIABLE, SPARE_VARIABLE, WorkerSettings
from elastic_train.launch.spare import Loaded, load, open_channel, wait_to_be_used
from elastic_train.launch.stacks import install_dumps
from elastic_train.launch.versions import versions
from elastic_train.membership.nccl import start_nccl
from elastic_train.telemetry.phase_times import PhaseTimes

if TYPE_CHECKING:
    from elastic_train.telemetry.blocks import BlockTrace
    from elastic_train.training import Training


NCCL_LIMIT_S = 30.0
"""How long a worker that has nothing else to do waits for NCCL to begin. It does so anyway when it is first used."""

LEAVES = threading.Event()
"""Set when the coordinator is lost: this process ends as soon as its state is left."""


def main() -> NoReturn:
    """Runs this process's worker to its end."""
    channel, loaded, began = open_channel(), None, BEGAN
    if channel is not None and SPARE_VARIABLE in os.environ:
        loaded = wait_to_be_used(channel)
        began = time.monotonic()
    settings = WorkerSettings.read(os.environ)
    times = PhaseTimes(phase="import", since=began)
    del os.environ[SECRET_VARIABLE]  # what the recipe starts has no need of it
    _install_signal_handlers(settings.leave_requested)
    job = settings.job
    tls, generation = Tls.load(job.tls), settings.jax.generation
    link = Link(job.coordinator, job.secret, settings.identity, job.keepalive_s, tls, generation)
    if settings.state_descriptor >= 0:
        os.set_inheritable(settings.state_descriptor, False)  # what the recipe starts has no need of it
    link.on_evict = lambda reason: _leave(EXIT_REJOIN, f"evicted: {reason}")
    link.on_lost = lambda reason: _leave(EXIT_LOST, f"lost the coordinator: {reason}")
    link.on_stopped_now = lambda reason: _leave(0, f"is not needed any more: {reason}")
    try:
        training, code = _prepare(link, settings, loaded, times)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # SIGINT is ignored here: all of it is user code
        text = traceback.format_exc()
        if isinstance(error, ElasticTrainError):  # says all there is to say; no line of code is wrong
            text = "".join(traceback.format_exception_only(error))
        print(text, file=sys.stderr, flush=True)
        link.failed(step=0, fatal=True, startup=True, traceback=text)
        link.close()
        _leave(EXIT_USER_CODE, "could not start")
    from elastic_train.member import run_member

    start_s = {"process": round(began - settings.started, 6), **times.take()}
    print("ready: " + ", ".join(f"{part} {seconds:.1f} s" for part, seconds in start_s.items()), file=sys.stderr)
    if channel is not None:
        with channel, contextlib.suppress(OSError):  # without its agent this process ends
            send(channel, {"say": READY})
    link.on_lost = lambda reason: _leave_state(training, settings, reason)
    link.on_stopped_now = lambda reason: None  # from here on somebody waits for `stopped_now`
    exit_code = run_member(training, link, settings.identity, settings.job.run_dir, code, start_s)
    if LEAVES.is_set():  # the thread that saves what there is ends this process
        threading.Event().wait(job.heartbeat_timeout_s)
    jax_private.disconnect_worker()
    link.close()
    # Not sys.exit: when jax takes its clients and communicators down it waits for peers that may be gone.
    _leave(exit_code, f"ends with code {exit_code}")


def _prepare(
    link: Link, settings: WorkerSettings, loaded: Loaded | None, times: PhaseTimes
) -> tuple["Training", dict[str, str]]:
    """Connects, and does everything slow. Also returns digests of the code that was loaded.

    Args:
      loaded: what was imported while this process was held ready.
      times: where the time of the start goes.
    """
    job = settings.job
    with ThreadPoolExecutor(1, thread_name_prefix="hello") as background:
        # Importing jax takes longer than anything else here. Meanwhile the coordinator learns of this worker.
        hello = background.submit(
            link.hello,
            pid=os.getpid(),
            host=socket.gethostname(),
            versions=" ".join(f"{name} {version}" for name, version in versions().items()),
        )
        trainer, code = loaded or load(job.recipe)
        times.enter("connect")
        hello.result()
    from elastic_train import member
    from elastic_train.launch.recipe import config_class_of

    jax_private.connect_worker(
        address=settings.jax.address,
        node=settings.identity.node,
        num_nodes=settings.jax.num_nodes,
        heartbeat_timeout_s=job.heartbeat_timeout_s,
        tls=Tls.load(job.tls).jax_arguments() if settings.jax.tls else {},
        own_address=settings.host_address,
    )
    times.enter("backend")
    jax_private.create_backend()
    _check_platform(settings)
    times.enter("wait")
    directory = member.compiled_directory(job.run_dir, job.platform, deterministic=job.deterministic)
    if job.platform == "cpu":
        jax_private.share_compiled_across_cpu_devices()
    programs = member.CompiledPrograms(directory, settings.identity)
    programs.share(wait=job.deterministic and job.platform == "cuda")
    times.enter("data")
    config = resolve(config_class_of(trainer), job.config_file)
    made = trainer(config)
    nccl = threading.Thread(target=start_nccl, name="nccl", daemon=True)
    if job.platform != "cpu":
        nccl.start()  # beside what follows, and after what may set its variables
    if job.chaos:
        from elastic_train.chaos.inject import install

        install(made, settings.identity, Path(job.chaos))
    ports = frozenset(int(address.rpartition(":")[2]) for address in (job.coordinator, settings.jax.address))
    training = member.prepare_member(
        made,
        link,
        settings.identity,
        job.min_workers,
        ports,
        settings.leave_requested,
        checkpoint_directory(job.run_dir, config.checkpoint),
        _trace(settings),
        times,
        job.last_step,
    )
    if job.platform != "cpu":
        times.enter("nccl")
        nccl.join(NCCL_LIMIT_S)
        if nccl.is_alive():
            print(f"NCCL has not begun within {NCCL_LIMIT_S:g} s, which is no reason to wait", file=sys.stderr)
    times.enter("state")
    if settings.restore and settings.state_descriptor >= 0:
        records = training.handover.take(settings.state_descriptor)
        link.restore(records or ())
        found = "none that fits" if records is None else f"the one after step {training.state.step}"
        print(f"the state that this slot's last worker left: {found}", file=sys.stderr, flush=True)
    programs.complete()
    return training, code


def _check_platform(settings: WorkerSettings) -> None:
    """JAX goes on with the CPU if it cannot use a GPU. A worker that did so would break the others' exchange.

    Raises:
      ElasticTrainError: this worker's device is not of the job's platform.
    """
    import jax

    device = jax.local_devices()[0]
    if (device.platform == "cpu") != (settings.job.platform == "cpu"):
        raise ElasticTrainError(
            f"slot {settings.identity.slot}'s worker found a device of platform {device.platform!r}, and the job "
            f"computes on {settings.job.platform!r}: JAX could not use the device. Its own messages are in this log. "
            "If the recipe touches the GPU while it is imported, with another library, a process that is held ready "
            "cannot use it: set faults.warm_spares=0"
        )


def _trace(settings: WorkerSettings) -> "BlockTrace | None":
    if not settings.trace_blocks:
        return None
    from elastic_train.telemetry.blocks import BlockTrace

    return BlockTrace(settings.job.run_dir, settings.identity, settings.job.secret, settings.jax.generation)


def _leave_state(training: "Training", settings: WorkerSettings, reason: str) -> NoReturn:
    """The coordinator is gone, in the thread that has noticed. Its place may be taken by another one: the state is left
    for the worker that joins that one."""
    LEAVES.set()
    done = ""
    try:
        if settings.state_descriptor >= 0:
            done = training.handover.leave(settings.state_descriptor, settings.job.heartbeat_timeout_s)
    except Exception:  # this worker has no other use, and others may have their state
        print(traceback.format_exc(), file=sys.stderr, flush=True)
    if done:
        _leave(EXIT_CARRIED, f"lost the coordinator, and has left {done}: {reason}")
    _leave(EXIT_LOST, f"lost the coordinator, and leaves no state: {reason}")


def _install_signal_handlers(leave_requested: threading.Event) -> None:
    # Ctrl-C reaches the agent, which knows what it means; this process has a session of its own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: leave_requested.set())
    install_dumps()


def _leave(exit_code: int, reason: str) -> NoReturn:
    """Ends the process now, from any thread, with its reason in the log."""
    print(f"worker {os.getpid()} {reason}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
