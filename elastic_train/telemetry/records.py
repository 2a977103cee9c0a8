"""The run directory: job.json, config, events, metrics, ledger, summary. One process writes it.

Every line of the `.jsonl` files is one JSON object; numbers that are not finite are written as null. A reader
may find a last line cut off: the writer was killed.

A *record* describes one committed step. Members send it as JSON:

| field | meaning |
|---|---|
| `step`, `samples` | optimizer updates and samples consumed, after this step |
| `loss`, `learning_rate` | of this step |
| `workers` | slots of the members that committed it |
| `epoch` | version of the member list |
| `time`, `step_time_s` | Unix time of the commit; seconds the step took |
| `phases` | seconds since the record before, by what the member that tells of it did |
| `first_sample`, `num_samples` | position of its first sample since the start of training; how many |
| `passes` | list of [pass, first position in that pass, count]: which part of which pass over the data |
| `pass_size` | samples of a pass: the length of the data set |
| `evaluation` | optional: means of an evaluation of the state after this step |
| `recovered` | optional, on an epoch's first record: fields of the event `recovered` |
| `skipped` | optional, true: parameters and optimizer stayed as they were, since the gradient was not finite |
| any other | a metric of the user's |

A line of metrics.jsonl has these fields, less those of the ledger. What `evaluation` holds is there as `eval_NAME`, and
`phases` is the sum over the steps since the line before, those of an epoch's first step left out: the event `recovered`
has them.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic_train.errors import UsageError
from elastic_train.telemetry.continuing import Past, cut_back, go_on
from elastic_train.telemetry.faults import find_faults, find_rejoins, time_lost
from elastic_train.telemetry.json_files import dump, read_lines, write_atomically
from elastic_train.telemetry.phase_times import added
from elastic_train.telemetry.summary import summarize
from elastic_train.telemetry.trackers import Tracker

FLUSH_INTERVAL_S = 0.1
"""Metrics and ledger reach the kernel this long after a commit at the latest."""

IDLE_INTERVAL_S = 5.0
"""How long the flushing thread sleeps at most while nothing is committed."""

MAX_HELD = 1024
"""How many records wait for a missing one before it is given up."""

STEP_TIMES = 101
"""From how many steps the median is taken that the cost of a fault is computed with while a job runs."""

_NOT_LOGGED = frozenset({"first_sample", "num_samples", "passes", "pass_size", "recovered", "evaluation", "phases"})
# What the time lost so far is computed from.
_COSTLY = frozenset(
    {
        "coordinator_lost",
        "generation_began",
        "worker_started",
        "worker_killed",
        "worker_died",
        "worker_finished",
        "user_code_failed",
        "gradient_not_finite",
        "state_differs",
        "steps_repeated",
        "abort_sent",
        "view_changed",
        "recovered",
    }
)


def is_run_directory(path: Path) -> bool:
    """Whether `path` holds a run: finished, running or broken off."""
    return (path / "job.json").is_file() or _has_content(path / "ledger.jsonl")


def is_written(path: Path) -> bool:
    """Whether a process on this host is writing the run directory `path`."""
    try:
        with (path / "events.jsonl").open("rb") as events:
            fcntl.flock(events, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def prepare_run_directory(path: Path, *, may_hold_run: bool = False) -> None:
    """Creates `path` and checks that a run can be written there. Leaves no trace but the directory.

    Args:
      path: the directory.
      may_hold_run: a run that it holds is gone on with.

    Raises:
      UsageError: it holds a run and may not, another process is writing it, it is a file, or cannot be written.
    """
    if is_run_directory(path):
        if not may_hold_run:
            raise UsageError(
                f"{path} holds a run already, and --resume never was given; give another --run-dir, or let it go on "
                "with --resume auto"
            )
        if is_written(path):
            raise UsageError(f"another job is writing to {path}; give another --run-dir, or stop that job")
    probe = path / f".probe-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unusable(path, error) from error


class RunDirectory:
    """Writes one job's run directory. All methods may be called from any thread.

    Args:
      path: the directory; see `prepare_run_directory` for what it may hold.
      log_every: steps between two lines of metrics.jsonl. Logged besides: the first and the last step, every step
        with an evaluation, and every step that was tried again after user code raised.
      resume: training goes on from this step, a checkpoint's (0 for the start): the directory may hold a run, and
        keeps what that has written up to this step; then `fill_up` must be called. None for a new run.
      continues: the job whose coordinator died goes on, in its next generation: all that it wrote counts.
      clock: gives the Unix time of events.
      trackers: get every line of metrics.jsonl, too; closed with this.
      on_note: told in words what a person should know at once: who is a member again, and which steps are taken again.

    Attributes:
      path: as above.
      past: what the run's earlier parts say; empty for a new run.

    Raises:
      UsageError: as `prepare_run_directory`, or another process is writing here.
    """

    def __init__(
        self,
        path: Path,
        *,
        log_every: int = 1,
        resume: int | None = None,
        continues: bool = False,
        clock: Callable[[], float] = time.time,
        trackers: Sequence[Tracker] = (),
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        prepare_run_directory(path, may_hold_run=continues or resume is not None)
        self._trackers = trackers
        self.path = path
        self._log_every = log_every
        self._clock = clock
        self._on_note = on_note
        self._lock = threading.RLock()
        try:
            (path / "logs").mkdir(exist_ok=True)
            with ExitStack() as opened:
                open_lines = lambda name: (path / f"{name}.jsonl").open("a", encoding="utf-8")  # noqa: E731
                self._events = opened.enter_context(open_lines("events"))
                fcntl.flock(self._events, fcntl.LOCK_EX | fcntl.LOCK_NB)
                past = go_on(path) if continues else Past() if resume is None else cut_back(path, resume)
                self._metrics, self._ledger = (opened.enter_context(open_lines(name)) for name in ("metrics", "ledger"))
                self._files = opened.pop_all()
        except BlockingIOError as error:
            message = f"another job is writing to {path}; give another --run-dir, or stop that job"
            raise UsageError(message) from error
        except OSError as error:
            raise _unusable(path, error) from error
        self.past = past
        self._step = past.step
        # Where training is; less than `_step` while steps that were lost are taken again.
        self._position, self._epoch = self._step, past.epoch
        self._newest: Mapping[str, Any] = {}
        self._step_times: deque[float] = deque(maxlen=STEP_TIMES)
        self._flushed_step = self._step
        self._held: dict[int, Mapping[str, Any]] = {}
        self._unlogged: Mapping[str, Any] | None = None
        self._has_logged = past.has_metrics
        self._phases: Mapping[str, float] = {}
        self._recovered = set(past.recovered) if continues else set[int]()
        self._logged_step = past.logged_step if continues else self._step
        self._retried: set[int] = set()
        self._event_time = past.time or -math.inf
        self._costly_events: list[dict[str, Any]] = []
        self._time_lost_s = 0.0
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._failure: OSError | None = None
        self._flusher = threading.Thread(target=self._flush_regularly, name="run-directory", daemon=True)
        self._flusher.start()

    def fill_up(self, step: int, records: Sequence[str]) -> None:
        """Writes what a resumed run's checkpoint knows of steps that were not written any more, and notes which steps
        are lost, and will be taken again.

        Args:
          step: the checkpoint's.
          records: JSON of records of steps up to that one, oldest first.
        """
        known = [json.loads(record) for record in records]
        if not self.past.last_step and not any(record["step"] == 1 for record in known):
            self._step = self._position = step  # only the checkpoint is left of the run: its files begin with it
        for record in known:
            if self._step < record["step"] <= step:
                self.commit({key: value for key, value in record.items() if key != "recovered"})
        if self._held:
            self.skip_gap()
        if self._step < step:
            self.event("ledger_gap", first_step=self._step + 1, last_step=step)
            self._step = self._position = step
        if self.past.last_step > step:
            lost = {"first_step": step + 1, "last_step": self.past.last_step}
            self.event("steps_repeated", **lost, epoch=self.past.epoch + 1)
        self.flush()

    def write_job(self, job: Mapping[str, Any]) -> None:
        """Writes job.json: from now on this is a run directory. `job` holds at least `address` (of the
        coordinator, None without one), `versions`, `start_time`, `recipe`, `workers` and `pid`."""
        write_atomically(self.path / "job.json", dump(job, indent=2) + "\n", 0o644)

    def write_secret(self, secret: str) -> None:
        """Writes what a caller of the coordinator must know, readable by this user only."""
        write_atomically(self.path / "secret", secret, 0o600)

    def write_config(self, toml: str) -> None:
        """Writes the resolved config."""
        write_atomically(self.path / "config.toml", toml, 0o644)

    def event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        """Appends a line to events.jsonl, flushes it and returns it.

        Its `time` is that of this call, and never less than that of the line before. A witness's own time goes
        into the field `reported_time`.
        """
        with self._lock:
            self._check()
            self._event_time = max(self._event_time, self._clock())
            line: dict[str, Any] = dict(time=self._event_time, event=name, **fields)
            self._events.write(dump(line) + "\n")
            self._events.flush()
            if name in _COSTLY:
                self._costly_events.append({key: value for key, value in line.items() if key != "traceback"})
            if name in ("user_code_failed", "gradient_not_finite", "state_differs"):
                self._retried.add(fields["step"] + 1)
            if name == "recovered":
                self._count_costs(line)
        return line

    def _count_costs(self, recovery: Mapping[str, Any]) -> None:
        step_time_s = statistics.median(self._step_times) if self._step_times else None
        rejoins = find_rejoins(self._costly_events, step_time_s)
        self._time_lost_s = time_lost(find_faults(self._costly_events, (), step_time_s), rejoins)
        if recovery["kind"] == "formed":
            return
        for rejoin in rejoins[len(rejoins) - len(recovery["came"]) :]:
            start = "" if rejoin.incarnation is None else f" (incarnation {rejoin.incarnation})"
            again = " again" if rejoin.incarnation else ""
            self._note(
                f"worker {rejoin.slot}{start} is a member{again} at step {rejoin.step}; "
                f"the others waited {rejoin.stall_s:.1f} s"
            )

    def _note(self, text: str) -> None:
        if self._on_note is not None:
            self._on_note(text)

    def commit(self, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Takes the record of one committed step (see above).

        Steps are written in order and once. A step that was written before is ignored: two members may send
        the same record. A step that comes too early is held back until the missing ones arrive; when
        `MAX_HELD` wait, the missing ones are given up with an event `ledger_gap`. Steps that come again in a
        newer epoch were lost and trained again: they are not written twice, but noted as `steps_repeated`.

        A line of the ledger whose batch crosses from one pass into the next has the pass of its first sample
        as `pass`, and in `crosses` all parts as [pass, first position, count]. Other lines have no `crosses`.

        Returns:
          The records written by this call, in order.
        """
        with self._lock:
            self._check()
            recovered = record.get("recovered")
            if recovered and recovered["epoch"] not in self._recovered:
                self._recovered.add(recovered["epoch"])
                # The time of this step began with the last commit of the members that are left.
                about = {name: record.get(name) for name in ("step", "step_time_s", "phases")}
                self.event("recovered", **{**recovered, **about, "reported_time": record["time"]})
            elif record.get("step_time_s") is not None:
                self._step_times.append(record["step_time_s"])
            if record["step"] <= self._step:
                if self._logged_step < record["step"] <= self.past.step:
                    self._logged_step = record["step"]
                    self._log_if_due(record)  # the ledger has it, and metrics.jsonl was broken off before
                self._note_repeat(record)
                return []
            self._held.setdefault(record["step"], record)
            written = self._write_held()
            if len(self._held) > MAX_HELD:
                written += self.skip_gap()
            if written:
                self._dirty.set()
            return written

    @property
    def gap(self) -> tuple[int, int] | None:
        """The first and the last step missing before the oldest record held back; None if none is."""
        with self._lock:
            return (self._step + 1, min(self._held) - 1) if self._held else None

    def skip_gap(self) -> list[Mapping[str, Any]]:
        """Gives the missing steps up, with an event `ledger_gap`. Returns the records this let through."""
        with self._lock:
            if not self._held:
                return []
            first, last = self._step + 1, min(self._held) - 1
            self.event("ledger_gap", first_step=first, last_step=last)
            self._step = last
            self._dirty.set()
            return self._write_held()

    @property
    def flushed_step(self) -> int:
        """All steps up to this one are written and will survive the end of this process."""
        with self._lock:
            return self._flushed_step

    @property
    def newest(self) -> Mapping[str, Any]:
        """The record of the step that training is at. While steps are taken again it is none of those written."""
        with self._lock:
            return self._newest

    @property
    def time_lost_s(self) -> float:
        """Seconds lost to faults and rejoins so far; brought up to date at each recovery."""
        with self._lock:
            return self._time_lost_s

    def flush(self) -> None:
        """Hands all lines to the kernel now."""
        with self._lock:
            self._check()
            self._dirty.clear()
            self._ledger.flush()
            self._metrics.flush()
            self._flushed_step = self._step

    def summary(self, end: Mapping[str, Any]) -> dict[str, Any]:
        """Writes summary.json and returns its content. `end`: see `summarize`; `time` defaults to now.

        No step is committed afterwards.
        """
        with self._lock:
            self._finish_lines()
            events, commits = (read_lines(self.path / f"{name}.jsonl") for name in ("events", "metrics"))
            reached: dict[str, Any] = {}
            if self._position < self._step:  # ended while steps were taken again
                reached = {"step": self._position, "samples": self._newest["samples"]}
                reached["metrics"] = {"loss": self._newest["loss"]}
            summary = summarize(events, commits, {"time": self._clock(), **reached, **end})
            write_atomically(self.path / "summary.json", dump(summary, indent=2) + "\n", 0o644)
        return summary

    def close(self) -> None:
        """Writes what is still held back and closes the files. Does nothing the second time."""
        with self._lock:
            if self._closing.is_set():
                return
            try:
                self._finish_lines()
            finally:
                self._closing.set()
                self._dirty.set()
                self._files.close()
            for tracker in self._trackers:
                tracker.close()
        self._flusher.join(timeout=10)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish_lines(self) -> None:
        while self._held:
            self.skip_gap()
        if self._unlogged is not None:
            self._log(self._unlogged)
        self.flush()

    def _write_held(self) -> list[Mapping[str, Any]]:
        written = []
        while self._step + 1 in self._held:
            record = self._held.pop(self._step + 1)
            self._write(record)
            written.append(record)
        return written

    def _write(self, record: Mapping[str, Any]) -> None:
        self._step = self._position = record["step"]
        self._newest = record
        self._epoch = record["epoch"]
        passes = record["passes"]
        line = {
            "step": record["step"],
            "pass": passes[0][0],
            "first_sample": record["first_sample"],
            "num_samples": record["num_samples"],
            "pass_size": record["pass_size"],
            "workers": record["workers"],
        }
        if record.get("skipped"):
            line["skipped"] = True
        if len(passes) > 1:
            line["crosses"] = passes
        self._ledger.write(dump(line) + "\n")
        self._log_if_due(record)

    def _log_if_due(self, record: Mapping[str, Any]) -> None:
        self._unlogged = record
        if "recovered" not in record:
            self._phases = added(self._phases, record.get("phases") or {})
        is_special = not self._has_logged or "evaluation" in record or record["step"] in self._retried
        if is_special or record["step"] % self._log_every == 0:
            self._log(record)

    def _log(self, record: Mapping[str, Any]) -> None:
        line = {key: value for key, value in record.items() if key not in _NOT_LOGGED}
        line |= {f"eval_{name}": value for name, value in record.get("evaluation", {}).items()}
        if self._phases:
            line["phases"] = {name: round(seconds, 6) for name, seconds in self._phases.items()}
            self._phases = {}
        self._metrics.write(dump(line) + "\n")
        for tracker in self._trackers:
            tracker.log(line)
        self._unlogged, self._has_logged = None, True

    def _note_repeat(self, record: Mapping[str, Any]) -> None:
        """A newer epoch that begins at an earlier step takes steps again; late records are of no newer epoch."""
        step, epoch = record["step"], record["epoch"]
        if epoch > self._epoch and step <= self._position:
            self.event("steps_repeated", first_step=step, last_step=self._position, epoch=epoch)
            self._note(f"steps {step} to {self._position} are trained again: no member that had them is left")
            self._position, self._newest = step, record
        elif epoch >= self._epoch and step > self._position:
            self._position, self._newest = step, record
        self._epoch = max(self._epoch, epoch)

    def _flush_regularly(self) -> None:
        while not self._closing.is_set():
            if not self._dirty.wait(IDLE_INTERVAL_S):
                continue
            if self._closing.wait(FLUSH_INTERVAL_S):
                return
            with self._lock:
                if self._closing.is_set():
                    return
                try:
                    self.flush()
                except OSError as error:
                    self._failure = error  # raised by the next call: this thread has no caller
                    return

    def _check(self) -> None:
        if self._failure:
            raise self._failure


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _unusable(path: Path, error: OSError) -> UsageError:
    reason = "it is a file" if path.is_file() else error.strerror or str(error)
    return UsageError(f"cannot write the run directory {path}: {reason}; give a --run-dir that can be written")
