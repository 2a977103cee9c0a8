"""A campaign: one job, all kinds of disturbance together, drawn from a seed. Proves at its end that nothing was lost.

    PYTHONPATH=. python tests/chaos/campaign.py --seed 7 --acts 15 [--run-dir DIR] [--plan]

`campaign_plan.draw` makes the plan, which can be printed (`--plan`). `run` carries it out through the public command
line and signals. Whom an act concerns is drawn as a number between 0 and 1, and picked from those that
are there when its moment has come. Moments are events of the job, never durations. Every wait has a deadline, and says
what it waited for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / "multiprocess"), str(ROOT)]

from campaign_plan import MAX_WORKERS, Act, Plan, draw  # noqa: E402
from job import FAULTY, Job, plain_run  # noqa: E402

from elastic_train.data.ledger_files import verify_run  # noqa: E402
from elastic_train.telemetry.barriers import format_barriers, verify_barriers  # noqa: E402
from elastic_train.telemetry.json_files import read_lines  # noqa: E402

DEADLINE_S = 120.0
STEPS = 1_000_000
PACE_S = 0.05
EVAL_EVERY = 15
SECRET = "what all hosts know"
SETTINGS = (
    "faults.keepalive_s=2.0",
    "faults.doubt_timeout_s=5.0",
    "faults.step_timeout_s=6.0",
    "faults.first_step_timeout_s=30.0",
    "faults.hook_timeout_s=8.0",
    "faults.first_backoff_s=0.1",
    "faults.max_backoff_s=1.0",
    "faults.max_restarts=1000",
    "faults.max_coordinator_restarts=1000",
    "faults.start_grace_s=30.0",
    "faults.start_timeout_s=60.0",
    "checkpoint.every_steps=20",
    f"eval_every={EVAL_EVERY}",
)
"""Limits for short steps on a busy machine, and budgets that no campaign spends."""

EVENTS = {
    "died": ("worker_died", "coordinator_lost"),
    "starting": ("worker_starting",),
    "warming": ("worker_warming",),
    "ready": ("worker_ready",),
    "joining": ("view_changed",),
    "rejoined": ("recovered",),
    "began": ("generation_began",),
}

AT_AN_END = ("stop_asked", "worker_finished", "checkpoint_saved", "end")


class Failure(AssertionError):
    """The job did not do what it promises."""


class Campaign:
    """Carries out a plan.

    Args:
      plan: what to do.
      directory: holds the run directory and all output.
      say: told of everything that is done.
    """

    def __init__(self, plan: Plan, directory: Path, say: Callable[[str], None] = print) -> None:
        self.plan, self.run_dir, self._say_line = plan, directory / "run", say
        self._trips = directory / "trips"
        self._trips.mkdir(parents=True)
        self._directory = directory
        self._port = _free_port()
        self._jobs: list[Job] = []
        self._number = 0
        self._before_agent = 0  # events that had been written when the second host's command was started
        self._workers: int | None = plan.workers
        self._warm = plan.warm
        self._orders: list[tuple[str, subprocess.Popen[str]]] = []
        self._mark = 0  # events that had been written before the last act
        self._mark_step = 0
        self._mark_moment = 0.0
        self.job: Job
        self.agent: Job | None = None
        self._may_repeat = False  # all members were killed, or everything
        self._began = time.monotonic()

    # The whole.

    def run(self) -> None:
        try:
            self._start()
            for number, act in enumerate(self.plan.acts):
                self._await_moment(act)
                self._say(f"{number:3}. {act}   [{self._where()}]")
                self._note_mark()
                getattr(self, f"_do_{act.kind}")(act)
                self._look_after_orders()
                self._check_agent()
            self._finish()
        finally:
            for process in [process for _, process in self._orders]:
                if process.poll() is None:
                    process.kill()
                process.communicate()
            for job in self._jobs:
                job.__exit__(Failure, None, None)

    def _say(self, text: str) -> None:
        self._say_line(f"{time.monotonic() - self._began:6.1f} s {text}")

    def _where(self) -> str:
        lines = self._ledger()
        last = lines[-1] if lines else {"step": 0, "workers": []}
        return f"step {last['step']} by {last['workers']}, expected {sorted(self._expected())}"

    # Starting and ending.

    def _start(self) -> None:
        plan = self.plan
        first = (*self._options(), "--bind", f"127.0.0.1:{self._port}")
        if plan.two_hosts:
            first = (*first, "--slots", "0-1")
        self.job = self._launch(self.run_dir, first, self._workers or 1)
        if plan.two_hosts and self.agent is None:
            self._start_agent()

    def _options(self) -> tuple[str, ...]:
        settings = (*SETTINGS, *self.plan.settings, f"faults.warm_spares={self._warm}")
        return "--steps", str(STEPS), "--min-workers", str(self.plan.min_workers), "--set", *settings

    def _launch(self, run_dir: Path, options: tuple[str, ...], workers: int) -> Job:
        self._number += 1
        output = run_dir.with_suffix(".out")
        if output.exists():
            output.rename(self._directory / f"{run_dir.name}-{self._number}.before.out")
        environ = {"TRIPS": str(self._trips), "ELASTIC_TRAIN_SECRET": SECRET, "JAX_PLATFORMS": "cpu"}
        job = Job(run_dir, FAULTY, *options, workers=workers, pace_s=PACE_S, environ=environ)
        self._jobs.append(job)
        return job

    def _start_agent(self) -> Job:
        link = self._directory / "second"
        if not link.is_symlink():
            link.symlink_to(self.run_dir)
        self._wait("job.json", lambda: (self.run_dir / "job.json").exists() and self.job.json("job.json"))
        join = ("--coordinator", f"127.0.0.1:{self._port}", "--slots", f"2-{MAX_WORKERS - 1}")
        self._before_agent = len(self._events())
        self.agent = self._launch(link, (*self._options(), *join), MAX_WORKERS)
        return self.agent

    def _ended(self, job: Job, codes: tuple[int, ...], why: str) -> None:
        self._await("the end of " + why, lambda: job.process.poll() is not None, job)
        if job.process.returncode not in codes:
            raise Failure(f"exit code {job.process.returncode} after {why}; expected {codes}\n{job.output[-3000:]}")
        left = job.processes_left()
        if left:
            raise Failure(f"processes are left after {why}: {left}")

    def _finish(self) -> None:
        if self.plan.two_hosts and self.agent is None:
            self._start_agent()
        self._collect_orders()
        if self.agent is not None:
            self._wait("the second host to join", self._agent_has_joined)
        self._note_mark()
        self._wait("all workers at the end", lambda: self._is_calm() and self._step() > self._mark_step + 10)
        self._say(f"     stopping [{self._where()}]")
        self.job.process.send_signal(signal.SIGTERM)
        self._ended(self.job, (130,), "the last stop")
        if self.agent is not None:
            self._ended(self.agent, (130,), "the second host after the last stop")
        self._prove()

    # Waiting.

    def _wait(self, what: str, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """While the job goes on."""

        def found() -> Any:
            result = condition()
            if not result and self.job.process.poll() is not None and not condition():
                raise Failure(
                    f"the job ended with {self.job.process.returncode} while waiting for {what}\n"
                    f"{self.job.output[-3000:]}"
                )
            return result

        return self._await(what, found, self.job, deadline_s)

    def _await(self, what: str, condition: Callable[[], Any], job: Job, deadline_s: float = DEADLINE_S) -> Any:
        end = time.monotonic() + deadline_s
        while not (found := condition()):
            if time.monotonic() > end:
                raise Failure(f"waited {deadline_s:g} s for {what} [{self._where()}]")
            for each in self._jobs:
                if each.process.poll() is None:
                    each.note_processes()
            time.sleep(0.02)
        job.note_processes()
        return found

    def _note_mark(self) -> None:
        self._mark, self._mark_step = len(self._events()), self._step()

    def _await_moment(self, act: Act) -> None:
        match act.moment:
            case "at once":
                return
            case "calm":
                self._wait(f"calm before {act}", self._is_calm)
                return
            case "steps":
                wanted = self._step() + 1 + int(act.picks[1] * 8)
                self._wait(f"step {wanted} before {act}", lambda: self._step() >= wanted or self._has_repeated())
                return
            case "saving":

                def reached() -> bool:
                    return any((self.run_dir / "checkpoints").glob("*.partial-*"))
            case _:
                names = EVENTS[act.moment]

                def reached() -> bool:
                    new = [event for event in self._events()[self._mark :] if event["event"] in names]
                    return any(event["event"] != "view_changed" or event["came"] for event in new)

        # What was done before may not lead to it; then some calm steps are as good.
        self._wait(
            f"{act.moment} before {act}",
            lambda: reached() or (self._is_calm() and self._step() > self._mark_step + 25),
        )

    def _has_repeated(self) -> bool:
        return any(event["event"] in ("group_lost", "run_resumed") for event in self._events()[self._mark :])

    # What the job has written.

    def _events(self) -> list[dict[str, Any]]:
        return self.job.lines("events.jsonl") if hasattr(self, "job") else []

    def _ledger(self) -> list[dict[str, Any]]:
        return self.job.lines("ledger.jsonl") if hasattr(self, "job") else []

    def _step(self) -> int:
        lines = self._ledger()
        return lines[-1]["step"] if lines else 0

    def _expected(self) -> set[int]:
        """Slots whose workers shall take part when nothing more happens."""
        slots: set[int] = set()
        for event in self._events():
            match event["event"]:
                case "job_started":
                    slots = set(range(event["workers"]))
                case "resized":
                    kept = {slot for slot in slots if slot < event["workers"]}
                    slots = kept | set(range(event["before"], event["workers"]))
                case "drain_asked" | "slot_given_up":
                    slots -= {event["slot"]}
        if self.plan.two_hosts and self.agent is None:
            slots &= {0, 1}
        return slots

    def _is_calm(self) -> bool:
        """All that shall be there have committed some steps together, since the last act."""
        lines = self._ledger()[-3:]
        if len(lines) < 3 or lines[0]["step"] <= self._mark_step + 1:
            return False
        formed = [event["event"] for event in self._events() if event["event"] in ("job_started", "recovered")]
        if formed[-1:] != ["recovered"]:  # the ledger is that of the part before
            return False
        return all(set(line["workers"]) == self._expected() for line in lines)

    # Processes.

    def _pid(self, slot: int) -> int | None:
        """The process of a slot's newest worker, if it lives."""
        started = [e for e in self._events() if e["event"] == "worker_started" and e["slot"] == slot]
        if not started:
            return None
        parents = {job.process.pid for job in (self.job, self.agent) if job is not None}
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(started[-1]["pid"])
            if process.ppid() in parents and process.status() != psutil.STATUS_ZOMBIE:
                return process.pid
        return None

    def _living(self) -> list[int]:
        return [slot for slot in range(MAX_WORKERS) if self._pid(slot) is not None]

    def _members(self) -> list[int]:
        lines = self._ledger()
        slots = lines[-1]["workers"] if lines else []
        return [slot for slot in slots if self._pid(slot) is not None]

    def _signal(self, slot: int, number: signal.Signals) -> None:
        pid = self._pid(slot)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            self._say(f"       {number.name} to slot {slot}, process {pid}")

    def _pick(self, slots: list[int], pick: float) -> int | None:
        return slots[int(pick * len(slots))] if slots else None

    # Acts.

    def _do_kill(self, act: Act) -> None:
        if (slot := self._pick(self._living(), act.picks[0])) is not None:
            self._kill(slot)

    def _kill(self, *slots: int) -> None:
        if set(slots) >= set(self._members()):
            self._may_repeat = True
        for slot in slots:
            self._signal(slot, signal.SIGKILL)

    def _do_kill_two(self, act: Act) -> None:
        living = self._living()
        chosen = {slot for pick in act.picks if (slot := self._pick(living, pick)) is not None}
        self._kill(*chosen)

    def _do_kill_all_but_one(self, act: Act) -> None:
        members = self._members()
        spared = self._pick(members, act.picks[0])
        self._kill(*(slot for slot in members if slot != spared))

    def _do_kill_all(self, act: Act) -> None:
        self._kill(*self._living())

    def _do_trip(self, act: Act) -> None:
        where, what = act.about
        if (slot := self._pick(self._living(), act.picks[0])) is not None:
            self._trip(slot, {"where": where, "what": what})

    def _trip(self, slot: int, fault: dict[str, Any]) -> None:
        temporary = self._trips / f".{slot}"
        temporary.write_text(json.dumps(fault))
        temporary.rename(self._trips / str(slot))
        self._say(f"       for slot {slot}: {fault}")

    def _do_linger(self, act: Act) -> None:
        """A worker dies, and its successor takes its time at one place."""
        if (slot := self._pick(self._living(), act.picks[0])) is not None:
            self._trip(slot, {"where": act.about[0], "what": "slow", "seconds": 2.0})
            self._kill(slot)

    def _do_raise_always(self, act: Act) -> None:
        members = self._members()
        if len(members) > 1 and (slot := self._pick(members, act.picks[0])) is not None:
            self._trip(slot, {"where": "data", "what": "raise", "always": True})

    def _do_stop_long(self, act: Act) -> None:
        if (slot := self._pick(self._members(), act.picks[0])) is not None:
            self._signal(slot, signal.SIGSTOP)

    def _do_stop_short(self, act: Act) -> None:
        slot = self._pick(self._members(), act.picks[0])
        if slot is not None and (pid := self._pid(slot)) is not None:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.3)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _do_leave(self, act: Act) -> None:
        members = self._members()
        living = [slot for slot in self._living() if members != [slot]]  # the only member's leaving stops the job
        if (slot := self._pick(living, act.picks[0])) is not None:
            self._signal(slot, signal.SIGTERM)

    def _coordinator(self) -> int | None:
        began = [event["pid"] for event in self._events() if event["event"] == "generation_began"]
        with suppress(psutil.NoSuchProcess):
            if began and psutil.Process(began[-1]).ppid() == self.job.process.pid:
                return began[-1]
        return None

    def _do_kill_coordinator(self, act: Act, number: signal.Signals = signal.SIGKILL) -> None:
        if (pid := self._coordinator()) is not None:
            self._say(f"       {number.name} to the coordinator, process {pid}")
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _do_stop_coordinator(self, act: Act) -> None:
        self._do_kill_coordinator(act, signal.SIGSTOP)

    def _order(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "elastic_train", arguments[0], str(self.run_dir), *arguments[1:]]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environ)
        self._orders.append((" ".join(arguments), process))

    def _stop_by_order(self) -> None:
        """Nobody hears it while the next coordinator is on its way: then once more."""
        while self.job.process.poll() is None:
            self._order("stop")
            order, process = self._orders[-1]
            self._await("the end of `stop`", lambda p=process: p.poll() is not None, self.job)
            if process.returncode != 2:
                return
            self._orders.pop()
            self._check_order(order, process)

    def _do_resize(self, act: Act) -> None:
        self._order("resize", "--workers", str(act.about[0]))

    def _do_drain(self, act: Act) -> None:
        if len(self._expected()) > 1 and (slot := self._pick(sorted(self._expected()), act.picks[0])) is not None:
            self._order("drain", "--worker", str(slot))

    def _do_save(self, act: Act) -> None:
        self._order("save")

    def _do_saves(self, act: Act) -> None:
        for _ in range(act.about[0]):
            self._order("save")

    def _do_status(self, act: Act) -> None:
        self._order("status", "--json")

    def _look_after_orders(self) -> None:
        """What has ended in the meantime must have ended as documented."""
        for order, process in list(self._orders):
            if process.poll() is not None:
                self._orders.remove((order, process))
                self._check_order(order, process)

    def _check_order(self, order: str, process: subprocess.Popen[str]) -> None:
        said, _ = process.communicate()
        self._say(f"       `{order}` ended with {process.returncode}: {said.strip()[:300]}")
        if "Traceback" in said or process.returncode not in (0, 1, 2):
            raise Failure(f"`{order}` ended with {process.returncode}\n{said}")
        if process.returncode == 1 and not order.startswith("save"):
            raise Failure(f"`{order}` ended with 1\n{said}")

    def _collect_orders(self) -> None:
        for order, process in self._orders:
            self._await(f"the end of `{order}`", lambda p=process: p.poll() is not None, self.job)
        self._look_after_orders()

    def _do_end_and_resume(self, act: Act) -> None:
        how, workers, warm, flips, agent_waits = act.about
        job, process = self.job, self.job.process
        self._wait("the run directory to be there", lambda: self.job.json("job.json"))
        codes: tuple[int, ...] = (130,)
        match how:
            case "sigterm":
                process.send_signal(signal.SIGTERM)
            case "sigint":
                process.send_signal(signal.SIGINT)
            case "stop":
                self._stop_by_order()
            case "twice":
                process.send_signal(signal.SIGTERM)
                time.sleep(act.picks[1] / 5)
                process.send_signal(signal.SIGINT)
                self._may_repeat = True
            case "without_coordinator":
                event = AT_AN_END[int(act.picks[1] * len(AT_AN_END))]
                process.send_signal(signal.SIGTERM)
                self._await(f"{event} or the end", lambda: self._new(event) or process.poll() is not None, job)
                self._say(f"       {event}")
                self._do_kill_coordinator(act)
            case "without_worker":
                members = self._members()
                process.send_signal(signal.SIGTERM)
                if (slot := self._pick(members, act.picks[1])) is not None:
                    self._kill(slot)
            case "kill":
                job.note_processes()
                process.kill()
                codes, self._may_repeat = (-signal.SIGKILL,), True
        self._note_stop_without_members()
        self._ended(job, codes, how)
        self._collect_orders()
        agent = self.agent
        if agent is not None and how != "kill" and self._agent_has_joined():
            self._ended(agent, (130,), f"the second host after {how}")
            agent = self.agent = None
        elif agent is not None and not agent_waits:
            agent.note_processes()
            agent.process.kill()
            self._ended(agent, (-signal.SIGKILL,), "the second host, killed too")
            agent = self.agent = None
        self._check_agent()
        for trip in self._trips.iterdir():
            trip.unlink()
        if flips:
            self._flip(act.picks[0])
        self._workers = workers if workers is not None else self._workers
        self._warm = warm
        self._say(f"       resumed with --workers {self._workers}, warm spares {warm}")
        self._start()
        self._wait("the run to be resumed", lambda: len(self._of("job_started")) > self._starts)

    def _of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self._events() if event["event"] == name]

    def _note_stop_without_members(self) -> None:
        self._starts = len(self._of("job_started"))

    def _flip(self, pick: float) -> None:
        """Flips a byte somewhere in the newest checkpoint, if there is an older one."""
        steps = sorted(int(path.name) for path in (self.run_dir / "checkpoints").glob("*") if path.name.isdigit())
        if len(steps) < 2:
            return
        newest = self.run_dir / "checkpoints" / str(steps[-1])
        files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
        path = files[int(pick * len(files))]
        content = bytearray(path.read_bytes())
        content[int(pick * len(content))] ^= 1
        path.write_bytes(content)
        self._may_repeat = True
        self._say(f"       flipped a byte of {path.relative_to(self.run_dir)}")

    # The second host.

    def _do_agent_kill(self, act: Act) -> None:
        if self.agent is None:
            self._start_agent()
            return
        agent, self.agent = self.agent, None
        if not set(self._members()) & {0, 1}:
            self._may_repeat = True
        agent.note_processes()
        agent.process.kill()
        self._ended(agent, (-signal.SIGKILL,), "the second host, killed")

    def _do_agent_leave(self, act: Act) -> None:
        if self.agent is None:
            self._start_agent()
            return
        agent, self.agent = self.agent, None
        agent.process.send_signal(signal.SIGTERM)
        if act.picks[1] < 0.5:
            self._ended(agent, (130,), "the second host, asked to leave")

    def _do_agent_double(self, act: Act) -> None:
        """A second command for the same slots stands by; then the first one goes."""
        before = self.agent
        if before is None:
            self._start_agent()
            return
        self._start_agent()
        if act.picks[1] < 0.5:
            self._wait("the slots to be refused", lambda: self._events()[self._mark :] and self._new("agent_joined"))
        before.note_processes()
        before.process.kill()
        self._ended(before, (-signal.SIGKILL,), "the second host's first command, killed")

    def _agent_has_joined(self) -> bool:
        """Whether the second host's present command has. The first host's has slot 0."""
        new = self._events()[self._before_agent :]
        return any(event["event"] == "agent_joined" and 0 not in event["slots"] for event in new)

    def _new(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self._events()[self._mark :] if event["event"] == name]

    def _check_agent(self) -> None:
        if self.agent is not None and self.agent.process.poll() is not None:
            raise Failure(f"the second host's command ended with {self.agent.process.returncode}\n{self.agent.output}")

    # Proofs.

    def _prove(self) -> None:
        problems = [*self._problems()]
        if problems:
            raise Failure("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        summary, events = self.job.summary, self._events()
        options = ("--set", f"eval_every={EVAL_EVERY}")
        alone = plain_run(self._directory / "alone", summary["step"], *options)
        for name in ("step", "samples", "params_sha256", "state_sha256", "final_loss"):
            if summary[name] != alone[name]:
                yield f"{name} is {summary[name]}, and {alone[name]} in an undisturbed run of as many steps"
        curves = [_curve(self.job.lines("metrics.jsonl")), _curve(read_lines(self._directory / "alone/metrics.jsonl"))]
        curves[1][-1:] = [{name: value for name, value in curves[1][-1].items() if name in curves[0][-1]}]
        different = [pair for pair in itertools.zip_longest(*curves) if pair[0] != pair[1]]
        if different:  # the undisturbed run ends with an evaluation, the other one does not
            yield f"metrics.jsonl differs from the undisturbed run's in {len(different)} lines: {different[:3]}"
        steps = [line["step"] for line in self._ledger()]
        if steps != list(range(1, summary["step"] + 1)):
            yield f"the ledger is not 1 to {summary['step']}: {_gaps(steps)}"
        ledger = verify_run(self.run_dir)
        if not ledger.proven:
            yield f"the ledger is not proven: {ledger}"
        barriers = verify_barriers(self.run_dir)
        if not barriers.proven:
            yield f"the barriers are not proven: {format_barriers(barriers)}"
        for event in events:
            if event["event"] in NEVER:
                yield f"an event that must not be: {event}"
            if event["event"] == "end" and event["status"] != "stopped":
                yield f"the job ended: {event}"
            if event["event"] == "user_code_failed" and "planned failure" not in event["traceback"]:
                yield f"user code failed: {event}"
            if event["event"] == "worker_died" and event["exit_code"] not in (0, -9, -15, None):
                log = (self.run_dir / "logs" / f"{event['slot']}-{event['incarnation']}.log").read_text()
                if not any(text in log for text in ("planned failure", "fault: ", "evicted")):
                    yield f"a worker ended by itself: {event}\n{log[-1000:]}"
            if event["event"] in ("steps_repeated", "group_lost") and not self._may_repeat:
                yield f"steps were lost although nobody killed all members: {event}"
        accounts, wall_s = summary["time_accounts"], summary["wall_s"]
        total_s = sum(each["seconds"] for each in accounts.values())
        if abs(total_s - wall_s) > 0.05 + 0.001 * wall_s or min(each["seconds"] for each in accounts.values()) < -1e-6:
            yield f"the accounts do not add up: {accounts} of {wall_s} s"
        if not 0 <= summary["goodput"] <= 1:
            yield f"goodput {summary['goodput']}"
        for path in sorted([*self._directory.glob("*.out*"), *(self.run_dir / "logs").glob("*")]):
            for trace in _tracebacks(path.read_text(errors="replace")):
                if not any(text in trace for text in PLANNED):
                    yield f"a traceback in {path.name}:\n{trace}"
        for command in (("report",), ("ledger", "verify"), ("barriers", "verify"), ("checkpoint", "verify")):
            line = [sys.executable, "-m", "elastic_train", *command, str(self.run_dir)]
            ended = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, check=False)
            if ended.returncode:
                said = ended.stdout[-500:] + ended.stderr[-1500:]
                yield f"`{' '.join(command)}` ended with {ended.returncode}: {said}"
        partial = [path.name for path in (self.run_dir / "checkpoints").iterdir() if "partial" in path.name]
        if partial:
            yield f"checkpoints that were broken off are left: {partial}"
        yield from self._left()

    def _left(self) -> Iterator[str]:
        """Processes that have to do with this campaign and are still there."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("TRIPS") == str(self._trips):
                    yield f"a process is left: {process} {process.cmdline()}"


NEVER = {
    "digests_differ",
    "ledger_gap",
    "state_differs",
    "gradient_not_finite",
    "worker_refused",
    "tombstone_failed",
    "slot_given_up",
    "peer_rejected",
    "all_waiting",
    "no_progress",
}
PLANNED = ("planned failure",)


def _curve(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = ("step", "samples", "loss", "learning_rate")
    return [{k: v for k, v in line.items() if k in kept or k.startswith("eval_")} for line in lines]


def _gaps(steps: list[int]) -> str:
    return ", ".join(f"{a} then {b}" for a, b in itertools.pairwise(steps) if b != a + 1) or f"{steps[:1]} …"


def _tracebacks(text: str) -> list[str]:
    """Each with the lines that follow, up to one that is not indented and the two after it."""
    pattern = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t|+].*\n|\n)*(?:.*\n?){1,3}")
    return pattern.findall(text)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", required=True)
    parser.add_argument("--acts", type=int, default=15)
    parser.add_argument("--run-dir", type=Path, help="kept; one directory for each seed")
    parser.add_argument("--plan", action="store_true", help="only print it")
    arguments = parser.parse_args()
    failed = 0
    for seed in arguments.seed:
        plan = draw(seed, arguments.acts)
        print(plan, flush=True)
        if arguments.plan:
            continue
        directory = (arguments.run_dir or Path(tempfile.mkdtemp(prefix="campaign-"))) / str(seed)
        try:
            Campaign(plan, directory, lambda text: print(text, flush=True)).run()
            print(f"seed {seed}: PASSED", flush=True)
        except AssertionError as failure:
            failed += 1
            print(f"seed {seed}: FAILED in {directory}: {failure}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
