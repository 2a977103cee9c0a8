"""What fault tolerance costs a step: the plain loop, the loop of JAX's guide, and elastic_train, in one run.

    python benchmarks/step_time.py recipes/byte_lm.py --workers 4 --out benchmarks/results/NAME.json

All train the same model on the same samples, and all are there at the same time: they take turns, a block of steps each
(`turns.py`), so that whatever else the machine does hits all alike. Each turn's first step is left out. Variants:

- plain, plain_late: a `jit` data-parallel loop in multi-controller JAX, donated, without fault tolerance. The faster of
  the two is what the others are compared with. See `loops.py`.
- seed: the loop of JAX's guide: the whole step in `live_devices`, with nothing donated.
- ours-V: a job of `elastic-train run` with V shards; its `step_time_s`. With `--ours-with` there are more of them,
  each with one setting of its own.

With `--apart` each variant runs alone, one after the other, for models of which a device holds only one; then memory
is taken in advance as JAX does by default, and peaks are comparable all the same, since they count what is in use.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import report
from observed import running
from turns import END, Turn, Turns

from elastic_train.config_files import resolve
from elastic_train.launch.environment import GPU_XLA_FLAGS, with_flags
from elastic_train.launch.recipe import config_class_of, load_recipe

HERE = Path(__file__).parent
LIMIT_S = 400.0
"""For one turn; the first one compiles."""

PLAIN = ("plain", "plain_late")
NEVER = 1_000_000


def main() -> None:
    parser = report.parser_for_recipe(__doc__, workers=4)
    parser.add_argument("--shards", type=int, nargs="+", help="by default as many as workers")
    parser.add_argument("--variants", nargs="+", default=["plain", "seed", "ours"], choices=["plain", "seed", "ours"])
    parser.add_argument(
        "--ours-with", nargs="+", default=[], metavar="KEY=VALUE", help="each setting is one more variant of ours"
    )
    parser.add_argument("--block", type=int, default=20, help="steps in one turn")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each variant, after one to warm up")
    parser.add_argument("--apart", action="store_true", help="each variant alone, one after the other")
    arguments = parser.parse_args()
    arguments.shards = arguments.shards or [arguments.workers]
    result = report.about()
    trainings = planned(arguments)
    groups = [[training] for training in trainings] if arguments.apart else [trainings]
    variants: dict[str, Any] = {}
    for group in groups:
        variants |= take_turns(group, arguments)
    about = {"workers": arguments.workers, "batch_size": batch_size(arguments), "apart": arguments.apart}
    report.write({**result, **about, **compared(variants, about["batch_size"])}, arguments.out)


class Training(Protocol):
    """One training that takes turns, as one variant or as several."""

    names: tuple[str, ...]

    def start(self, stack: ExitStack, directory: Path, environ: dict[str, str]) -> None:
        """Starts the processes, which end with the stack."""
        ...

    def check(self) -> None:
        """Raises SystemExit if a process has ended."""
        ...

    def times(self, name: str, told: Sequence[list[dict[str, Any]]]) -> list[list[float]]:
        """Step times in seconds, one list for each turn of a variant, from what the members have told."""
        ...


class Loops:
    """A loop of `loops.py`, one process per worker."""

    def __init__(self, arguments: argparse.Namespace, names: tuple[str, ...]) -> None:
        self._arguments, self.names = arguments, names

    def start(self, stack: ExitStack, directory: Path, environ: dict[str, str]) -> None:
        given = self._arguments
        self._log = directory / f"{self.names[0]}.log"
        command = [sys.executable, str(HERE / "loops.py"), given.recipe, *report.recipe_options(given)]
        command += ["--variants", *self.names, "--turns", str(directory), "--block", str(given.block)]
        command += ["--num", str(given.workers), "--port", str(free_port())]
        command += ["--parent", str(os.getpid())]
        self._processes = []
        for rank in range(given.workers):
            output = stack.enter_context(self._log.open("ab"))
            process = subprocess.Popen(
                [*command, "--rank", str(rank)],
                env={**environ, **loop_environment(rank, tolerant="seed" in self.names)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            stack.callback(end, process)
            self._processes.append(process)

    def check(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise SystemExit(f"a process of {self.names[0]} has ended:\n{self._log.read_text()[-3000:]}")

    def times(self, name: str, told: Sequence[list[dict[str, Any]]]) -> list[list[float]]:
        return [members[0]["step_time_s"] for members in told]


class Job:
    """A job of `elastic-train run`."""

    def __init__(self, arguments: argparse.Namespace, shards: int, *settings: str) -> None:
        self._arguments, self._settings = arguments, [f"shards={shards}", *settings]
        self.names = ("-".join(["ours", str(shards), *settings]),)

    def start(self, stack: ExitStack, directory: Path, environ: dict[str, str]) -> None:
        given = self._arguments
        told = {"NAME": self.names[0], "BLOCK": given.block, "RECIPE": given.recipe, "DIR": directory}
        self._job = stack.enter_context(
            running(
                HERE / "in_turns.py",
                given.workers,
                NEVER,
                directory / self.names[0],
                report.recipe_options(given, *self._settings),
                environ={**environ, **{f"TURNS_{name}": str(value) for name, value in told.items()}},
            )
        )

    def check(self) -> None:
        self._job.check()

    def times(self, name: str, told: Sequence[list[dict[str, Any]]]) -> list[list[float]]:
        block = self._arguments.block
        by_step: dict[int, float] = {}

        def all_known() -> bool:
            by_step.update((line["step"], line["step_time_s"]) for line in self._job.lines("metrics.jsonl"))
            return max(by_step, default=0) > len(told) * block

        self._job.wait("the metrics of the last turn", all_known)
        # Turn i takes steps i * block + 2 to (i + 1) * block + 1, and waits before the first of them.
        return [[by_step[turn * block + 2 + number] for number in range(1, block)] for turn in range(len(told))]


def planned(arguments: argparse.Namespace) -> list[Training]:
    """What is measured, in this order."""
    trainings: list[Training] = []
    if "plain" in arguments.variants:
        trainings.append(Loops(arguments, PLAIN))
    if "seed" in arguments.variants:
        trainings.append(Loops(arguments, ("seed",)))
    if "ours" in arguments.variants:
        trainings += [Job(arguments, shards) for shards in arguments.shards]
        trainings += [Job(arguments, arguments.shards[0], setting) for setting in arguments.ours_with]
    return trainings


def take_turns(group: Sequence[Training], arguments: argparse.Namespace) -> dict[str, Any]:
    """Starts all trainings of the group, and has them take turns. By variant: step times, memory peaks."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environ = dict(os.environ)
        if len(group) > 1:
            environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 / len(group):.2f}"
        for training in group:
            training.start(stack, directory, environ)
        turns, turn = Turns(directory), Turn(-1, "")
        names = [name for training in group for name in training.names]
        told: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
        for _ in range(arguments.rounds + 1):
            for name in names:
                turn = Turn(turn.number + 1, name)
                turns.give(turn)
                told[name].append(answers(turns, turn, arguments.workers, group))
        turns.give(Turn(turn.number + 1, END))
        return {
            name: {
                "turns": training.times(name, told[name])[1:],
                "memory": {key: max(member[key] for member in told[name][-1]) for key in memory_keys(told[name])},
            }
            for training in group
            for name in training.names
        }


def answers(turns: Turns, turn: Turn, workers: int, group: Sequence[Training]) -> list[dict[str, Any]]:
    """What all members say of a turn, when they have taken it."""
    deadline = time.monotonic() + LIMIT_S
    while not (told := turns.told(turn, workers)):
        for training in group:
            training.check()
        if time.monotonic() > deadline:
            raise SystemExit(f"the members of {turn.name} have not taken turn {turn.number} within {LIMIT_S:g} s")
        time.sleep(0.01)
    return told


def memory_keys(told: Sequence[list[dict[str, Any]]]) -> list[str]:
    return [key for key in told[-1][0] if key.startswith("peak")]


def compared(variants: dict[str, Any], num_samples: int) -> dict[str, Any]:
    """Each variant's figures, and its ratio to the faster of the plain loops: of medians, turn by turn."""
    medians = {name: [median(times) for times in each["turns"]] for name, each in variants.items()}
    plain = min((name for name in PLAIN if name in medians), key=lambda name: median(medians[name]), default=None)
    found: dict[str, Any] = {}
    for name, each in variants.items():
        times = [value * 1e3 for turn in each["turns"] for value in turn]
        found[name] = {
            "step_ms": report.spread(times),
            "samples_per_s": round(num_samples / median(times) * 1e3, 1),
            **{key: round(value, 1) for key, value in each["memory"].items()},
        }
        if plain is not None:
            ratios = [mine / theirs for mine, theirs in zip(medians[name], medians[plain], strict=True)]
            differences = [(mine - theirs) * 1e3 for mine, theirs in zip(medians[name], medians[plain], strict=True)]
            found[name] |= {"ratio_to_plain": report.spread(ratios), "more_than_plain_ms": report.spread(differences)}
            if "peak_device_mib" in each["memory"]:
                peaks = each["memory"]["peak_device_mib"] / variants[plain]["memory"]["peak_device_mib"]
                found[name]["peak_device_ratio"] = round(peaks, 3)
    return {"plain_is": plain, "variants": found}


def loop_environment(rank: int, tolerant: bool) -> dict[str, str]:
    """What a loop's process needs besides: its own GPU, and for the guide's loop what the guide sets."""
    found = {"CUDA_VISIBLE_DEVICES": str(rank), "TF_CPP_MIN_LOG_LEVEL": "2"}
    if tolerant:
        found["XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE"] = "1"
        if report.accelerators():
            found["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), GPU_XLA_FLAGS)
    return found


def batch_size(arguments: argparse.Namespace) -> int:
    trainer = load_recipe(arguments.recipe)
    return resolve(config_class_of(trainer), arguments.config, arguments.set).batch_size


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


if __name__ == "__main__":
    main()
