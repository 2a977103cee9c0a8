"""The command line: `elastic-train run`, `coordinator`, `verify-faults`, `stop`, `save`, `drain`, `resize`, and what
only reads a run directory (`cli_reading`)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from elastic_train.checkpoint.resume import Mode
from elastic_train.cli_options import RunDir, shown_as, whole
from elastic_train.cli_reading import ReadingCommand, read_run
from elastic_train.errors import ElasticTrainError, InterruptedByUser, UsageError
from elastic_train.terminal import say

if TYPE_CHECKING:
    from elastic_train.launch.options import JobOptions

Overrides = Annotated[
    tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="set", metavar="KEY=VALUE")
]


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """What is trained, and how many workers the whole job has.

    Attributes:
      recipe: a file, a module, or the name of a recipe that comes along (digits_mlp).
      config: a TOML file with settings.
      workers: number of workers on all hosts together; by default one per GPU, or a single one on CPU.
      min_workers: the job pauses while it has fewer members than this.
      steps: optimizer updates in total.
      run_dir: where everything is written; by default runs/RECIPE-TIME.
      seed: start of all random numbers and of the order of the samples.
      overrides: settings, as key=value; several, and several times.
    """

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
    config: Annotated[Path | None, shown_as("FILE")] = None
    workers: Annotated[int | None, shown_as("N"), whole("--workers", "N")] = None
    min_workers: Annotated[int, whole("--min-workers", "M")] = 1
    steps: Annotated[int | None, shown_as("S"), whole("--steps", "S")] = None
    run_dir: Annotated[Path | None, shown_as("DIR")] = None
    seed: Annotated[int | None, shown_as("K"), whole("--seed", "K")] = None
    overrides: Overrides = ()


@dataclass(frozen=True, kw_only=True)
class _Host:
    """How this host and the others reach each other.

    Attributes:
      address: where other hosts reach this one's workers; by default its address on the way to the coordinator.
      tls_cert: this host's certificate chain, PEM; encrypts the control plane.
      tls_key: its private key, PEM.
      tls_ca: the authorities that the other hosts' certificates must come from, PEM.
      tls_peer_uri_prefix: for JAX's own service: what a URI in peers' certificates begins with, instead of their name.
    """

    address: Annotated[str, shown_as("HOST")] = ""
    tls_cert: Annotated[str, shown_as("FILE")] = ""
    tls_key: Annotated[str, shown_as("FILE")] = ""
    tls_ca: Annotated[str, shown_as("FILE")] = ""
    tls_peer_uri_prefix: Annotated[str, shown_as("URI")] = ""


@dataclass(frozen=True, kw_only=True)
class Run(_Host, _Recipe):
    """Train a recipe with any number of workers, through the loss and return of any of them.

    The same command goes on with a run that was stopped or broken off.

    Exit codes: 0 done; 2 bad usage, recipe or config; 3 the recipe's own code failed on every worker;
    4 gave up; 130 stopped on request. The first SIGINT or SIGTERM asks for a stop after a commit, which is
    saved; the second stops at once. SIGUSR1 has every worker write its stacks to its log.

    Attributes:
      bind: where the coordinator listens; port 0 takes a free one.
      resume: never: the run directory must hold no run; auto: go on with one that it holds, from its newest good
        checkpoint; must: only go on.
      slots: the slots of this host, as 0-3 or 0,2,5; by default all.
      coordinator: HOST:PORT of a coordinator that runs elsewhere; this host then only fills its slots.
      chaos: a TOML file with faults that are injected into this run; see docs/chaos.md.
      trace_blocks: write down what this host's workers do at barriers, for `elastic-train barriers verify`; always so
        with --chaos.
    """

    bind: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = "127.0.0.1:0"
    resume: Mode = "auto"
    slots: Annotated[str | None, shown_as("SLOTS")] = None
    coordinator: Annotated[str | None, shown_as("HOST:PORT")] = None
    chaos: Annotated[Path | None, shown_as("FILE")] = None
    trace_blocks: bool = False


@dataclass(frozen=True, kw_only=True)
class CoordinatorAlone(_Host, _Recipe):
    """Run a job's coordinator without any worker; hosts join it with `run --coordinator`.

    Attributes:
      bind: where it listens, on an address that the hosts can reach.
      resume: as for `run`.
    """

    bind: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")]
    resume: Mode = "auto"


@dataclass(frozen=True, kw_only=True)
class VerifyFaults:
    """Train a recipe under real faults, then undisturbed, and say whether it came to the same and what they cost.

    The faults: SIGKILL of a worker and of the one of slot 0, an exception, a worker that is silent, one that is asked
    to leave. Run it on your own recipe before you trust it with many machines. At its start it says how long it takes.

    Exit codes: 0 exact, and every fault survived; 1 not; 2 bad usage, recipe or config; others as `run`.

    Attributes:
      recipe: a file, a module, or the name of a recipe that comes along (digits_mlp).
      workers: by default one per GPU, or three on CPU.
      steps: optimizer updates of each run; by default as many as are taken until every lost worker is back.
      config: a TOML file with settings.
      run_dir: where the runs are written; by default runs/RECIPE-verify-TIME.
      seed: start of all random numbers and of the order of the samples.
      json: the verdict as one JSON object.
      overrides: settings, as key=value; several, and several times.
    """

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
    workers: Annotated[int | None, shown_as("N"), whole("--workers", "N")] = None
    steps: Annotated[int | None, shown_as("S"), whole("--steps", "S")] = None
    config: Annotated[Path | None, shown_as("FILE")] = None
    run_dir: Annotated[Path | None, shown_as("DIR")] = None
    seed: Annotated[int | None, shown_as("K"), whole("--seed", "K")] = None
    json: bool = False
    overrides: Overrides = ()


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Ask a running job to stop after a commit, and to save; as one SIGTERM does. A second time stops it at once.

    Attributes:
      run_dir: the job's run directory.
    """

    run_dir: RunDir


@dataclass(frozen=True, kw_only=True)
class Save:
    """Have a running job save its state; wait for it, and print the checkpoint's path. Training goes on.

    Attributes:
      run_dir: the job's run directory.
    """

    run_dir: RunDir


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Have one worker leave after a commit, for good: it is not started again as long as the job runs.

    Attributes:
      run_dir: the job's run directory.
      worker: its slot.
    """

    run_dir: RunDir
    worker: Annotated[int, whole("--worker", "I")]


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Change the number of workers of a running job. Further ones join, or the highest slots leave after a commit.

    The number stays when the job goes on after an end, unless another `--workers` is given then.

    Attributes:
      run_dir: the job's run directory.
      workers: from now on, on all hosts together.
    """

    run_dir: RunDir
    workers: Annotated[int, whole("--workers", "M")]


@dataclass(frozen=True, kw_only=True)
class PlainOptions:
    """Train this recipe in one plain process.

    The same command goes on with a run that was stopped or broken off.

    Attributes:
      steps: optimizer updates in total.
      run_dir: where everything is written; by default runs/RECIPE-TIME.
      seed: start of all random numbers and of the order of the samples.
      config: a TOML file with settings.
      overrides: settings, as key=value; several, and several times.
      resume: never: the run directory must hold no run; auto: go on with one that it holds; must: only go on.
    """

    steps: Annotated[int | None, shown_as("S"), whole("--steps", "S")] = None
    run_dir: Annotated[Path | None, shown_as("DIR")] = None
    seed: Annotated[int | None, shown_as("K"), whole("--seed", "K")] = None
    config: Annotated[Path | None, shown_as("FILE")] = None
    overrides: Overrides = ()
    resume: Mode = "auto"

    @property
    def set(self) -> tuple[str, ...]:
        """All key=value texts, in order."""
        return _flat(self.overrides)


Command = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | ReadingCommand
    | Annotated[Stop, tyro.conf.subcommand("stop")]
    | Annotated[Save, tyro.conf.subcommand("save")]
    | Annotated[Drain, tyro.conf.subcommand("drain")]
    | Annotated[Resize, tyro.conf.subcommand("resize")]
    | Annotated[VerifyFaults, tyro.conf.subcommand("verify-faults")]
    | Annotated[CoordinatorAlone, tyro.conf.subcommand("coordinator")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Wrong options end it with SystemExit(2)."""
    description = "Train Flax models with multi-controller JAX through the loss and return of workers."
    command: Command = _parse(Command, argv, "elastic-train", description)
    try:
        return _perform(command)
    except ElasticTrainError as error:
        return report_error(error)
    except KeyboardInterrupt:  # before a job has begun; later Ctrl-C has a meaning of its own
        return InterruptedByUser.exit_code


def parse_plain(argv: Sequence[str] | None, prog: str) -> PlainOptions:
    """The options of `python recipes/x.py`. Wrong ones end the process with SystemExit(2)."""
    return _parse(PlainOptions, argv, prog)


def _parse(kind: Any, argv: Sequence[str] | None, prog: str, description: str | None = None) -> Any:
    pairs_off = (tyro.conf.FlagCreatePairsOff,)  # no --no-json beside --json
    try:
        return tyro.cli(kind, prog=prog, args=argv, config=pairs_off, description=description)
    except UsageError as error:
        raise SystemExit(report_error(error)) from None


def report_error(error: ElasticTrainError) -> int:
    """Prints what went wrong, once; returns the exit code for it."""
    from elastic_train.launch.check import CheckFailed

    if not isinstance(error, CheckFailed):  # that one has been printed where it happened
        say(f"elastic-train: {error}", sys.stderr)
    return error.exit_code


def default_run_dir(name: str) -> Path:
    """`runs/NAME-YYYYmmdd-HHMMSS`, in local time."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def parse_slots(text: str | None) -> tuple[int, ...] | None:
    """`0-3,6` as (0, 1, 2, 3, 6). Raises UsageError."""
    if text is None:
        return None
    from elastic_train.launch.options import MAX_WORKERS

    slots: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--slots {text}: write slots as 0-3 or 0,2,5")
        if int(last if dash else first) >= MAX_WORKERS:
            raise UsageError(f"--slots {text}: a job has at most {MAX_WORKERS} workers")
        slots += range(int(first), int(last if dash else first) + 1)
    if not slots or sorted(set(slots)) != sorted(slots):
        raise UsageError(f"--slots {text}: name each slot once, at least one")
    return tuple(sorted(slots))


def _perform(command: Command) -> int:
    # Each command imports what it needs: gRPC alone takes a fifth of a second.
    match command:
        case Stop() | Save() | Drain() | Resize():
            return _order(command)
        case Run():
            from elastic_train.launch.environment import TRACE_VARIABLE
            from elastic_train.launch.host import run_agent
            from elastic_train.launch.job import run_job

            options = _job_options(command, command.bind, parse_slots(command.slots), command.chaos, command.resume)
            traced = command.trace_blocks or command.chaos is not None
            environ = {**os.environ, **({TRACE_VARIABLE: "1"} if traced else {})}
            if command.coordinator is not None and command.chaos is not None:
                raise UsageError("--chaos belongs to the command that holds the coordinator; leave --coordinator away")
            if command.coordinator is not None:
                return run_agent(options, command.coordinator, environ)
            return run_job(options, environ)
        case VerifyFaults():
            return _verify_faults(command)
        case CoordinatorAlone():
            from elastic_train.launch.job import run_job

            if command.workers is None:
                raise UsageError("give --workers, the number of workers on all hosts together")
            return run_job(
                _job_options(command, command.bind, None, resume=command.resume), os.environ, with_agent=False
            )
        case _:
            return read_run(command)


def _verify_faults(command: VerifyFaults) -> int:
    from elastic_train.launch.recipe import recipe_name
    from elastic_train.launch.verify import verify_faults

    run_dir = command.run_dir or default_run_dir(f"{recipe_name(command.recipe)}-verify")
    same = {key: value for key, value in vars(command).items() if key not in ("json", "run_dir")}
    options = _job_options(Run(**same, run_dir=run_dir), "127.0.0.1:0", None)
    verified = verify_faults(options, os.environ)
    if command.json and verified.verdict is not None:
        print(json.dumps(verified.verdict.as_json()))
    else:
        say(verified.text)
    return verified.exit_code


def _order(command: Stop | Save | Drain | Resize) -> int:
    from elastic_train.coordinator import calls

    match command:
        case Stop():
            calls.stop(command.run_dir)
            print("the job stops after its next commit, and saves; once more stops it at once")
        case Save():
            step, path = calls.save(command.run_dir)
            say(f"step {step}: {path}")
        case Drain():
            calls.drain(command.run_dir, command.worker)
            print(f"worker {command.worker} leaves after the next commit, and does not come back")
        case Resize():
            calls.resize(command.run_dir, command.workers)
            print(f"the job has {command.workers} workers from now on; `elastic-train status` shows them come or leave")
    return 0


def _job_options(
    command: Run | CoordinatorAlone,
    bind: str,
    slots: tuple[int, ...] | None,
    chaos: Path | None = None,
    resume: Mode = "never",
) -> JobOptions:
    from elastic_train.coordinator.security import Tls
    from elastic_train.launch.options import JobOptions
    from elastic_train.launch.recipe import recipe_name

    return JobOptions(
        recipe=command.recipe,
        config=command.config,
        overrides=_flat(command.overrides),
        workers=command.workers,
        min_workers=command.min_workers,
        slots=slots,
        steps=command.steps,
        seed=command.seed,
        run_dir=command.run_dir or default_run_dir(recipe_name(command.recipe)),
        bind=bind,
        chaos=chaos,
        address=command.address,
        tls=Tls(
            cert=_absolute(command.tls_cert),
            key=_absolute(command.tls_key),
            ca=_absolute(command.tls_ca),
            peer_uri_prefix=command.tls_peer_uri_prefix,
        ),
        resume=resume,
    )


def _absolute(path: str) -> str:
    return os.path.abspath(path) if path else ""


def _flat(overrides: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """All key=value texts, in order. Raises UsageError if an option came without any."""
    if () in overrides:
        raise UsageError("--set: expected key=value after it, for example --set batch_size=64")
    return tuple(override for group in overrides for override in group)


if __name__ == "__main__":
    sys.exit(main())
