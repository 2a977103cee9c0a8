"""What the verifier of a ledger needs from a run directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from elastic_train.data.ledger import Report, Witness, verify
from elastic_train.telemetry.json_files import read_lines, unreadable
from elastic_train.telemetry.kinds import of_events
from elastic_train.telemetry.run_files import read_config, read_summary, require_run_directory

_SUMMARY = {"step": int, "samples": int}
_METRICS = {"step": int, "samples": int, "workers": [int]}
_EVENTS = {"recovered": {"step": int}, "ledger_gap": {"first_step": int}}


def verify_run(run_dir: Path) -> Report:
    """Verifies the ledger of a run that has ended, or still goes on.

    Raises:
      UsageError: `run_dir` is no run directory, one of its files cannot be read, or one besides the ledger holds what
        no run writes. What is wrong in the ledger is in the report.
    """
    require_run_directory(run_dir)
    # Before the ledger: while the job runs, the ledger may know more than they do, never less.
    summary = read_summary(run_dir, _SUMMARY)
    events = read_lines(run_dir / "events.jsonl", of_events(_EVENTS))
    metrics = read_lines(run_dir / "metrics.jsonl", lambda line: _METRICS)
    seed = read_config(run_dir).get("seed")
    begins = [event["step"] for event in events if event["event"] == "recovered"]
    begins += [event["first_step"] for event in events if event["event"] == "ledger_gap"]
    return verify(
        _lines(run_dir / "ledger.jsonl"),
        seed=seed if type(seed) is int else None,
        # The first epoch's first step: a job that began from a checkpoint has no step 1.
        first_step=min(begins, default=metrics[0]["step"] if metrics else 1),
        witnesses={line["step"]: Witness(line["samples"], line["workers"]) for line in metrics},
        end=(summary["step"], summary["samples"]) if summary else None,
    )


def _lines(path: Path) -> Iterator[str]:
    """With their line ends; none if there is no such file."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            yield from lines
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from error
