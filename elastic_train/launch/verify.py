"""`elastic-train verify-faults`: a recipe undisturbed, then under the standard faults, and what that proves."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from elastic_train.chaos.schedule import Planned, schedule_toml
from elastic_train.chaos.standard import (
    NOT_COMPARABLE,
    Disturbed,
    Pace,
    Verdict,
    fits,
    format_verdict,
    gap_within,
    judge,
    pace,
    standard_faults,
    steps_needed,
)
from elastic_train.data.ledger_files import verify_run
from elastic_train.errors import ElasticTrainError, UsageError
from elastic_train.launch.check import Checked, check
from elastic_train.launch.devices import pick_platform, visible_gpus
from elastic_train.launch.environment import TRACE_VARIABLE
from elastic_train.launch.job import run_job
from elastic_train.launch.options import JobOptions
from elastic_train.telemetry.barriers import verify_barriers
from elastic_train.telemetry.compare import compare, format_comparison, read_run
from elastic_train.telemetry.json_files import dump, read_lines, write_atomically
from elastic_train.telemetry.records import is_run_directory
from elastic_train.telemetry.report import SUMMARY
from elastic_train.telemetry.run_files import read_summary
from elastic_train.terminal import say

CPU_WORKERS = 3
"""On CPU, if `--workers` is not given: one may be lost, and the others are still several."""

MEASURED_STEPS = 40
"""Length of the run that only tells how fast this recipe is here."""

MAX_ATTEMPTS = 3
"""How often the two runs are made, each time twice as long, while faults find no occasion: the machine may be busier
than it was when the length was chosen."""


class Verified(NamedTuple):
    """The verdict, the same in words, and the exit code for it."""

    verdict: Verdict | None
    text: str
    exit_code: int


class RunFailed(ElasticTrainError):
    """A run without faults did not reach its end: there is nothing to compare with."""

    def __init__(self, name: str, exit_code: int) -> None:
        super().__init__(f"the {name} run ended with exit code {exit_code}; what it printed is above")
        self.exit_code = exit_code


def verify_faults(options: JobOptions, environ: Mapping[str, str]) -> Verified:
    """Runs the recipe without and with faults below `options.run_dir`; again and longer if faults found no occasion.

    Raises:
      RunFailed: a run without faults did not reach its end.
      ElasticTrainError: as `run_job`.
    """
    platform = pick_platform(environ)
    workers = options.workers or (len(visible_gpus(environ)) if platform == "cuda" else CPU_WORKERS)
    if workers < 2:
        raise UsageError(
            f"verify-faults with {workers} worker: nobody would be left when it is killed. "
            "Use --workers 2 or more; with one GPU, CUDA_VISIBLE_DEVICES=0,0,0 has three workers share it"
        )
    root = options.run_dir.resolve()
    if is_run_directory(root) or (root / "undisturbed").exists():  # the first one that is made
        raise UsageError(f"{root} holds runs already; give another --run-dir, or remove that directory")
    # Every step is to be seen, and each run keeps its checkpoints to itself. Neither has a part in the numbers.
    own = ("log_every=1", "checkpoint.path=none")
    options = dataclasses.replace(options, workers=workers, overrides=(*options.overrides, *own))
    if options.steps is not None and not fits(workers, options.steps):
        num_faults = len(standard_faults(workers, 1))
        raise UsageError(f"--steps {options.steps}: too few for the {num_faults} faults; use more")
    checked = check(options.check_request(workers), environ)
    if checked.batch_policy != "fixed":
        _say(f"exactness is {NOT_COMPARABLE}; it is judged whether every fault is survived")
    steps = options.steps
    if steps is None:
        _say(f"measuring: {MEASURED_STEPS} steps without faults")
        measured = _pace(_run(options, "measure", MEASURED_STEPS, environ))
        steps = steps_needed(measured.gap(checked.faults.keepalive_s))
    promised = platform == "cpu" or checked.deterministic
    attempt = 1
    found = _attempt(options, steps, workers, promised, checked, environ)
    while (
        options.steps is None and attempt < MAX_ATTEMPTS and found.verdict is not None and found.verdict.is_incomplete
    ):
        attempt, steps = attempt + 1, 2 * steps
        _say(f"{len(found.verdict.missed)} faults found no occasion: again with {steps} steps")
        found = _attempt(options, steps, workers, promised, checked, environ, f"-{attempt}")
    if found.verdict is not None:
        write_atomically(root / "verify-faults.json", dump(found.verdict.as_json(), indent=2) + "\n", 0o644)
    return found


def _attempt(
    options: JobOptions,
    steps: int,
    workers: int,
    promised: bool,
    checked: Checked,
    environ: Mapping[str, str],
    suffix: str = "",
) -> Verified:
    """Both runs of so many steps, in directories whose names end in `suffix`."""
    root = options.run_dir.resolve()
    _say(f"undisturbed: {steps} steps with {workers} workers")
    undisturbed = _run(options, f"undisturbed{suffix}", steps, environ)
    gap = min(_pace(undisturbed).gap(checked.faults.keepalive_s), gap_within(steps))
    faults = standard_faults(workers, gap, checked.faults.keepalive_s)
    chaos = root / "chaos.toml"
    text = schedule_toml([Planned((fault,)) for fault in faults])
    chaos.write_text(f"patient = true\n\n{text}", encoding="utf-8")
    _say(f"disturbed: the same with {len(faults)} faults ({chaos})")
    disturbed = root / f"disturbed{suffix}"
    job = dataclasses.replace(options, steps=steps, run_dir=disturbed, chaos=chaos)
    with contextlib.redirect_stdout(sys.stderr):
        exit_code = run_job(job, {**environ, TRACE_VARIABLE: "1"})
    if exit_code == 130:
        return Verified(None, "verify-faults: stopped", exit_code)
    return _verdict(undisturbed, disturbed, workers, promised, checked)


def _verdict(undisturbed: Path, disturbed: Path, workers: int, promised: bool, checked: Checked) -> Verified:
    one, other = read_run(undisturbed), read_run(disturbed)
    comparison = compare(one, other)
    seen = Disturbed(
        read_lines(disturbed / "events.jsonl"),
        other.metrics,
        other.ledger,
        read_summary(disturbed, SUMMARY),
        verify_run(disturbed),
        verify_barriers(disturbed),
    )
    calm_events, comparable = read_lines(undisturbed / "events.jsonl"), checked.batch_policy == "fixed"
    verdict = judge(calm_events, one.metrics, seen, comparison, workers, promised, comparable)
    text = format_verdict(verdict, format_comparison(comparison, one, other))
    return Verified(verdict, text, 0 if verdict.passed else 1)


def _run(options: JobOptions, name: str, steps: int, environ: Mapping[str, str]) -> Path:
    """One run without faults; returns its directory."""
    run_dir = options.run_dir.resolve() / name
    with contextlib.redirect_stdout(sys.stderr):
        exit_code = run_job(dataclasses.replace(options, steps=steps, run_dir=run_dir), environ)
    if exit_code != 0:
        raise RunFailed(name, exit_code)
    return run_dir


def _pace(run_dir: Path) -> Pace:
    try:
        return pace(read_lines(run_dir / "events.jsonl"), read_lines(run_dir / "metrics.jsonl"))
    except ValueError as error:
        raise UsageError(f"{run_dir} is too short to tell how long a step takes: {error}; use more --steps") from error


def _say(text: str) -> None:
    say(f"verify-faults: {text}", sys.stderr)
