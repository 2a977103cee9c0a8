"""What one checkpoint takes: the copy of the state, which training waits for, writing it, and loading it.

    python benchmarks/checkpoint_io.py --megabytes 600 --out benchmarks/results/NAME.json

One process, nothing is trained. Besides seconds it tells seconds of the processor, which do not depend on what else
the machine does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import report

from elastic_train.checkpoint import places, store
from elastic_train.checkpoint.load import load_newest
from elastic_train.checkpoint.manifest import Position, Run
from elastic_train.checkpoint.snapshot import Snapshot, arrays
from elastic_train.state import TrainState

LEAVES = 4


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=600, help="parameters and two moments of float32")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    about = report.about()
    with tempfile.TemporaryDirectory() as directory:
        report.write({**about, **measure(arguments.megabytes, arguments.turns, Path(directory))}, arguments.out)


def measure(megabytes: int, turns: int, directory: Path) -> dict[str, Any]:
    size = megabytes * 1_000_000 // 12 // LEAVES
    trees = [{str(i): jax.random.normal(jax.random.key(i), (size,)) for i in range(LEAVES)} for _ in range(3)]
    state = jax.block_until_ready(TrainState(0, 0, trees[0], {}, (trees[1], trees[2])))
    snapshot, root, device = Snapshot(state.arrays), places.Path(directory), jax.local_devices()[0]
    store.warm_up()
    snapshot.touch()
    run = Run(trainer="Trainer", config={}, config_digest="", versions={})
    rows: dict[str, list[tuple[float, float]]] = {"copy": [], "save": [], "load": []}
    about: dict[str, Any] = dict(samples=0, pass_size=1, epoch=1, generation=0, workers=(0,), metrics={}, records=())
    for step in range(1, turns + 1):
        rows["copy"].append(timed(lambda: snapshot.copy(state.arrays)))
        named = arrays(snapshot._memory, snapshot.layout)
        rows["save"].append(
            timed(lambda at=step, named=named: store.save(root, named, Position(step=at, **about), run))
        )
        rows["load"].append(timed(lambda: load_newest(root, state, device, print)))
        places.delete(root, step)
    return {
        "megabytes": snapshot.num_bytes / 1e6,
        **{f"{name}_s": median(wall for wall, _ in times) for name, times in rows.items()},
        **{f"{name}_processor_s": median(used for _, used in times) for name, times in rows.items()},
    }


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and seconds of all of this process's threads."""
    started, used = time.monotonic(), time.process_time()
    work()
    return time.monotonic() - started, time.process_time() - used


if __name__ == "__main__":
    main()
