"""The run directory: job.json, config, events, metrics, ledger, summary. One process writes it.

Every line of the `.jsonl` files is one JSON object; numbers that are not finite are written as null. A reader
may find a last line cut off: the writer was killed.

What members send of a committed step, and which lines that makes, is in `step_lines`.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic_train.errors import UsageError
from elastic_train.telemetry.continuing import Past, cut_back, go_on
from elastic_train.telemetry.costs import Costs
from elastic_train.telemetry.json_files import dump, read_lines, unreadable, write_atomically
from elastic_train.telemetry.step_lines import StepLines
from elastic_train.telemetry.summary import summarize
from elastic_train.telemetry.trackers import Tracker

FLUSH_INTERVAL_S = 0.1
"""Metrics and ledger reach the kernel this long after a commit at the latest."""

IDLE_INTERVAL_S = 5.0
"""How long the flushing thread sleeps at most while nothing is committed."""

MAX_HELD = 1024
"""How many records wait for a missing one before it is given up."""


def is_run_directory(path: Path) -> bool:
    """Whether `path` holds a run: finished, running or broken off."""
    # Unlike those of `Path`, these raise nothing of a name that is too long, or a place that may not be looked at.
    return os.path.isfile(path / "job.json") or _has_content(path / "ledger.jsonl")


def is_written(path: Path) -> bool:
    """Whether a process on this host is writing the run directory `path`. Raises UsageError if nobody may look."""
    try:
        with (path / "events.jsonl").open("rb") as events:
            fcntl.flock(events, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        raise unreadable(path / "events.jsonl", error) from error
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
        self.path = path
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
                metrics, ledger = (opened.enter_context(open_lines(name)) for name in ("metrics", "ledger"))
                self._files = opened.pop_all()
        except BlockingIOError as error:
            message = f"another job is writing to {path}; give another --run-dir, or stop that job"
            raise UsageError(message) from error
        except OSError as error:
            raise _unusable(path, error) from error
        self.past = past
        self._lines = StepLines(metrics, ledger, log_every, past.has_metrics, trackers)
        self._step = past.step
        # Where training is; less than `_step` while steps that were lost are taken again.
        self._position, self._epoch = self._step, past.epoch
        self._newest: Mapping[str, Any] = {}
        self._costs = Costs()
        self._flushed_step = self._step
        self._held: dict[int, Mapping[str, Any]] = {}
        self._recovered = set(past.recovered) if continues else set[int]()
        self._logged_step = past.logged_step if continues else self._step
        self._event_time = past.time or -math.inf
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
            if name in ("user_code_failed", "gradient_not_finite", "state_differs"):
                self._lines.retried(fields["step"] + 1)
            for text in self._costs.event(line):
                self._note(text)
        return line

    def _note(self, text: str) -> None:
        if self._on_note is not None:
            self._on_note(text)

    def commit(self, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Takes the record of one committed step; see `step_lines`.

        Steps are written in order and once. A step that was written before is ignored: two members may send
        the same record. A step that comes too early is held back until the missing ones arrive; when
        `MAX_HELD` wait, the missing ones are given up with an event `ledger_gap`. Steps that come again in a
        newer epoch were lost and trained again: they are not written twice, but noted as `steps_repeated`.

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
                self._costs.step(record["step_time_s"])
            if record["step"] <= self._step:
                if self._logged_step < record["step"] <= self.past.step:
                    self._logged_step = record["step"]
                    self._lines.log_if_due(record)  # the ledger has it, and metrics.jsonl was broken off before
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
            return self._costs.time_lost_s

    def flush(self) -> None:
        """Hands all lines to the kernel now."""
        with self._lock:
            self._check()
            self._dirty.clear()
            self._lines.flush()
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
            self._lines.close_trackers()
        self._flusher.join(timeout=10)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish_lines(self) -> None:
        while self._held:
            self.skip_gap()
        self._lines.finish()
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
        self._lines.write(record)

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
    return os.path.isfile(path) and os.path.getsize(path) > 0


def _unusable(path: Path, error: OSError) -> UsageError:
    reason = "it is a file" if os.path.isfile(path) else error.strerror or str(error)
    return UsageError(f"cannot write the run directory {path}: {reason}; give a --run-dir that can be written")
