"""What the checks of a step cost: is the gradient finite, and do all members hold the same state.

    python benchmarks/checks_cost.py recipes/gpt.py --set width=128 --out benchmarks/results/NAME.json

In one process, in turns, so that whatever else the machine does hits all: a shard's gradient with and without the check
that it is finite, the check alone, and the fingerprint of the state. The shares are those of the local part of a step
(all shards and their additions), without the exchange.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import report

ROUNDS = 15


def main() -> None:
    parser = report.parser(__doc__)
    report.add_recipe(parser)
    arguments = parser.parse_args()
    report.write({**report.about(), **measure(arguments)}, arguments.out)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import jax

    from elastic_train.config_files import resolve
    from elastic_train.launch.recipe import config_class_of, load_recipe
    from elastic_train.recipe import Recipe

    trainer = load_recipe(arguments.recipe)
    config = resolve(config_class_of(trainer), arguments.config, arguments.set)
    device = jax.local_devices()[0]
    recipe = Recipe(trainer(config), device)
    local = recipe.local
    state = local.initial
    inputs = local.place(0, 0, *recipe.read(0, 0))
    unchecked = jax.jit(lambda *inputs: tuple(leaf[None] for leaf in jax.tree.leaves(local._mathematics.sums(*inputs))))

    def shard_unchecked() -> Any:  # as `shard_sums` does it
        return unchecked(*state.arrays.values(), *inputs[1:])

    check_sum = jax.jit(local.layout.is_finite)
    marks = local.marks(state, checked=False)
    total, _ = local.shard_sums(state, inputs, marks)  # packed, as it is added and looked at
    programs: dict[str, Callable[[], Any]] = {
        "shard_unchecked": shard_unchecked,
        "shard_checked": lambda: local.shard_sums(state, inputs, marks),
        "addition": lambda: local.add(total, total),
        "check": lambda: check_sum(total),
        "fingerprint": lambda: local.marks(state, checked=True),
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(ROUNDS + 2):
        for name, program in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(program())
            if number >= 2:
                times[name].append((time.perf_counter() - started) * 1e3)
    recipe.close()
    found = {name: median(values) for name, values in times.items()}
    step_ms = config.shards * found["shard_unchecked"] + (config.shards - 1) * found["addition"]
    # A shard's check reads as much as that of the sum; the difference of two large times would be noise.
    finite_ms = (config.shards + 1) * found["check"]
    return {
        "recipe": arguments.recipe,
        "overrides": arguments.set,
        "device": device.device_kind,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "state_megabytes": round(sum(leaf.nbytes for leaf in jax.tree.leaves(state.arrays)) / 2**20, 1),
        "shards": config.shards,
        "median_ms": {name: round(value, 3) for name, value in found.items()},
        "finite_check_share_of_step": round(finite_ms / step_ms, 4),
        "fingerprint_share_of_step": round(found["fingerprint"] / step_ms, 4),
        "fingerprint_share_at_default": round(found["fingerprint"] / step_ms / config.faults.fingerprint_every, 5),
    }


if __name__ == "__main__":
    main()
