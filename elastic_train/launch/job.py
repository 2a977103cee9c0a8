"""One job: coordinator, run directory, display, and (unless it is a coordinator alone) this host's agent."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic_train import jax_private
from elastic_train.chaos.conductor import Conductor
from elastic_train.chaos.schedule import Planned, Schedule, read_schedule, resolve
from elastic_train.config import FaultConfig, shards_note
from elastic_train.coordinator import control_pb2
from elastic_train.coordinator.security import check_coordinator, why_jax_cannot
from elastic_train.coordinator.service import Coordinator
from elastic_train.errors import GaveUpError, InterruptedByUser
from elastic_train.launch.agent import Agent
from elastic_train.launch.check import Checked, CheckRequest, check
from elastic_train.launch.devices import assign_devices, pick_platform, visible_gpus
from elastic_train.launch.host import END_LIMIT_S, job_settings, secret_of, start_agent, without_secret
from elastic_train.launch.options import JobOptions, check_free
from elastic_train.launch.signals import ON_TSTP, POLL_S, Signals
from elastic_train.launch.versions import versions
from elastic_train.membership.group import Identity
from elastic_train.membership.roster import Limits, apply
from elastic_train.membership.roster_events import End
from elastic_train.telemetry.progress import Display
from elastic_train.telemetry.records import RunDirectory, prepare_run_directory
from elastic_train.telemetry.report import format_summary
from elastic_train.telemetry.trackers import open_trackers

OWN_AGENT_LIMIT_S = 30.0
"""How long this host's agent may take to reach the coordinator in the same process."""

OTHER_HOSTS_LIMIT_S = 30.0
"""How long the agents of other hosts may take to end their workers after the end of the job."""

NODES_PER_SLOT = 32
"""JAX's service is sized for this many starts of each slot, and for at least 256 in all."""


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
    options = dataclasses.replace(options, workers=workers)
    slots = (options.slots or tuple(range(workers))) if with_agent else ()
    devices = assign_devices(platform, slots, environ)
    run_dir = options.run_dir.resolve()
    schedule = read_schedule(options.chaos) if options.chaos is not None else None
    request = dataclasses.replace(options.check_request(workers), run_dir=str(run_dir), resume=options.resume)
    checked, planned = _check_before(run_dir, request, environ, schedule)
    resume = checked.resume

    with ExitStack() as stack:
        signals = stack.enter_context(Signals(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGTSTP))
        display = Display(sys.stderr, workers, checked.steps, first_step=resume.step if resume else 0)
        trackers = open_trackers(checked.tensorboard, run_dir)
        records = stack.enter_context(
            RunDirectory(
                run_dir,
                log_every=checked.log_every,
                resume=resume.step if resume else None,
                trackers=trackers,
                on_note=display.note,
            )
        )
        display.start()
        stack.callback(display.stop)
        if platform == "cuda" and (note := shards_note(checked.shards, workers)):
            display.note(note)
        known = versions()
        no_jax_tls = why_jax_cannot(options.tls, jax_private.knows_mtls(), known["jaxlib"])
        if no_jax_tls is not None:
            display.note(f"JAX's coordination service is NOT encrypted, the control plane is: {no_jax_tls}.")
        job = _JobRecords(records, display)
        records.write_config(checked.config_toml)
        records.write_secret(secret)
        records.event("job_started", recipe=options.recipe, trainer=checked.trainer, workers=workers)
        if resume:
            resume.tell(records.event, display.note)
            records.fill_up(resume.step, resume.records)
        coordinator = Coordinator(
            _limits(workers, options.min_workers, checked.faults),
            job,
            past=records.past,
            has_checkpoints=resume is not None and bool(resume.path),
            apply=apply,
            faults=checked.faults,
            bind=options.bind,
            host=host,
            secret=secret,
            tls=options.tls,
            jax_tls=options.tls.given and no_jax_tls is None,
            on_note=display.note,
            on_end=job.end,
        )
        stack.callback(coordinator.close)  # after the workers are gone: JAX ends those that lose its service
        records.write_job(
            {
                "address": coordinator.address,
                "versions": known,
                "tls": dataclasses.asdict(options.tls),
                "start_time": time.time(),
                "recipe": options.recipe,
                "workers": workers,
                "steps": checked.steps,
                "pid": os.getpid(),
            }
        )
        agent, chaos, conductor = None, None, None
        if with_agent:
            settings = job_settings(coordinator.address, secret, run_dir, options, platform, checked)
            if schedule is not None:  # before a worker looks for its orders
                chaos = _UnderChaos(coordinator, records)
                conductor = Conductor(planned, workers, schedule.max_down, run_dir / "chaos", chaos)
                job.conductor = conductor
            agent = start_agent(
                stack,
                settings,
                slots,
                devices,
                environ,
                address=options.address,
                patience_s=OWN_AGENT_LIMIT_S,
                rejoin=False,
                on_note=display.note,
            )
            if chaos is not None:
                chaos.agent = agent
        else:
            display.note(_how_to_join(coordinator.address, options, run_dir))
        end = _watch(coordinator, agent, display, signals, conductor)
        if agent is not None:
            agent.wait(END_LIMIT_S)
        coordinator.wait_left(OTHER_HOSTS_LIMIT_S)
    print(format_summary(job.summary, run_dir) if job.summary else f"{end.message}\n{end.traceback}", flush=True)
    return end.exit_code


class _JobRecords:
    """Where the coordinator writes: the run directory, and what of it is shown.

    Attributes:
      summary: the content of summary.json, once it is written.
      conductor: has the last word on injected faults before that.
    """

    def __init__(self, records: RunDirectory, display: Display) -> None:
        self._records = records
        self._display = display
        self.summary: dict[str, Any] | None = None
        self.conductor: Conductor | None = None

    @property
    def flushed_step(self) -> int:
        return self._records.flushed_step

    @property
    def gap(self) -> tuple[int, int] | None:
        return self._records.gap

    def event(self, name: str, /, **fields: Any) -> None:
        self._records.event(name, **fields)

    def commit(self, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        written = self._records.commit(record)
        # A step that is taken again is shown, too, although it is not written again.
        self._show(written or ([record] if self._records.newest is record else []))
        return written

    def skip_gap(self) -> list[Mapping[str, Any]]:
        written = self._records.skip_gap()
        self._show(written)
        return written

    def _show(self, records: list[Mapping[str, Any]]) -> None:
        for record in records:
            self._display.update({**record, "time_lost_s": self._records.time_lost_s})

    def end(self, end: End, finished: Mapping[int, control_pb2.Finished]) -> None:
        """Writes the summary. The final state is that of the lowest slot among those that went furthest."""
        if self.conductor is not None:
            self.conductor.finish()
        about: dict[str, Any] = {
            "status": end.status,
            "exit_code": end.exit_code,
            "message": end.message,
            "traceback": end.traceback,
            "versions": versions(),
        }
        orderly = [report for _, report in sorted(finished.items()) if report.status in ("done", "stopped")]
        if orderly:
            final = max(orderly, key=lambda report: report.step)
            about |= {
                "step": final.step,
                "samples": final.samples,
                "params_sha256": final.params_sha256,
                "state_sha256": final.state_sha256,
                "metrics": json.loads(final.result or "{}"),
            }
        self.summary = self._records.summary(about)


class _UnderChaos:
    """The job, as whoever injects faults sees it."""

    agent: Agent

    def __init__(self, coordinator: Coordinator, records: RunDirectory) -> None:
        self._coordinator, self._records = coordinator, records

    @property
    def members(self) -> tuple[Identity, ...]:
        roster = self._coordinator.roster
        # A joiner is in the view before it has a state: if only such were left, all would be lost.
        able = {worker.identity for worker in roster.members if worker.first_step is not None}
        return tuple(member for member in roster.view.members if member in able)

    @property
    def step(self) -> int:
        return self._coordinator.step

    def signal(self, identity: Identity, number: signal.Signals) -> bool:
        return self.agent.signal(identity, number)

    def event(self, name: str, /, **fields: Any) -> None:
        self._records.event(name, **fields)


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


def _limits(workers: int, min_workers: int, faults: FaultConfig) -> Limits:
    return Limits(
        num_slots=workers,
        min_workers=min_workers,
        max_restarts=faults.max_restarts,
        forgive_after_steps=faults.forgive_after_steps,
        first_backoff_s=faults.first_backoff_s,
        max_backoff_s=faults.max_backoff_s,
        start_grace_s=faults.start_grace_s,
        start_timeout_s=faults.start_timeout_s,
        floor_timeout_s=faults.floor_timeout_s,
        num_nodes=max(256, NODES_PER_SLOT * workers),
    )


def _watch(
    coordinator: Coordinator, agent: Agent | None, display: Display, signals: Signals, conductor: Conductor | None
) -> End:
    """Waits for the job's end; hands on signals, and the members that come and go, in the meantime."""
    while (end := coordinator.wait(0)) is None:
        for number in signals.wait(POLL_S):
            if number == signal.SIGUSR1:
                if agent is not None:  # without one there are no workers here
                    agent.forward(signal.SIGUSR1)
            elif number == signal.SIGTSTP:
                display.note(ON_TSTP)
            elif signals.num_stops == 1:
                coordinator.ask_stop(False, f"{number.name} at the job's process")
            elif signals.num_stops == 2:
                coordinator.ask_stop(True, f"a second signal, {number.name}, at the job's process")
            else:
                raise InterruptedByUser("interrupted a third time; all workers were ended without a clean stop")
        if agent is not None and agent.ended and coordinator.wait(POLL_S) is None:
            raise GaveUpError(f"this host's agent has ended before the job: {agent.wait(0).reason}")
        if conductor is not None:
            conductor.tick()
        display.update(_snapshot(coordinator.status()))
    return end


def _snapshot(status: Mapping[str, Any]) -> dict[str, Any]:
    """What the display shows of a job's status."""
    slots = {state: [w["slot"] for w in status["workers"] if w["state"] == state] for state in ("ready", "member")}
    members = slots["member"]
    return {"step": status["step"], "epoch": status["epoch"], "workers": members, "ready": members + slots["ready"]}


def _how_to_join(address: str, options: JobOptions, run_dir: Path) -> str:
    return (
        f"Coordinator of {options.workers} workers at {address}. On each host, with that host's slots:\n"
        f"  elastic-train run {options.recipe} --coordinator {address} --workers {options.workers} "
        f"--slots FIRST-LAST --run-dir {run_dir}"
    )
