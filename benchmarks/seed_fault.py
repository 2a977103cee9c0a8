"""What a fault costs the second example of JAX's guide to fault tolerance, adapted to a recipe's model.

    python benchmarks/seed_fault.py recipes/byte_lm.py --workers 3 --set batch_size=18 --out OUT.json

As in the guide: process 0 holds the coordination service, deaths are found by heartbeats of 10 s, the whole step is in
`live_devices`, and process 0 sends its state to whoever comes back. Changed: the model, with its whole state sent; no
pause between two steps; and `allgather`, which as printed hands an array without sharding to `shard_map`, which jax
from 0.10 on refuses, so that the example never takes a step.

The last worker is killed, and started again; then process 0 is killed. Each wait has a limit, and what did not happen
within it is told as null. `fault_cost.py --seed` runs this beside elastic_train.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import report
from step_time import end, free_port, loop_environment

START_LIMIT_S = 120.0
SETTLE = 10
"""Steps between a change and the next one."""


def main() -> None:
    parser = report.parser_for_recipe(__doc__, workers=3)
    parser.add_argument("--limit", type=float, default=45.0, help="seconds to wait for a step after a change")
    arguments = parser.parse_args()
    about = report.about()
    report.write({**about, **measure(arguments)}, arguments.out)


class Processes:
    """The example's processes, seen through the lines they write."""

    def __init__(self, stack: ExitStack, arguments: argparse.Namespace, directory: Path) -> None:
        self._stack, self._directory, self.num = stack, directory, arguments.workers
        self._starts = [0] * self.num
        self._processes: list[subprocess.Popen[bytes]] = []
        self._command = [sys.executable, str(Path(__file__).with_name("seed_member.py")), arguments.recipe]
        self._command += [*report.recipe_options(arguments), "--num", str(self.num), "--port", str(free_port())]
        self._command += ["--parent", str(os.getpid())]
        self._processes = [self._start(rank) for rank in range(self.num)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self._directory / f"{rank}.log").open("ab"))
        process = subprocess.Popen(
            [*self._command, "--rank", str(rank), "--lines", str(self._lines_path(rank))],
            env={**os.environ, **loop_environment(rank, tolerant=True)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        self._stack.callback(end, process)
        return process

    def restart(self, rank: int) -> None:
        self._starts[rank] += 1
        self._processes[rank] = self._start(rank)

    def kill(self, rank: int) -> float:
        """The moment of the signal, in seconds since the Unix epoch."""
        now = time.time()
        self._processes[rank].send_signal(signal.SIGKILL)
        return now

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """What the newest start of a process has written so far: one line per attempt at a step."""
        path = self._lines_path(rank)
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def commits(self, rank: int, after: float, num_devices: int) -> list[dict[str, Any]]:
        """The steps since then that so many devices have taken."""
        lines = [line for line in self.lines(rank) if line["error"] is None and line["ended"] > after]
        return [line for line in lines if line["devices"] == num_devices]

    def exits(self) -> dict[int, int]:
        """Exit codes, by rank, of those that have ended."""
        return {rank: code for rank, each in enumerate(self._processes) if (code := each.poll()) is not None}

    def log(self, rank: int) -> str:
        return (self._directory / f"{rank}.log").read_text()[-1500:]

    def _lines_path(self, rank: int) -> Path:
        return self._directory / f"{rank}-{self._starts[rank]}.jsonl"


def wait(found: Callable[[], Any], limit_s: float) -> Any:
    """What `found` gives as soon as it is true; None after the limit."""
    deadline = time.monotonic() + limit_s
    while not (result := found()):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)
    return result


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The three faults, one after the other, as far as the example gets."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = Processes(stack, arguments, directory)
        num, last, limit_s = processes.num, processes.num - 1, arguments.limit
        wait(lambda: len(processes.commits(0, 0, num)) > SETTLE or processes.exits(), START_LIMIT_S)
        if processes.exits() or not processes.commits(0, 0, num):
            raise SystemExit(f"the example takes no steps:\n{processes.log(0)}")
        result: dict[str, Any] = {"workers": num, "limit_s": limit_s}

        killed = processes.kill(last)
        commit = wait(lambda: processes.commits(0, killed, num - 1), limit_s)
        result["kill_last"] = loss(processes.lines(0), killed, commit[0]) if commit else None
        if commit and wait(lambda: len(processes.commits(0, killed, num - 1)) > SETTLE, limit_s):
            began = time.time()
            processes.restart(last)
            commit = wait(lambda: processes.commits(last, began, num), limit_s)
            result["return"] = comeback(processes, began, commit[0]) if commit else None

        killed = processes.kill(0)
        others = set(range(1, num)) & set(range(num)) - set(processes.exits())
        gone = wait(lambda: others <= set(processes.exits()), limit_s)
        result["kill_first"] = {
            "others_that_lived": len(others),
            "others_ended": gone is not None,
            "within_s": round(time.time() - killed, 2) if gone else None,
            "exit_codes": {rank: code for rank, code in processes.exits().items() if rank in others},
        }
        return result


def loss(lines: Sequence[dict[str, Any]], killed: float, commit: dict[str, Any]) -> dict[str, float]:
    """From the kill to the next step of the others, split."""
    # The attempt that was under way fails at its end; those that begin and fail after it are counted in with it.
    return {
        "kill_to_next_commit_s": round(commit["ended"] - killed, 3),
        "detect_and_agree_s": round(commit["began"] - killed, 3),
        "rebuild_communicator_s": round(commit["met"] - commit["began"], 3),
        "redo_and_compile_s": round(commit["ended"] - commit["healed"], 3),
        "failed_attempts": sum(line["error"] is not None and line["ended"] > killed for line in lines),
    }


def comeback(processes: Processes, began: float, commit: dict[str, Any]) -> dict[str, float]:
    """From the start of a worker to its first step, and how long the others stood still."""
    steps = [line for line in processes.lines(0) if line["error"] is None]
    mine = next(line for line in steps if line["step"] == commit["step"])
    before = max(line["ended"] for line in steps if line["ended"] < mine["ended"])
    return {
        "start_to_first_step_s": round(commit["ended"] - began, 3),
        "stall_s": round(mine["ended"] - before, 3),
        "rebuild_communicator_s": round(mine["met"] - mine["began"], 3),
        "heal_s": round(mine["healed"] - mine["met"], 3),
        "redo_and_compile_s": round(mine["ended"] - mine["healed"], 3),
    }


if __name__ == "__main__":
    main()
