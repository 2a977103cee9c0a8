"""What the canonical tree costs against a plain psum: the same bytes, the same processes, in one run.

    python benchmarks/reduction_cost.py --members 2 3 4 --megabytes 3 64 --out benchmarks/results/NAME.json

Each number of members gets processes of its own (one GPU each if there are GPUs). The two programs take turns, so
that whatever else the machine does hits both. The tree has one shard per member (`V = n`, as many bytes as a ring
all-reduce) and, as a second case, eight shards, where members exchange more than one partial sum.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from statistics import median, quantiles
from typing import Any

import report

LIMIT_S = 300.0
ROUNDS = 40


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[3, 64])
    parser.add_argument("--worker", nargs=3, type=int, metavar=("RANK", "MEMBERS", "PORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(*arguments.worker, arguments.megabytes)
        return
    result = report.about()
    rows: list[dict[str, Any]] = []
    for members in arguments.members:
        rows += run(members, arguments.megabytes)
        print(json.dumps(rows[-1]), flush=True)
    report.write({**result, "rows": rows}, arguments.out)


def run(members: int, megabytes: list[int]) -> list[dict[str, Any]]:
    """One group of processes; rank 0 prints the rows."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    sizes = ["--megabytes", *map(str, megabytes)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *sizes, "--worker", str(rank), str(members), str(port)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(members)
    ]
    try:
        output, _ = processes[0].communicate(timeout=LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def measure(rank: int, members: int, port: int, megabytes: list[int]) -> None:
    import jax
    import jax.numpy as jnp

    from elastic_train.membership.group import VOTE_SIZE
    from elastic_train.step.flat import Layout
    from elastic_train.step.plan import finish, partials, run_of
    from elastic_train.step.reduce import AXIS, Exchange, Meeting

    jax.distributed.initialize(f"127.0.0.1:{port}", members, rank)
    by_process = {device.process_index: device for device in jax.devices()}
    mine = by_process[rank]
    meeting = Meeting([by_process[process] for process in range(members)], mine)
    for size_mb in megabytes:
        size = (size_mb << 20) // 4
        spec = (jax.ShapeDtypeStruct((1, size), jnp.float32),)
        value = jax.device_put(jnp.full((1, size), rank + 1.0), mine)
        marks = jax.device_put(jnp.zeros((1, 4), jnp.int32), mine)
        layout = Layout(spec, [True])
        psum = meeting.program(lambda x: jax.lax.psum(x[0], AXIS), spec[0])
        programs = {"psum": lambda: jax.block_until_ready(psum(meeting.mine_of_all(value)))}  # noqa: B023
        for shards in sorted({members, max(members, 8)}):
            exchange = Exchange(meeting, finish(shards, members), layout)
            run_ = run_of(shards, members, rank)
            held = [(value,)] * len(partials(run_.start, run_.stop, shards))
            programs[f"tree_{shards}_shards"] = lambda e=exchange, h=held, m=marks: jax.block_until_ready(
                e(h, [0] * VOTE_SIZE, m)
            )
        times: dict[str, list[float]] = {name: [] for name in programs}
        for number in range(ROUNDS + 5):
            for name, program in programs.items():
                started = time.perf_counter()
                program()
                if number >= 5:
                    times[name].append((time.perf_counter() - started) * 1e3)
        row: dict[str, Any] = {"members": members, "megabytes": size_mb, "device": mine.device_kind}
        for name, values in times.items():
            low, _, high = quantiles(values, n=4)
            row[f"{name}_ms"] = [round(x, 3) for x in (low, median(values), high)]
            row[f"{name}_ratio"] = round(median(values) / median(times["psum"]), 3)
        if rank == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
