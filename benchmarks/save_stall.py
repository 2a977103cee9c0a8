"""What saving costs while training goes on: a save every ten steps against none, in turns, in one run of this script.

    python benchmarks/save_stall.py --megabytes 12 300 --workers 2 --out benchmarks/results/NAME.json
    python benchmarks/save_stall.py --megabytes 3000 --workers 1 --steps 200 --turns 1    # one GPU, a few minutes

`--megabytes` is the size of the whole state: parameters and both moments of Adam. Each size gets jobs of its own,
with and without saves in turns, so that whatever else the machine does hits both. Also told: how long a save takes
from the copy to the rename, how long training waited for it, how many of the saves that were due were left out since
the one before was still being written, and how long the state takes to be read back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jax
import numpy as np
import optax
import report
from flax import nnx

import elastic_train as et

LIMIT_S = 1800.0
EVERY = 10
SKIPPED = 5
"""Steps at the beginning, which compile."""


@dataclass(frozen=True, kw_only=True)
class SquareConfig(et.Config):
    """Attributes:
    width: of one square matrix of float32.
    """

    batch_size: int = 64
    width: int = 1000


class Square(et.Trainer):
    """Fit one matrix: nearly all of the state is one leaf and its moments."""

    config: SquareConfig

    def model(self, rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(self.config.width, self.config.width, rngs=rngs)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.adam(1e-4)

    def loss(self, model: nnx.Linear, batch: dict[str, jax.Array], rngs: nnx.Rngs) -> jax.Array:
        return jax.numpy.mean((model(batch["x"]) - batch["x"]) ** 2, axis=1)

    def train_data(self) -> et.DataSource:
        return et.ArraySource(x=np.random.default_rng(0).standard_normal((256, self.config.width), dtype=np.float32))


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[12, 300])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    result = report.about()
    rows = [measure(size, arguments.workers, arguments.steps, arguments.turns) for size in arguments.megabytes]
    report.write({**result, "rows": rows}, arguments.out)


def measure(megabytes: int, workers: int, steps: int, turns: int) -> dict[str, Any]:
    """One size, with and without saves in turns."""
    width = int((megabytes * 1e6 / 12) ** 0.5)
    times: dict[bool, list[float]] = {True: [], False: []}
    saves: list[dict[str, Any]] = []
    loads: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(2 * turns):
            saving = number % 2 == 1
            run_dir = Path(directory) / f"run{number}"
            options = ["--set", f"width={width}", "--set", "shards=" + str(workers), "--set", "checkpoint.every_s=0"]
            options += ["--set", f"checkpoint.every_steps={EVERY}" if saving else "checkpoint.keep=0"]
            train(run_dir, workers, steps, options)
            lines = read(run_dir / "metrics.jsonl")
            times[saving] += [line["step_time_s"] for line in lines[SKIPPED:]]
            if saving:
                train(run_dir, workers, steps + 1, options)
                events = read(run_dir / "events.jsonl")
                saves += [event for event in events if event["event"] == "checkpoint_saved"]
                loads += [event["seconds"] for event in events if event["event"] == "checkpoint_loaded"]
    inner = [event for event in saves if event["step"] < steps]
    return {
        "megabytes": 12 * width * width / 1e6,
        "workers": workers,
        "step_s_without": {"mean": fmean(times[False]), "median": median(times[False])},
        "step_s_with": {"mean": fmean(times[True]), "median": median(times[True])},
        "ratio_of_means": fmean(times[True]) / fmean(times[False]),
        "num_saves": len(inner),
        "num_left_out": sum(len(event["left_out"]) for event in saves),
        "save_s": median(event["seconds"] for event in inner),
        "stall_s_per_save": fmean(event["stall_s"] for event in inner),
        "restore_s": median(loads),
        "bytes_on_disk": saves[-1]["num_bytes"],
    }


def train(run_dir: Path, workers: int, steps: int, options: list[str]) -> None:
    command = [sys.executable, "-m", "elastic_train", "run", __file__, "--workers", str(workers)]
    command += ["--steps", str(steps), "--run-dir", str(run_dir), *options]
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
