"""What a fault costs: kills workers of a real job one after the other, and reports what each loss and return took.

    python benchmarks/fault_cost.py recipes/digits_mlp.py --workers 3 --kill 2 0 --out benchmarks/results/NAME.json

Every kill waits until the worker killed before has been a member again for `--settle` steps. Times from the kill
are measured here (the moment of the signal) and by the workers (the moment of the commit), on one machine's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from observed import DEADLINE_S, Observed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kill", type=int, nargs="*", default=[2, 0], help="slots, in this order")
    parser.add_argument("--settle", type=int, default=30, help="steps between a return and the next kill")
    parser.add_argument("--steps", type=int, help="let the run end by itself after so many; otherwise it is stopped")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    arguments, options = parser.parse_known_args()
    command = [sys.executable, "-m", "elastic_train.cli", "run", arguments.recipe, "--workers", str(arguments.workers)]
    command += ["--steps", str(arguments.steps or 1_000_000), "--run-dir", str(arguments.run_dir), *options]
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        kills = measure(Observed(job, arguments.run_dir), arguments.kill, arguments.settle)
        if not arguments.steps:
            job.send_signal(signal.SIGINT)
        exit_code = job.wait(DEADLINE_S)
    finally:
        if job.poll() is None:
            job.kill()
            job.wait()
    summary = json.loads((arguments.run_dir / "summary.json").read_text())
    result = {
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "exit_code": exit_code,
        "steps": summary["step"],
        "params_sha256": summary["params_sha256"],
        "state_sha256": summary["state_sha256"],
        **kills,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


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
        commits = [line["time"] for line in job.lines("metrics.jsonl") if line["time"] < back["time"]]
        rows.append(
            {
                "slot": slot,
                "kill_to_process_gone_s": died.get("reported_time", died["time"]) - killed,
                "kill_to_abort_s": told["time"] - killed,
                "rebuild_s": lost["rebuild_s"],
                "kill_to_next_commit_s": lost["time"] - killed,
                "start_to_member_s": back["time"] - started["time"],
                "rejoin_rebuild_s": back["rebuild_s"],
                "rejoin_heal_s": back["heal_s"],
                "rejoin_stall_s": back["time"] - max(commits),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        job.wait(f"{settle} steps", lambda: job.step() >= back["step"] + settle)  # noqa: B023
    job.wait("some steps", lambda: job.step() >= settle * 2)
    times = [line["step_time_s"] for line in job.lines("metrics.jsonl")]
    return {"median_step_time_s": median(times), "kills": rows}


if __name__ == "__main__":
    main()
