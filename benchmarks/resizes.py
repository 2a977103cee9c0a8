"""Changes the members again and again, and looks for what grows: memory, threads, file descriptors, step time.

    python benchmarks/resizes.py --resizes 200 --workers 3 --run-dir runs/resizes --out benchmarks/results/NAME.json

Workers of all slots but 0 are killed (SIGKILL and SIGTERM in turn) as soon as they are members again. The member of
slot 0 stays; it and the job's own process are measured every `--every` resizes. A resize is a change of the member
list: each loss is one, each return another. On GPUs the memory of the first device is measured, too; memory is then
not taken in advance, so that what grows can be seen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import report
from observed import PACED, Observed, running, usage

CALM_STEPS = 60
"""Steps at the start and at the end whose median is the step time there."""

SETTINGS = ("faults.max_restarts=1000", "faults.first_backoff_s=0.1", "faults.forgive_after_steps=1")
STAYS = 0
RETURN_LIMIT_S = 300.0


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--resizes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--every", type=int, default=10, help="resizes between two measurements")
    parser.add_argument("--recipe", default=str(PACED))
    parser.add_argument("--set", nargs="*", default=["sample_s=0.002"], help="settings of the recipe")
    parser.add_argument("--run-dir", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.run_dir.parent.mkdir(parents=True, exist_ok=True)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    options = ("--set", *SETTINGS, *arguments.set)
    about = report.about()
    with running(arguments.recipe, arguments.workers, 10_000_000, arguments.run_dir, options) as job:
        found = measure(job, arguments)
    report.write({**about, **found}, arguments.out)
    return 0 if found["same_member_throughout"] and found["exit_code"] == 130 else 1


def measure(job: Observed, arguments: argparse.Namespace) -> dict[str, Any]:
    everybody = list(range(arguments.workers))
    first_step = calm_step(job, everybody)
    stays = job.pid(STAYS)
    samples = [sample(job, stays, 0)]
    began = time.monotonic()
    resizes = losses = 0
    while resizes < arguments.resizes:
        before = resizes
        resizes = num_resizes(job)
        if resizes // arguments.every > before // arguments.every:
            samples.append(sample(job, stays, resizes))
            print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
        losses += strike(job, losses)
    took_s = time.monotonic() - began
    last_step = calm_step(job, everybody)
    samples.append(sample(job, stays, num_resizes(job)))
    same = job.pid(STAYS) == stays
    exit_code = job.stop()
    return {
        "workers": arguments.workers,
        "exit_code": exit_code,
        "resizes": samples[-1]["resizes"],
        "took_s": took_s,
        "same_member_throughout": same,
        "step_time_s": {"at_start": first_step, "at_end": last_step},
        "growth_per_resize": growth(samples),
        "samples": samples,
    }


def strike(job: Observed, number: int) -> int:
    """Ends the worker of one slot that is a member now, if there is one but the first; returns how many."""
    members = job.wait("a step", lambda: job.lines("ledger.jsonl"))[-1]["workers"]
    others = [slot for slot in members if slot != STAYS]
    if not others:
        time.sleep(0.05)
        return 0
    slot = others[number % len(others)]
    gone_before = job.step()
    os.kill(job.pid(slot), (signal.SIGKILL, signal.SIGTERM)[number % 2])

    def is_gone() -> bool:
        lines = job.lines("ledger.jsonl")[-1:]
        return bool(lines) and lines[0]["step"] > gone_before and slot not in lines[0]["workers"]

    job.wait(f"a step without slot {slot}", is_gone)
    return 1


def num_resizes(job: Observed) -> int:
    """Changes of the member list so far, the first group not counted."""
    return sum(event["event"] == "recovered" and event["kind"] != "formed" for event in job.lines("events.jsonl"))


def calm_step(job: Observed, everybody: list[int]) -> float:
    """Median step time, in seconds, of the next steps of all members."""

    def newest() -> list[dict[str, Any]]:
        lines = job.lines("metrics.jsonl")[-CALM_STEPS:]
        is_calm = len(lines) == CALM_STEPS and all(line["workers"] == everybody for line in lines)
        return lines if is_calm else []

    job.wait(f"{CALM_STEPS} steps of all", newest, RETURN_LIMIT_S)
    return median(line["step_time_s"] for line in newest())


def sample(job: Observed, stays: int, resizes: int) -> dict[str, Any]:
    """What the coordinator, the agent (in the command's process) and the member that stays hold now."""
    found: dict[str, Any] = {"resizes": resizes, "agent": usage(job.job.pid), "member": usage(stays)}
    found["coordinator"] = usage(job.coordinator())
    if shutil.which("nvidia-smi") and os.environ.get("JAX_PLATFORMS") != "cpu":
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        found["device_mib"] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def growth(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """How much each figure grew per resize over the second half, when caches are full."""
    first, last = samples[len(samples) // 2], samples[-1]
    num = max(1, last["resizes"] - first["resizes"])
    grown: dict[str, Any] = {
        who: {name: (last[who][name] - first[who][name]) / num for name in last[who]}
        for who in ("coordinator", "agent", "member")
    }
    if "device_mib" in last:
        grown["device_mib"] = (last["device_mib"] - first["device_mib"]) / num
    return grown


if __name__ == "__main__":
    sys.exit(main())
