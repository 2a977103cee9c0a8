"""What a fault costs: kills workers of a real job one after the other, and reports what each loss and return took.

    python benchmarks/fault_cost.py recipes/byte_lm.py --workers 4 --kill 3 0 --seed --out benchmarks/results/NAME.json

Every kill waits until the worker killed before has been a member again for `--settle` steps. Times from the kill
are measured here (the moment of the signal) and by the workers (what they write at their barriers, and the moment of
the commit), on one machine's clock. A loss is split into these parts, which add up to `kill_to_next_commit_s`:

- gone: from the signal until the agent has seen the process end
- told: until the coordinator has told the members
- agree: until they have left the barrier, and have concluded that the member is gone
- compile: until the first program that crosses the members left is compiled
- meet: until all of them are in the new epoch's first barrier
- communicator: until they have exchanged something for the first time, and compared their states
- redo: until the step is taken again and committed

and the survivors' stall at a return, from the commit that admits it, into compile, meet, communicator, heal and redo.
With `--seed` the second example of JAX's guide (`seed_fault.py`) runs before, on the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import report
import seed_fault
from observed import DEADLINE_S, Observed, running

NEVER = 1_000_000


def main() -> None:
    parser = report.parser_for_recipe(__doc__, workers=3)
    parser.add_argument("--kill", type=int, nargs="*", default=[2, 0], help="slots, in this order")
    parser.add_argument("--settle", type=int, default=30, help="steps between a return and the next kill")
    parser.add_argument("--steps", type=int, help="let the run end by itself after so many; otherwise it is stopped")
    parser.add_argument("--run-dir", type=Path, help="by default a directory that is deleted at the end")
    parser.add_argument("--seed", action="store_true", help="also the example of JAX's guide, on the same model")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds that the example may take for a step")
    arguments, options = parser.parse_known_args()
    about = report.about()
    seed = {"seed": seed_fault.measure(arguments)} if arguments.seed else {}
    with tempfile.TemporaryDirectory() as directory:
        run_dir = arguments.run_dir or Path(directory) / "run"
        report.write({**about, **seed, **run(arguments, options, run_dir)}, arguments.out)


def run(arguments: argparse.Namespace, options: list[str], run_dir: Path) -> dict[str, Any]:
    """The job, its faults and its end."""
    options = ["--trace-blocks", *options, *report.recipe_options(arguments)]
    with running(arguments.recipe, arguments.workers, arguments.steps or NEVER, run_dir, options) as job:
        kills = measure(job, arguments.kill, arguments.settle)
        exit_code = job.job.wait(DEADLINE_S) if arguments.steps else job.stop()
        summary = job.summary()
    return {
        "workers": arguments.workers,
        "exit_code": exit_code,
        "steps": summary["step"],
        "params_sha256": summary["params_sha256"],
        "state_sha256": summary["state_sha256"],
        **kills,
    }


def measure(job: Observed, slots: list[int], settle: int) -> dict[str, Any]:
    job.wait(f"step {settle}", lambda: job.step() >= settle)
    rows = []
    for slot in slots:
        pid = job.pid(slot)
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        lost = job.wait(f"a step without slot {slot}", lambda: job.recovered(killed, "gone", slot))  # noqa: B023
        back = job.wait(f"slot {slot} to return", lambda: job.recovered(killed, "came", slot))  # noqa: B023
        events = job.lines("events.jsonl")
        died = next(e for e in events if e["event"] == "worker_died" and e["slot"] == slot and e["time"] >= killed)
        told = next(e for e in events if e["event"] == "abort_sent" and e["slot"] == slot and e["time"] >= killed)
        started = [e for e in events if e["event"] == "worker_started" and e["slot"] == slot][-1]
        commits = [line["time"] for line in job.lines("metrics.jsonl") if line["time"] < back["reported_time"]]
        gone, aborted = died.get("reported_time", died["time"]), told["time"]
        parts = epoch_parts(job.run_dir, lost)
        admitted = epoch_parts(job.run_dir, back)
        last = max(commits)
        rows.append(
            {
                "slot": slot,
                "kill_to_next_commit_s": lost["reported_time"] - killed,
                "loss_s": {
                    "gone": gone - killed,
                    "told": aborted - gone,
                    "agree": parts.pop("concluded") - aborted,
                    **parts,
                },
                "start_to_member_s": back["reported_time"] - started["time"],
                "rejoin_stall_s": back["reported_time"] - last,
                "rejoin_s": {"conclude": admitted.pop("concluded") - last, **admitted},
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        job.wait(f"{settle} steps", lambda: job.step() >= back["step"] + settle)  # noqa: B023
    job.wait("some steps", lambda: job.step() >= settle * 2)
    times = [line["step_time_s"] for line in job.lines("metrics.jsonl")]
    return {"median_step_time_s": median(times), "kills": rows}


def epoch_parts(run_dir: Path, change: dict[str, Any]) -> dict[str, float]:
    """How long each part of an epoch's beginning took on one member that was there before, in seconds.

    Args:
      change: the event `recovered` of that epoch.

    Returns:
      `concluded`, the Unix time at which the block that led to this epoch was judged, and the parts after it.
    """
    for path in sorted((run_dir / "blocks").glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        offset = lines[0]["unix_time"] - lines[0]["time"]
        # Within the epoch, commits name it too.
        before = [line["time"] for line in lines if line.get("next_epoch") == change["epoch"] != line["epoch"]]
        mine = [line for line in lines if line.get("epoch") == change["epoch"]]
        times = {(line["line"], line["number"]): line["time"] for line in reversed(mine)}
        if not before or ("concluded", 1) not in times:
            continue
        enter, meet, met = times["enter", 0], times["exit", 0], times["concluded", 1]
        return {
            "concluded": before[0] + offset,
            "compile": enter - before[0],
            "meet": meet - enter,
            "communicator": met - meet,
            "heal": change["heal_s"],
            "redo": change["reported_time"] - offset - met - change["heal_s"],
        }
    raise SystemExit(f"no member has written down how epoch {change['epoch']} began")


if __name__ == "__main__":
    main()
