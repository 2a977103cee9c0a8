"""The commands that only read a run directory, and write down at most what they have read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from elastic_train.cli_options import RunDir, shown_as, whole
from elastic_train.terminal import say


@dataclass(frozen=True, kw_only=True)
class Status:
    """Show what the workers of a job are doing.

    Attributes:
      run_dir: the job's run directory.
      json: as one JSON object.
    """

    run_dir: RunDir
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """Print the summary of a run that has ended, as at its end, and write it to report.html in the run directory.

    Attributes:
      run_dir: the job's run directory.
    """

    run_dir: RunDir


@dataclass(frozen=True, kw_only=True)
class Ls:
    """List a run's checkpoints.

    Attributes:
      run_dir: the job's run directory.
    """

    run_dir: RunDir


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read checkpoints as a whole and compare every file with its digest. Changes nothing.

    Exit codes: 0 all are good; 1 one is damaged; 2 there is none, or one cannot be read.

    Attributes:
      run_dir: the job's run directory.
      step: of one checkpoint; by default all.
    """

    run_dir: RunDir
    step: Annotated[int | None, shown_as("S"), whole("--step", "S")] = None


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Say which leaves of two checkpoints differ, by their digests.

    Exit codes: 0 none; 1 some; 2 there is no such checkpoint, or it cannot be read.

    Attributes:
      run_dir: the job's run directory.
      step: the first checkpoint; by default the newest, or the one before it if no other option is given.
      other_dir: where the second one is; by default in the same run.
      other_step: the second checkpoint; by default the newest.
    """

    run_dir: RunDir
    step: Annotated[int | None, shown_as("S"), whole("--step", "S")] = None
    other_dir: Annotated[Path | None, shown_as("DIR2")] = None
    other_step: Annotated[int | None, shown_as("S2"), whole("--other-step", "S2")] = None


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a checkpoint's parameters to a safetensors file. Needs the extra `safetensors`.

    Attributes:
      run_dir: the job's run directory.
      out: the file.
      step: of which checkpoint; by default the newest.
    """

    run_dir: RunDir
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    step: Annotated[int | None, shown_as("S"), whole("--step", "S")] = None


CheckpointAction = (
    Annotated[Ls, tyro.conf.subcommand("ls")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Diff, tyro.conf.subcommand("diff")]
    | Annotated[Export, tyro.conf.subcommand("export")]
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """List, verify, compare or export a run's checkpoints."""

    action: Annotated[CheckpointAction, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Prove that a run consumed every sample exactly once per pass and left out no step, or say where not.

    Exit codes: 0 proven; 1 not; 2 there is no run directory, or one of its other files was changed. A job may still be
    running.

    Attributes:
      action: what to do with the ledger.
      run_dir: the job's run directory.
    """

    action: tyro.conf.Positional[Literal["verify"]]
    run_dir: RunDir


@dataclass(frozen=True, kw_only=True)
class Barriers:
    """Prove that every member list that a barrier handed out is valid, and that members agreed, or say where not.

    The run must have been traced: `run --trace-blocks`.

    Exit codes: 0 proven; 1 not; 2 there is no run directory, or one of its files was changed. A job may still be
    running.

    Attributes:
      action: what to do with the barriers.
      run_dir: the job's run directory.
    """

    action: tyro.conf.Positional[Literal["verify"]]
    run_dir: RunDir


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Say whether two runs are the same computation: equal digests, or where and by how much they differ.

    Exit codes: 0 the same; 1 different, or not known; 2 there is no run directory, or one of its files was changed.

    Attributes:
      run_dir: a job's run directory.
      other_dir: another one's.
    """

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR1")]
    other_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR2")]


ReadingCommand = (
    Annotated[Status, tyro.conf.subcommand("status")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Checkpoint, tyro.conf.subcommand("checkpoint")]
    | Annotated[Ledger, tyro.conf.subcommand("ledger")]
    | Annotated[Barriers, tyro.conf.subcommand("barriers")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
)


def read_run(command: ReadingCommand) -> int:
    """Carries out one of these commands; returns its exit code. Raises ElasticTrainError."""
    # Each imports what it needs: gRPC alone takes a fifth of a second.
    match command:
        case Status():
            from elastic_train.telemetry.status import format_status, live_status

            status = live_status(command.run_dir)
            say(json.dumps(status) if command.json else format_status(status))
            return 0
        case Report():
            from elastic_train.telemetry.ended import report, write_page

            text = report(command.run_dir)
            say(text)  # before the page is written, for which there may be no room
            write_page(command.run_dir, text)
            return 0
        case Checkpoint(action=action):
            return _checkpoint(action)
        case Ledger():
            from elastic_train.data.ledger import format_report
            from elastic_train.data.ledger_files import verify_run

            proof = verify_run(command.run_dir)
            say(format_report(proof))
            return 0 if proof.proven else 1
        case Barriers():
            from elastic_train.telemetry.barriers import format_barriers, verify_barriers

            found = verify_barriers(command.run_dir)
            say(format_barriers(found))
            return 0 if found.proven else 1
        case Compare():
            from elastic_train.telemetry import compare

            one, other = compare.read_run(command.run_dir), compare.read_run(command.other_dir)
            comparison = compare.compare(one, other)
            say(compare.format_comparison(comparison, one, other))
            return 0 if comparison.same else 1


def _checkpoint(action: Ls | Verify | Diff | Export) -> int:
    from elastic_train.checkpoint import show

    match action:
        case Ls():
            say(show.listing(action.run_dir))
        case Verify():
            are_good, text = show.verification(action.run_dir, action.step)
            say(text)
            return 0 if are_good else 1
        case Diff():
            is_same, text = show.comparison(action.run_dir, action.step, action.other_step, action.other_dir)
            say(text)
            return 0 if is_same else 1
        case Export():
            from elastic_train.checkpoint.weights import export_safetensors

            step = export_safetensors(action.run_dir, action.out, action.step)
            say(f"{action.out}: the parameters after step {step}")
    return 0
