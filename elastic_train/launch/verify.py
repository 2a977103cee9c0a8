"""`elastic-train verify-faults`: a recipe under the standard faults, then undisturbed, and what that proves."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from elastic_train.chaos.schedule import Planned, schedule_toml
from elastic_train.chaos.standard import (
    FIRST_STEP,
    NOT_COMPARABLE,
    Disturbed,
    Pace,
    Verdict,
    fits,
    format_verdict,
    gap_within,
    has_ended,
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
    """Runs the recipe with and without faults below `options.run_dir`; again and longer if faults found no occasion.

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
    if is_run_directory(root) or any((root / name).exists() for name in ("measure", "disturbed", "undisturbed")):
        raise UsageError(f"{root} holds runs already; give another --run-dir, or remove that directory")
    # Every step is to be seen, and each run keeps its checkpoints to itself. Neither has a part in the numbers.
    own = ("log_every=1", "checkpoint.path=none")
    options = dataclasses.replace(options, workers=workers, overrides=(*options.overrides, *own))
    num_faults = len(standard_faults(workers, 1))
    if options.steps is not None and not fits(workers, options.steps):
        raise UsageError(f"--steps {options.steps}: too few for the {num_faults} faults; use more")
    checked = check(options.check_request(workers), environ)
    if checked.batch_policy != "fixed":
        _say(f"exactness is {NOT_COMPARABLE}; it is judged whether every fault is survived")
    steps, measured = options.steps, None
    if steps is None:
        _say(
            f"first {MEASURED_STEPS} steps without faults, to see how fast the recipe is here; then a run with "
            f"{num_faults} faults, which ends soon after the last one was survived; then as many steps without faults, "
            "to compare with"
        )
        measured = _measure(options, checked.faults.keepalive_s, environ)
        steps = steps_needed(measured.pace.gap(checked.faults.keepalive_s))
    else:
        _say(
            f"a run of {steps} steps with {num_faults} faults, then one without, to compare with. Without --steps they "
            "would be no longer than needed, and a first one would tell how long that is"
        )
    promised = platform == "cpu" or checked.deterministic
    attempt = 1
    found = _attempt(options, steps, workers, promised, checked, environ, measured)
    while (
        options.steps is None and attempt < MAX_ATTEMPTS and found.verdict is not None and found.verdict.is_incomplete
    ):
        attempt, steps = attempt + 1, 2 * steps
        _say(f"{len(found.verdict.missed)} faults found no occasion: again with {steps} steps")
        found = _attempt(options, steps, workers, promised, checked, environ, measured, f"-{attempt}")
    if found.verdict is not None:
        write_atomically(root / "verify-faults.json", dump(found.verdict.as_json(), indent=2) + "\n", 0o644)
    return found


class Measured(NamedTuple):
    """What the first run tells: how fast the recipe is, and how long a job takes besides its steps."""

    pace: Pace
    overhead_s: float


def _measure(options: JobOptions, keepalive_s: float, environ: Mapping[str, str]) -> Measured:
    began = time.monotonic()
    found = _pace(_run(options, "measure", MEASURED_STEPS, environ))
    overhead_s = max(0.0, time.monotonic() - began - MEASURED_STEPS * found.step_s)
    disturbed_s = overhead_s + found.disturbed_s(keepalive_s)
    _say(
        f"a step takes {found.step_s:.3g} s here, and a worker {found.start_s:.1f} s to start: the run with faults "
        f"takes about {in_words(disturbed_s)}, the one without no longer, so that both "
        f"take {in_words(2 * disturbed_s)} at most"
    )
    return Measured(found, overhead_s)


def in_words(seconds: float) -> str:
    """About so long.

    >>> [in_words(seconds) for seconds in (0.2, 47.0, 100.0, 6000.0)]
    ['1 s', '50 s', '2 min', '1.7 h']
    """
    if seconds < 90:
        return f"{max(1, round(seconds) if seconds < 10 else round(seconds, -1)):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _attempt(
    options: JobOptions,
    steps: int,
    workers: int,
    promised: bool,
    checked: Checked,
    environ: Mapping[str, str],
    measured: Measured | None,
    suffix: str = "",
) -> Verified:
    """Both runs, in directories whose names end in `suffix`: of so many steps if that was asked for, else of as many as
    the faults take, up to that number. Settings are the same in both, the number of steps among them."""
    root = options.run_dir.resolve()
    faults = standard_faults(workers, gap_within(steps), checked.faults.keepalive_s)
    stops = options.steps is None
    ends = f"stop_after_steps = {FIRST_STEP}\n" if stops else ""
    chaos = root / "chaos.toml"
    text = schedule_toml([Planned((fault,)) for fault in faults])
    root.mkdir(parents=True, exist_ok=True)
    chaos.write_text(f"patient = true\n{ends}\n{text}", encoding="utf-8")
    at_most = "at most " if stops else ""
    _say(f"disturbed: {at_most}{steps} steps with {workers} workers and {len(faults)} faults ({chaos})")
    disturbed = root / f"disturbed{suffix}"
    job = dataclasses.replace(options, steps=steps, run_dir=disturbed, chaos=chaos)
    with contextlib.redirect_stdout(sys.stderr):
        exit_code = run_job(job, {**environ, TRACE_VARIABLE: "1"})
    if exit_code == 130 and not has_ended(read_lines(disturbed / "events.jsonl"), read_summary(disturbed, SUMMARY)):
        return Verified(None, "verify-faults: stopped", exit_code)
    reached = max((line["step"] for line in read_lines(disturbed / "ledger.jsonl")), default=0)
    last_step = max(reached, FIRST_STEP)  # a run that was broken off early is compared as far as it came
    takes = "" if measured is None else f", in about {in_words(measured.overhead_s + last_step * measured.pace.step_s)}"
    _say(f"undisturbed: the same {last_step} steps without faults{takes}")
    undisturbed = _run(options, f"undisturbed{suffix}", steps, environ, last_step)
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


def _run(options: JobOptions, name: str, steps: int, environ: Mapping[str, str], last_step: int = 0) -> Path:
    """One run without faults, to its end or to `last_step`; returns its directory."""
    run_dir = options.run_dir.resolve() / name
    last_step = last_step if last_step < steps else 0
    with contextlib.redirect_stdout(sys.stderr):
        exit_code = run_job(dataclasses.replace(options, steps=steps, run_dir=run_dir, last_step=last_step), environ)
    if exit_code != 0 and not (exit_code == 130 and last_step and _is_there(run_dir, last_step)):
        raise RunFailed(name, exit_code)
    return run_dir


def _is_there(run_dir: Path, last_step: int) -> bool:
    """Whether a run has stopped where it was meant to, and not since somebody has asked for it."""
    summary = read_summary(run_dir, SUMMARY)
    return summary.get("step") == last_step and bool(summary.get("state_sha256"))


def _pace(run_dir: Path) -> Pace:
    try:
        return pace(read_lines(run_dir / "events.jsonl"), read_lines(run_dir / "metrics.jsonl"))
    except ValueError as error:
        raise UsageError(f"{run_dir} is too short to tell how long a step takes: {error}; use more --steps") from error


def _say(text: str) -> None:
    say(f"verify-faults: {text}", sys.stderr)
