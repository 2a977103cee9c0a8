"""What `live_devices` and the votes add to a step: the same step with them, without the barrier, and without both.

    python benchmarks/block_cost.py recipes/byte_lm.py --workers 4 --out benchmarks/results/NAME.json

One group of processes, which reach JAX's service through a relay as in a job, takes blocks of steps in three ways in
turn, with the product's own code for all of it:

- full: barrier, control vectors, verdict.
- no_barrier: the members never ask who is live.
- no_votes: besides, no control vector is exchanged, and whether the sum is finite is not looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import report

from elastic_train.coordinator.jax_service import JaxService
from elastic_train.launch.bond import die_with_parent
from elastic_train.launch.environment import GPU_XLA_FLAGS, with_flags
from elastic_train.launch.relay import Relay

LIMIT_S = 500.0
WAYS = ("full", "no_barrier", "no_votes")


def main() -> None:
    parser = report.parser_for_recipe(__doc__, workers=4)
    parser.add_argument("--shards", type=int, help="by default as many as workers")
    parser.add_argument("--block", type=int, default=20, help="steps in one turn")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each way, after one to warm up")
    parser.add_argument("--member", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.member:
        rank, address, parent = arguments.member
        die_with_parent(int(parent))
        print(json.dumps(measure(arguments, int(rank), address)), flush=True)
        os._exit(0)  # whoever leaves JAX in order waits for the others
    result = report.about()
    turns = run(arguments)
    report.write({**result, "workers": arguments.workers, **compared(turns)}, arguments.out)


def run(arguments: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Starts the members; the step times of the first one, in seconds, by way and turn."""
    with ExitStack() as stack:
        service = JaxService(arguments.workers + 1, heartbeat_timeout_s=60)
        stack.callback(service.close)
        relay = Relay(service.address)
        stack.callback(relay.close)
        processes = []
        for rank in range(arguments.workers):
            member = ["--member", str(rank), relay.address, str(os.getpid())]
            process = subprocess.Popen(
                [sys.executable, *sys.argv, *member],
                env={**os.environ, **environment(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        try:
            output, _ = processes[0].communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the members have not taken all steps within {LIMIT_S:g} s") from None
        if processes[0].returncode != 0:
            raise SystemExit("a member has failed; see above")
        return json.loads(output.splitlines()[-1])


def environment(rank: int) -> dict[str, str]:
    found = {"CUDA_VISIBLE_DEVICES": str(rank), "TF_CPP_MIN_LOG_LEVEL": "2"}
    if report.accelerators():
        found["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), GPU_XLA_FLAGS)
        found["XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE"] = "1"
    return found


def compared(turns: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Step times in milliseconds, and what barrier and votes add: differences of medians, turn by turn."""
    times = {way: report.spread([value * 1e3 for turn in turns[way] for value in turn]) for way in WAYS}
    full, no_barrier, no_votes = ([median(turn) * 1e3 for turn in turns[way]] for way in WAYS)

    def added(more: Sequence[float], less: Sequence[float]) -> dict[str, Any]:
        return report.spread([a - b for a, b in zip(more, less, strict=True)])

    return {
        "step_ms": times,
        "added_ms": {
            "barrier": added(full, no_barrier),
            "votes": added(no_barrier, no_votes),
            "both": added(full, no_votes),
        },
        "ratio_of_both": report.spread([a / b for a, b in zip(full, no_votes, strict=True)]),
    }


def measure(arguments: argparse.Namespace, rank: int, address: str) -> dict[str, list[list[float]]]:
    """What a member does: all turns of all ways."""
    import jax

    from elastic_train import jax_private
    from elastic_train.config_files import resolve
    from elastic_train.launch.recipe import config_class_of, load_recipe
    from elastic_train.membership.group import Identity, View, Vote
    from elastic_train.recipe import Recipe
    from elastic_train.step.commit import Stepper

    num = arguments.workers
    jax_private.connect_worker(
        address=address, node=rank + 1, num_nodes=num + 1, heartbeat_timeout_s=60, tls={}, own_address="127.0.0.1"
    )
    trainer = load_recipe(arguments.recipe)
    settings = [*arguments.set, f"shards={arguments.shards or num}", "steps=1000000"]
    recipe = Recipe(trainer(resolve(config_class_of(trainer), arguments.config, settings)), jax.local_devices()[0])
    devices = {device.process_index: device for device in jax.devices()}
    members = [Identity(slot, 0, slot + 1) for slot in range(num)]
    view = View.of(1, members)
    steppers = {}
    for way in WAYS:
        group = make_group(way, members[rank], devices, recipe)
        group.prepare(view)
        group.finish_compiling()
        steppers[way] = Stepper(group, recipe.local, recipe, recipe.batches, ignore, ignore, ignore)
    state = recipe.local.give_initial()
    turns: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for number in range(arguments.rounds + 1):
        for way in WAYS:
            times = []
            for _ in range(arguments.block):
                began = time.perf_counter()
                state = steppers[way].attempt(state, Vote(state.step)).state
                times.append(time.perf_counter() - began)
            if number:
                turns[way].append(times[1:])
    return turns


def make_group(way: str, me: Any, devices: dict[int, Any], recipe: Any) -> Any:
    """The product's group, less what this way leaves out."""
    import jax

    from elastic_train.jax_private import LiveDevices
    from elastic_train.membership.live import Group
    from elastic_train.step.reduce import AXIS, Exchange

    class Voteless(Exchange):
        """The same sums, and no control vectors: everybody is taken to have voted what this member has."""

        def __init__(self, meeting: Any, plan: Any, layout: Any) -> None:
            super().__init__(meeting, plan, layout)
            self._program = meeting.program(self._sums, (layout.leaves,) * plan.slots_per_member)

        def __call__(self, partials: Any, vote: Any, marks: Any) -> Any:
            padded = tuple(partials) + (partials[0],) * (self._plan.slots_per_member - len(partials))
            return self._meeting.local(self._program(self._meeting.mine_of_all(padded))), vote

        def wait(self, vote: Any) -> Any:
            return [vote] * self._meeting.size

        def _sums(self, partials: Any) -> Any:
            parts = self.parts(partials)
            return self._cut.leaves([jax.lax.all_gather(part, AXIS, tiled=True) for part in parts])

    class VotelessGroup(Group):
        @property
        def exchange(self) -> Exchange:
            if self._voteless is None:
                self._voteless = Voteless(self.meeting, self.plan, self._layout)
            return self._voteless

        _voteless: Exchange | None = None

    local = recipe.local
    return (VotelessGroup if way == "no_votes" else Group)(
        me,
        devices,
        local.layout,
        recipe.batches.num_shards,
        News(),
        recipe.config.faults,
        None,
        make_block=LiveDevices if way == "full" else NoBarrier,
    )


class NoBarrier:
    """Runs a body without asking anybody."""

    def __init__(self, devices: Sequence[Any], trace: object) -> None:
        self.incarnations = {device.process_index: 0 for device in devices}

    def run(self, body: Callable[[dict[int, int]], Any]) -> Any:
        return body(self.incarnations)


class News:
    """A coordinator that says nothing."""

    def phase(self, name: str, step: int) -> None: ...
    def wait_dead(self, nodes: frozenset[int], timeout: float) -> bool:
        return False


def ignore(*_: object) -> None:
    pass


if __name__ == "__main__":
    main()
