"""Where the start of a worker goes, by itself and by a process that was held ready (`faults.warm_spares`), in one job.

    python benchmarks/start_cost.py recipes/byte_lm.py --workers 2 --rounds 4 --out benchmarks/results/NAME.json

Kills one slot's worker again and again, in turn with a process held ready, and just after that was killed, too. Each
kill waits until the worker has been a member again for `--settle` steps and a process is held ready. Times are those of
the job's events: from the start of the worker's process, or from the moment at which it was told which worker it is.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import report
from observed import DEADLINE_S, Observed, running

from elastic_train.launch.spares import LOG

NEVER = 1_000_000


def main() -> None:
    parser = report.parser_for_recipe(__doc__, workers=2)
    parser.add_argument("--slot", type=int, default=1, help="whose worker is killed")
    parser.add_argument("--rounds", type=int, default=4, help="so often in each way")
    parser.add_argument("--settle", type=int, default=20, help="steps between a return and the next kill")
    arguments = parser.parse_args()
    about = report.about()
    options = report.recipe_options(arguments, "faults.warm_spares=1")
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        with running(arguments.recipe, arguments.workers, NEVER, run_dir, options) as job:
            starts = [
                measure(job, arguments.slot, warm, arguments.settle)
                for _ in range(arguments.rounds)
                for warm in (True, False)
            ]
            job.stop()
    report.write({**about, "workers": arguments.workers, **compared(starts), "starts": starts}, arguments.out)


def measure(job: Observed, slot: int, warm: bool, settle: int) -> dict[str, Any]:
    """One kill, with or without a process held ready, and the return."""
    first = job.step()
    job.wait(f"{settle} steps", lambda: job.step() >= first + settle)
    spare = job.wait("a process to be held ready", lambda: held_ready(job.run_dir))
    if not warm:
        os.kill(spare, signal.SIGKILL)
        job.wait("it to be gone", lambda: held_ready(job.run_dir) != spare, DEADLINE_S)
    killed = time.time()
    os.kill(job.pid(slot), signal.SIGKILL)
    back = job.wait(f"slot {slot} to return", lambda: job.recovered(killed, "came", slot))
    mine = [e for e in job.lines("events.jsonl") if e.get("slot") == slot and e["time"] >= killed]
    started = [e for e in mine if e["event"] == "worker_started"][-1]
    ready = [e for e in mine if e["event"] == "worker_ready"][-1]
    if started["warm"] != warm:
        raise SystemExit(f"warm is {started['warm']}, not {warm}: a process was held ready, or none, against the plan")
    found = {
        "warm": warm,
        "start_to_ready_s": ready["time"] - started["time"],
        "ready_to_member_s": back["reported_time"] - ready["time"],
        "start_to_member_s": back["reported_time"] - started["time"],
        "start_s": ready["start_s"],
    }
    print(json.dumps(found), flush=True)
    return found


def held_ready(run_dir: Path) -> int | None:
    """The process that is held ready now, by what the job writes of them."""
    log = run_dir / "logs" / LOG
    lines = re.findall(r"process (\d+) (has imported|has ended|is the worker)", log.read_text() if log.exists() else "")
    return int(lines[-1][0]) if lines and lines[-1][1] == "has imported" else None


def compared(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of both kinds of start, and the ratio of each one with a process held ready to the next one without."""
    found: dict[str, Any] = {}
    for name, warm in (("warm", True), ("cold", False)):
        mine = [start for start in starts if start["warm"] is warm]
        times = {key: report.spread([start[key] for start in mine]) for key in mine[0] if key.endswith("_to_member_s")}
        parts = {part: median(start["start_s"].get(part, 0.0) for start in mine) for part in mine[0]["start_s"]}
        found[name] = {**times, "start_s": parts}
    pairs = zip(starts[::2], starts[1::2], strict=True)
    ratios = [warm["start_to_member_s"] / cold["start_to_member_s"] for warm, cold in pairs]
    return {**found, "warm_to_cold": report.spread(ratios)}


if __name__ == "__main__":
    main()
