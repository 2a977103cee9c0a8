"""Train `digits_mlp` on three workers, kill one of them on the way, and count what was lost.

    python -m recipes.demo

The run directory is `runs/demo-…` below the current directory. The exit code is that of the run, or 1 if
something was lost.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).with_name("digits_mlp.py")
# What the console script `elastic-train` runs; this way it is found without an activated environment.
ELASTIC_TRAIN = [sys.executable, "-c", "import sys; from elastic_train.cli import main; sys.exit(main())"]

STEPS = 2000
"""Long enough for the killed worker to come back while the others still train."""

KILLED_SLOT = 1
KILL_AFTER_STEP = 60

START_TIMEOUT_S = 300.0
STATUS_TIMEOUT_S = 30.0
RUN_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 30.0


def main() -> int:
    run_directory = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    print(f"Three workers train {RECIPE.stem}; worker {KILLED_SLOT} gets SIGKILL after step {KILL_AFTER_STEP}.")
    sys.stdout.flush()
    command = ["run", str(RECIPE), "--workers", "3", "--steps", str(STEPS), "--run-dir", str(run_directory)]
    with running([*ELASTIC_TRAIN, *command]) as job:
        wait_for_step(job, run_directory / "ledger.jsonl")
        os.kill(member_pid(run_directory), signal.SIGKILL)
        exit_code = job.wait(timeout=RUN_TIMEOUT_S)
    return exit_code or report(run_directory)


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Starts `command`, and sees to it that it is gone at the end of the block."""
    job = subprocess.Popen(command)
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()
            try:
                job.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()


def wait_for_step(job: subprocess.Popen[bytes], ledger: Path) -> None:
    """Returns once step `KILL_AFTER_STEP` is in the ledger. Ends the demo if it never gets there."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ledger.exists() or len(read_lines(ledger)) < KILL_AFTER_STEP:
        if job.poll() is not None:
            sys.exit(job.returncode or f"The run ended before step {KILL_AFTER_STEP}; nothing was killed.")
        if time.monotonic() > deadline:
            sys.exit(f"Step {KILL_AFTER_STEP} was not reached within {START_TIMEOUT_S:.0f} s; see {ledger.parent}")
        time.sleep(0.02)


def member_pid(run_directory: Path) -> int:
    """The process that fills `KILLED_SLOT` now, as `elastic-train status` says."""
    answer = subprocess.run(
        [*ELASTIC_TRAIN, "status", str(run_directory), "--json"],
        check=True,
        stdout=subprocess.PIPE,
        timeout=STATUS_TIMEOUT_S,
    )
    return next(w["pid"] for w in json.loads(answer.stdout)["workers"] if w["slot"] == KILLED_SLOT)


def report(run_directory: Path) -> int:
    """Prints what was lost, counted from the run directory. Returns 0 if nothing was, else 1."""
    commits = read_lines(run_directory / "ledger.jsonl")
    summary = json.loads((run_directory / "summary.json").read_text())
    each_step_once = [commit["step"] for commit in commits] == list(range(1, STEPS + 1))
    each_sample_once = commits[0]["first_sample"] == 0 and all(
        before["first_sample"] + before["num_samples"] == after["first_sample"] for before, after in pairwise(commits)
    )
    once = "each once" if each_step_once else "NOT each once"
    print(f"\nWhat was lost, counted from {run_directory}:")
    print(f"  steps    {len(commits)} of {STEPS} committed, {once}")
    print(f"  samples  {'none left out, none used twice' if each_sample_once else 'LEFT OUT OR USED TWICE'}")
    for fault in summary["faults"]:
        seconds = "unknown" if fault["total_s"] is None else f"{fault['total_s']:.2f} s"
        print(f"  time     worker {fault['slot']} {fault['kind']}: {seconds} until the next committed step")
    back = first_step_back(commits)
    print(f"  worker   {KILLED_SLOT} {f'took part again from step {back} on' if back else 'DID NOT COME BACK'}")
    return 0 if each_step_once and each_sample_once and summary["faults"] and back else 1


def first_step_back(commits: list[dict[str, Any]]) -> int | None:
    """The first step that the killed slot took part in after one that it did not; None if it stayed away."""
    took_part = [(commit["step"], KILLED_SLOT in commit["workers"]) for commit in commits]
    missed = next((step for step, present in took_part if not present), None)
    return missed and next((step for step, present in took_part if step > missed and present), None)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that another process may be writing to."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


if __name__ == "__main__":
    sys.exit(main())
