"""One job: the coordinator's process, display, signals, and (unless it is a coordinator alone) this host's agent."""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic_train import jax_private
from elastic_train.chaos.conductor import Conductor
from elastic_train.chaos.schedule import Planned, Schedule, read_schedule, resolve
from elastic_train.config import shards_note
from elastic_train.coordinator.security import check_coordinator, why_jax_cannot
from elastic_train.errors import GaveUpError, InterruptedByUser, UsageError
from elastic_train.launch.agent import Agent
from elastic_train.launch.check import Checked, CheckRequest, check
from elastic_train.launch.coordinator_process import CoordinatorProcess, Task
from elastic_train.launch.devices import Devices, pick_platform, visible_gpus
from elastic_train.launch.environment import DEVICES_VARIABLE
from elastic_train.launch.host import END_LIMIT_S, job_settings, secret_of, start_agent, without_secret
from elastic_train.launch.options import JobOptions, check_free
from elastic_train.launch.signals import ON_TSTP, POLL_S, Signals
from elastic_train.launch.supervisor import JobEnd, Supervisor
from elastic_train.launch.versions import versions
from elastic_train.membership.group import Identity
from elastic_train.telemetry.json_files import read_object
from elastic_train.telemetry.progress import Display
from elastic_train.telemetry.records import prepare_run_directory
from elastic_train.telemetry.run_files import read_secret
from elastic_train.terminal import say

END_NEWS_LIMIT_S = 10.0
"""How long the coordinator may take to tell of the job's end after it has told the agent."""


def run_job(options: JobOptions, environ: Mapping[str, str], *, with_agent: bool = True) -> int:
    """Runs a job to its end; returns the exit code. No process it started is left then.

    Args:
      options: see there.
      environ: the environment that workers inherit.
      with_agent: whether this host's slots are filled, too; otherwise this is a coordinator alone.

    Raises:
      ElasticTrainError: the job cannot be started, or cannot go on.
    """
    check_free(options.bind)
    host = options.coordinator_host
    check_coordinator(options.tls, host)
    secret = secret_of(environ) or secrets.token_hex(16)
    environ = without_secret(environ)
    platform = pick_platform(environ)
    workers = options.workers or (max(1, len(visible_gpus(environ))) if platform == "cuda" else 1)
    run_dir = options.run_dir.resolve()
    before, asked = _read_job(run_dir), workers
    if options.resume != "never" and options.slots is None:
        workers = _resized(before, options.workers, asked)
    options = dataclasses.replace(options, workers=workers)
    slots = (options.slots or tuple(range(workers))) if with_agent else ()
    devices = Devices(platform, slots, environ)
    schedule = read_schedule(options.chaos) if options.chaos is not None else None
    request = dataclasses.replace(options.check_request(workers), run_dir=str(run_dir), resume=options.resume)

    with ExitStack() as stack:
        process = CoordinatorProcess()  # it imports while the recipe is checked
        stack.callback(process.kill)
        checked, planned = _check_before(run_dir, request, environ, schedule)
        resume = checked.resume
        continues = not with_agent and _is_broken_off(run_dir, before, checked)
        if continues:
            secret = read_secret(run_dir)
        signals = stack.enter_context(Signals(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGTSTP))
        steps = options.last_step or checked.steps
        display = Display(sys.stderr, workers, steps, first_step=resume.step if resume else 0)
        display.start()
        stack.callback(display.stop)
        if platform == "cuda" and (note := shards_note(checked.shards, workers)):
            display.note(note)
        named = environ.get(DEVICES_VARIABLE, "")
        if platform == "cpu" and named and not visible_gpus(environ) and not environ.get("JAX_PLATFORMS"):
            display.note(f"No GPU found here (CUDA_VISIBLE_DEVICES={named}): workers compute on the CPU.")
        known = versions()
        no_jax_tls = why_jax_cannot(options.tls, jax_private.knows_mtls(), known["jaxlib"])
        if no_jax_tls is not None:
            display.note(f"JAX's coordination service is NOT encrypted, the control plane is: {no_jax_tls}.")
        task = Task(
            run_dir=str(run_dir),
            recipe=options.recipe,
            trainer=checked.trainer,
            platform=platform if with_agent else "",
            config_toml=checked.config_toml,
            steps=steps,
            log_every=checked.log_every,
            tensorboard=checked.tensorboard,
            faults=dataclasses.asdict(checked.faults),
            workers=workers,
            workers_asked=asked,
            alone=not with_agent,
            chaos=schedule is not None,
            min_workers=options.min_workers,
            max_workers=checked.max_workers,
            resume=dataclasses.asdict(resume) if resume is not None and not continues else None,
            continues=continues,
            lost={},
            stop_wanted="",
            has_checkpoints=resume is not None and bool(resume.path),
            bind=options.bind,
            host=host,
            secret=secret,
            tls=dataclasses.asdict(options.tls),
            jax_tls=options.tls.given and no_jax_tls is None,
            versions=known,
            pid=os.getpid(),
        )
        job = Supervisor(process, task, checked.faults, display.update, display.note)
        stack.callback(job.close)  # after the workers are gone: JAX ends those that lose its service
        job.wait_begun()
        agent, conductor = None, None
        if with_agent and job.end is None:
            settings = job_settings(job.address, secret, run_dir, options, platform, checked)
            chaos = _UnderChaos(job, display.note)
            if schedule is not None:  # before a worker looks for its orders
                conductor = Conductor(
                    planned,
                    workers,
                    schedule.max_down,
                    run_dir / "chaos",
                    chaos,
                    stop_after_steps=schedule.stop_after_steps,
                )
                job.on_ending = conductor.finish
            chaos.agent = agent = start_agent(
                stack,
                settings,
                slots,
                devices,
                environ,
                options,
                checked.faults,
                display.note,
            )
        elif job.end is None:
            display.note(_how_to_join(job.address, options, run_dir))
        end = _watch(job, agent, display, signals, conductor)
        if agent is not None:
            _await_agent(job, agent)
    say(end.text)
    return end.exit_code


class _UnderChaos:
    """The job, as whoever injects faults sees it."""

    agent: Agent

    def __init__(self, job: Supervisor, note: Callable[[str], None]) -> None:
        self._job, self._note = job, note

    @property
    def members(self) -> tuple[Identity, ...]:
        return self._job.members

    @property
    def step(self) -> int:
        return self._job.step

    def signal(self, identity: Identity, number: signal.Signals) -> bool:
        return self.agent.signal(identity, number)

    def event(self, name: str, /, **fields: Any) -> None:
        self._job.event(name, **fields)

    def note(self, text: str) -> None:
        self._note(text)

    def stop(self, reason: str) -> None:
        self._job.stop(False, reason)


def _check_before(
    run_dir: Path, request: CheckRequest, environ: Mapping[str, str], schedule: Schedule | None
) -> tuple[Checked, Sequence[Planned]]:
    """The checks, between making sure that `run_dir` can be used and using it; all faults that will be injected."""
    existed = run_dir.exists()
    prepare_run_directory(run_dir, may_hold_run=request.resume != "never")
    try:
        checked = check(request, environ)
        return checked, resolve(schedule, request.workers, checked.steps) if schedule is not None else ()
    except BaseException:
        if not existed:
            run_dir.rmdir()
        raise


def _read_job(run_dir: Path) -> dict[str, Any]:
    """The run's job.json; empty if there is none that can be read."""
    try:
        return read_object(run_dir / "job.json")
    except (OSError, UsageError):
        return {}


def _resized(before: Mapping[str, Any], given: int | None, workers: int) -> int:
    """The number of workers that the job had been resized to, unless another one than then is given now."""
    number, asked = before.get("workers"), before.get("workers_asked")
    if isinstance(number, int) and number >= 1 and number != asked and given in (None, asked):
        return number
    return workers


def _is_broken_off(run_dir: Path, before: Mapping[str, Any], checked: Checked) -> bool:
    """Whether the job whose coordinator ran alone has not ended, and would go on as it was: hosts may wait for it."""
    config = run_dir / "config.toml"
    return (
        before.get("alone", False)
        and checked.resume is not None
        and not (run_dir / "summary.json").exists()
        and config.exists()
        and config.read_text(encoding="utf-8") == checked.config_toml
        and (run_dir / "secret").exists()
    )


def _await_end(job: Supervisor) -> None:
    """The agent may have heard first that the job is over."""
    _tick_until(job, lambda: job.end is not None, END_NEWS_LIMIT_S)


def _await_agent(job: Supervisor, agent: Agent) -> None:
    """Waits for the agent's end after the job's. It hears of that from a coordinator, which may die now, too.

    Raises TimeoutError, or what has ended the agent.
    """
    _tick_until(job, lambda: agent.ended, END_LIMIT_S)
    agent.wait(0)


def _tick_until(job: Supervisor, condition: Callable[[], bool], limit_s: float) -> None:
    """Looks after the coordinator until that holds, but no longer than `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(POLL_S)
        job.tick()


def _watch(
    job: Supervisor, agent: Agent | None, display: Display, signals: Signals, conductor: Conductor | None
) -> JobEnd:
    """Waits for the job's end; hands on signals in the meantime."""
    while job.end is None:
        for number in signals.wait(POLL_S):
            if number == signal.SIGUSR1:
                if agent is not None:  # without one there are no workers here
                    agent.forward(signal.SIGUSR1)
            elif number == signal.SIGTSTP:
                display.note(ON_TSTP)
            elif signals.num_stops == 1:
                job.stop(False, f"{number.name} at the job's process")
            elif signals.num_stops == 2:
                job.stop(True, f"a second signal, {number.name}, at the job's process")
            else:
                raise InterruptedByUser("interrupted a third time; all workers were ended without a clean stop")
        job.tick()
        if agent is not None and agent.ended and job.end is None:
            _await_end(job)
            if job.end is None:
                raise GaveUpError(f"this host's agent has ended before the job: {agent.wait(0).reason}")
        if conductor is not None:
            conductor.tick()
    return job.end


def _how_to_join(address: str, options: JobOptions, run_dir: Path) -> str:
    return (
        f"Coordinator of {options.workers} workers at {address}. On each host, with that host's slots:\n"
        f"  elastic-train run {options.recipe} --coordinator {address} --workers {options.workers} "
        f"--slots FIRST-LAST --run-dir {run_dir}"
    )
