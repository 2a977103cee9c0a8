"""Trains under random faults for a while, then proves that nothing happened to the numbers.

    python benchmarks/soak.py --seconds 1800 --workers 4 --seed 1 --run-dir runs/soak --out benchmarks/results/NAME.json

1. Fault-free runs with 1 … N workers give the step time at each number of members (`--no-reference`: taken from the
   calm stretches of the disturbed run, which are few).
2. The job runs for `--seconds` under faults of the kinds 1 to 9 and 12 of the catalogue (or those of `--kinds`), one
   about every `--every` seconds, and is then asked to stop.
3. One plain process takes as many steps without faults; digests are compared, the ledger is verified, and the member
   lists that every barrier gave.

Exit code 0 if the run was exact and every fault survived; throughput is reported, not judged.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import report
from observed import PACED, Observed, plain_run, running, usage

from elastic_train.chaos.throughput import calm_step_times, throughput_kept
from elastic_train.data.ledger_files import verify_run
from elastic_train.telemetry.barriers import verify_barriers

KINDS = {
    "kill": 12,  # row 1
    "kill_rebuilding": 16,  # rows 2 and 4
    "kill_slot_0": 12,  # row 3
    "kill_two": 4,  # row 4
    "kill_all_but_one": 4,
    "kill_joiner": 6,  # row 5
    "kill_donor": 6,
    "kill_starting": 12,  # row 6
    "stop_long": 12,  # row 7
    "raise": 12,  # row 8
    "raise_always": 12,  # row 9
    "deadlock": 12,  # row 12
}
"""Scenarios and their weights: every row of the catalogue as often as the others."""

CHECK_EVERY_STEP = "faults.fingerprint_every=1"
"""A flipped bit is found in the step at which it was flipped, so that nothing is trained on it."""

QUIET_S = 20.0
"""Without new faults at the end, so that the last ones are survived, too."""

SETTINGS = (
    "--set",
    "faults.keepalive_s=0.6",
    "faults.doubt_timeout_s=1.3",
    "faults.step_timeout_s=1.5",
    "--set",
    "faults.first_step_timeout_s=20.0",
    "faults.first_backoff_s=0.1",
)
"""Limits for steps of a tenth of a second. The defaults are for steps of seconds."""

MANY_STEPS = 10_000_000


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--every", type=float, default=15.0, help="mean seconds between two faults")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", nargs="*", default=[], help="kinds to leave out")
    parser.add_argument("--kinds", nargs="*", default=[], help="only these, equally often")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--reference-seconds", type=float, default=20.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of all runs")
    parser.add_argument("--run-dir", type=Path, required=True)
    arguments = parser.parse_args()
    about = report.about()
    arguments.run_dir.mkdir(parents=True)
    calm = {} if arguments.no_reference else reference(arguments)
    found = soak(arguments, calm)
    report.write({**about, **found}, arguments.out)
    return 0 if found["exact"] and found["all_survived"] else 1


def reference(arguments: argparse.Namespace) -> dict[int, float]:
    """Step times without faults, in seconds, by the number of members."""
    times = {}
    for workers in range(1, arguments.workers + 1):
        run_dir = arguments.run_dir / f"reference-{workers}"
        with running(PACED, workers, MANY_STEPS, run_dir, (*SETTINGS, *given(arguments))) as job:
            job.wait("a step", job.step)
            time.sleep(arguments.reference_seconds)
            job.stop()
            times |= calm_step_times(job.lines("events.jsonl"), job.lines("metrics.jsonl"))
        print(f"{workers} workers: {times.get(workers, float('nan')):.4f} s a step", file=sys.stderr, flush=True)
    return times


def soak(arguments: argparse.Namespace, calm: dict[int, float]) -> dict[str, Any]:
    """Runs the job under faults, and reports."""
    run_dir, chaos = arguments.run_dir / "soak", arguments.run_dir / "chaos.toml"
    chaos.write_text(chaos_toml(arguments))
    checked = ("--set", CHECK_EVERY_STEP) if "flip" in arguments.kinds else ()
    options = (*SETTINGS, *checked, *given(arguments), "--chaos", str(chaos))
    with running(PACED, arguments.workers, MANY_STEPS, run_dir, options) as job:
        job.wait("a step of all", lambda: job.step() > 20)
        began, before = time.monotonic(), usage(job.job.pid)
        while time.monotonic() < began + arguments.seconds and job.job.poll() is None:
            time.sleep(0.5)
        after = usage(job.job.pid) if job.job.poll() is None else {}
        exit_code = job.stop() if job.job.poll() is None else job.job.returncode
        summary = job.summary()
        options = (*given(arguments), "--set", "sample_s=0")
        alone = plain_run(PACED, summary["step"], arguments.run_dir / "alone", options)
        return {
            "seconds": arguments.seconds,
            "workers": arguments.workers,
            "exit_code": exit_code,
            **proofs(job, summary, alone),
            **survived(job, summary),
            "throughput": throughput(job, calm),
            "goodput": summary["goodput"],
            "coordinator": {"at_start": before, "at_end": after},
        }


def given(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The options of a run that were asked for here."""
    return ("--set", *arguments.set) if arguments.set else ()


def chaos_toml(arguments: argparse.Namespace) -> str:
    chosen = dict.fromkeys(arguments.kinds, 1) or KINDS
    kinds = {name: weight for name, weight in chosen.items() if name not in arguments.without}
    return "\n".join(
        [
            f"seed = {arguments.seed}",
            "[random]",
            f"every_s = {arguments.every}",
            f"until_s = {arguments.seconds - QUIET_S}",
            f"max_down = {arguments.workers - 1}",
            f"kinds = {{ {', '.join(f'{name} = {weight}' for name, weight in kinds.items())} }}",
            "",
        ]
    )


def proofs(job: Observed, summary: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """Whether the run is the computation of the undisturbed one, and each proof of that."""
    names = ("params_sha256", "state_sha256")
    events = [event["event"] for event in job.lines("events.jsonl")]
    checks = {
        "digests_equal": all(summary[name] == alone[name] for name in names),
        "members_agree": "digests_differ" not in events,
        "no_step_lost": not summary["steps_lost"] and "group_lost" not in events,
        "ledger_proven": verify_run(job.run_dir).proven,
        "barriers_proven": verify_barriers(job.run_dir).proven,
    }
    digests = {name: {"soak": summary[name], "undisturbed": alone[name]} for name in names}
    return {"exact": all(checks.values()), "proofs": checks, "steps": summary["step"], **digests}


def survived(job: Observed, summary: dict[str, Any]) -> dict[str, Any]:
    """Which faults there were, and what each cost."""
    events = job.lines("events.jsonl")
    injected = [event for event in events if event["event"] == "fault_injected"]
    missed = [event["faults"] for event in events if event["event"] == "faults_missed"]
    given_up = [event["slot"] for event in events if event["event"] == "slot_given_up"]
    costs: dict[str, list[float]] = {}
    for fault in summary["faults"]:
        costs.setdefault(fault["kind"], []).append(fault["total_s"] or 0.0)
    stalls = [rejoin["stall_s"] for rejoin in summary["rejoins"]]
    members = sorted({len(line["workers"]) for line in job.lines("ledger.jsonl")[-5:]})
    return {
        "all_survived": summary["status"] == "stopped" and not given_up,
        "slots_given_up": given_up,
        "num_faults": len(injected),
        "by_scenario": dict(Counter(event["scenario"] for event in injected)),
        "by_kind_and_place": dict(Counter(f"{event['kind']} at {event['where']}" for event in injected)),
        "missed": missed[0] if missed else [],
        "cost_s": {kind: _spread(values) for kind, values in sorted(costs.items())},
        "rejoin_stall_s": _spread(stalls),
        "num_rejoins": len(stalls),
        "members_at_the_end": members[-1] if members else 0,
        "time_lost_s": summary["time_lost_s"],
    }


def throughput(job: Observed, calm: dict[int, float]) -> dict[str, Any]:
    """`elastic_train.chaos.throughput` says what it means."""
    commits = job.lines("metrics.jsonl")
    own = calm_step_times(job.lines("events.jsonl"), commits)
    kept = throughput_kept(commits, calm or own).as_json()
    return {**kept, "reference": "fault-free runs" if calm else "calm stretches of this run", "calm_here_s": own}


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {"num": len(ordered), "median": ordered[len(ordered) // 2], "max": ordered[-1], "sum": sum(ordered)}


if __name__ == "__main__":
    sys.exit(main())
