"""What the death of the coordinator costs: kills it, and says when the next step was committed.

    python benchmarks/coordinator_death.py benchmarks/paced.py --set sample_s=0.01 --run-dir DIR --out FILE.json

Times are seconds from the SIGKILL, on one machine's clock. `exact` compares with a plain process that takes as many
steps; use a recipe whose schedule does not depend on how many steps it is to take.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import report
from observed import Observed, plain_run, running


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--settle", type=int, default=20, help="steps before each kill")
    parser.add_argument("--run-dir", type=Path, required=True)
    arguments, options = parser.parse_known_args()
    about = report.about()
    arguments.run_dir.mkdir(parents=True)
    with running(arguments.recipe, arguments.workers, 1_000_000, arguments.run_dir / "job", options) as job:
        rows = [kill(job, arguments.settle) for _ in range(arguments.kills)]
        exit_code = job.stop()
    summary = job.summary()
    alone = plain_run(arguments.recipe, summary["step"], arguments.run_dir / "alone", options)
    result = {
        **about,
        "workers": arguments.workers,
        "exit_code": exit_code,
        "steps": summary["step"],
        "steps_lost": summary["steps_lost"],
        "exact": summary["state_sha256"] == alone["state_sha256"],
        "kills": rows,
    }
    report.write(result, arguments.out)


def kill(job: Observed, settle: int) -> dict[str, Any]:
    """Kills the coordinator after some steps, and waits until the workers go on."""
    start = job.step()
    job.wait(f"{settle} steps", lambda: job.step() >= start + settle)
    pid = job.coordinator()
    killed = time.time()
    os.kill(pid, signal.SIGKILL)

    def back() -> dict[str, Any] | None:
        found = newest(job, "recovered")
        return found if found["time"] > killed else None

    recovered = job.wait("a step in the next generation", back)
    began = newest(job, "generation_began")
    ready = [event["time"] for event in job.lines("events.jsonl") if event["event"] == "worker_ready"]
    return {
        "to_next_coordinator_s": began["time"] - killed,
        "to_workers_ready_s": max(ready) - killed,
        "to_next_commit_s": recovered["reported_time"] - killed,
        "rebuild_s": recovered["rebuild_s"],
        "heal_s": recovered["heal_s"],
    }


def newest(job: Observed, name: str) -> dict[str, Any]:
    return [event for event in job.lines("events.jsonl") if event["event"] == name][-1]


if __name__ == "__main__":
    main()
