"""A job that runs `elastic-train run`, seen through its run directory and the kernel. Shared by the benchmarks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from elastic_train.launch.bond import die_with_parent

DEADLINE_S = 240.0

PACED = Path(__file__).with_name("paced.py")
"""A recipe whose steps take time but no processor."""


class Observed:
    """A running job.

    Args:
      job: the process of `elastic-train run`.
      run_dir: its run directory.
    """

    def __init__(self, job: subprocess.Popen[bytes], run_dir: Path) -> None:
        self.job, self.run_dir = job, run_dir

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The complete lines of a JSONL file so far."""
        path = self.run_dir / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait(self, what: str, found: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """Polls until `found` gives something true, and returns it."""
        deadline = time.monotonic() + deadline_s
        while not (result := found()):
            self.check(what)
            if time.monotonic() > deadline:
                raise SystemExit(f"waited {deadline_s:g} s for {what}")
            time.sleep(0.02)
        return result

    def check(self, what: str = "it to be measured") -> None:
        """Raises SystemExit if the job has ended."""
        if self.job.poll() is not None:
            said = self.run_dir.with_suffix(".out").read_text()[-2000:]
            raise SystemExit(f"the job ended while waiting for {what}\n{said}")

    def recovered(self, after: float, key: str, slot: int) -> dict[str, Any] | None:
        """The first event `recovered` since then in whose field `key` the slot is."""
        events = [e for e in self.lines("events.jsonl") if e["event"] == "recovered" and e["time"] > after]
        return next((event for event in events if slot in event[key]), None)

    def pid(self, slot: int) -> int:
        """Process id of the newest start of a slot's worker."""
        events = self.lines("events.jsonl")
        return [e for e in events if e["event"] == "worker_started" and e["slot"] == slot][-1]["pid"]

    def coordinator(self) -> int:
        """Process id of the newest coordinator."""
        return [e for e in self.lines("events.jsonl") if e["event"] == "generation_began"][-1]["pid"]

    def step(self) -> int:
        """Steps that were written down so far."""
        lines = self.lines("ledger.jsonl")
        return lines[-1]["step"] if lines else 0

    def stop(self, deadline_s: float = DEADLINE_S) -> int:
        """Asks for a stop after a commit; returns the exit code."""
        self.job.send_signal(signal.SIGINT)
        return self.job.wait(deadline_s)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())


@contextmanager
def running(
    recipe: Path | str,
    workers: int,
    steps: int,
    run_dir: Path,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Iterator[Observed]:
    """Starts a job, with our own environment by default; at the end of the block it is gone."""
    command = [sys.executable, "-m", "elastic_train.cli", "run", str(recipe), "--workers", str(workers)]
    command += ["--steps", str(steps), "--run-dir", str(run_dir), *options]
    with run_dir.with_suffix(".out").open("wb") as output:
        job = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(die_with_parent, os.getpid()),  # a benchmark that is killed leaves no job behind
        )
        try:
            yield Observed(job, run_dir)
        finally:
            if job.poll() is None:
                job.kill()
            job.wait()


def usage(pid: int) -> dict[str, float]:
    """What a process holds: resident memory in MiB, threads, file descriptors."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "rss_mib": int(status["VmRSS"].split()[0]) / 1024,
        "num_threads": int(status["Threads"]),
        "num_fds": len(os.listdir(f"/proc/{pid}/fd")),
    }


def plain_run(recipe: Path, steps: int, run_dir: Path, options: Sequence[str] = ()) -> dict[str, Any]:
    """The summary of an undisturbed run of so many steps in one plain process."""
    command = [sys.executable, str(recipe), "--steps", str(steps), "--run-dir", str(run_dir), *options]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise SystemExit(f"the undisturbed run failed:\n{ended.stderr[-3000:]}")
    return json.loads((run_dir / "summary.json").read_text())
