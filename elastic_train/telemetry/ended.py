"""What is known of a run that has ended: its summary in words, also as a page."""

from __future__ import annotations

import html
from pathlib import Path

from elastic_train.errors import UsageError
from elastic_train.telemetry.json_files import write_atomically
from elastic_train.telemetry.records import is_written
from elastic_train.telemetry.report import SUMMARY, format_summary
from elastic_train.telemetry.run_files import read_summary, require_run_directory
from elastic_train.terminal import harmless

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body><h1>{title}</h1><pre>{text}</pre></body>
</html>
"""


def report(run_dir: Path) -> str:
    """The summary of the run in `run_dir`, as a person reads it at the end of a run.

    Raises:
      UsageError: there is no run, it has not ended, or its summary was changed.
    """
    require_run_directory(run_dir)
    if not (summary := read_summary(run_dir, SUMMARY)):
        if is_written(run_dir):
            raise UsageError(
                f"the run in {run_dir} has not ended, so there is no summary; `elastic-train status {run_dir}` shows "
                "what it does"
            )
        raise UsageError(
            f"the run in {run_dir} was broken off, so there is no summary; the command that started it goes on with it"
        )
    text = format_summary(summary, run_dir)
    # Of which the summary says that it is above.
    return f"{summary['traceback'].rstrip()}\n\n{text}" if summary["traceback"] else text


def write_page(run_dir: Path, text: str) -> None:
    """Writes what `report` has given to the run's report.html. Raises UsageError if it cannot be written."""
    title = f"Run {run_dir.resolve().name}"
    page = _PAGE.format(title=html.escape(harmless(title)), text=html.escape(harmless(text)))
    try:
        write_atomically(run_dir / "report.html", page, 0o644)
    except OSError as error:
        raise UsageError(f"cannot write {run_dir / 'report.html'}: {error.strerror}") from error
