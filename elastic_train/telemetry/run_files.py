"""The files of a run directory that are read as a whole."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_train.errors import UsageError
from elastic_train.telemetry.json_files import CHANGED, read_object, unreadable
from elastic_train.telemetry.kinds import OBJECT, Kind
from elastic_train.telemetry.records import is_run_directory


def require_run_directory(path: Path) -> None:
    """Raises UsageError unless `path` holds a run."""
    if not is_run_directory(path):
        raise UsageError(
            f"{path} is no run directory: it has no job.json; give the --run-dir of an `elastic-train run`"
        )


def read_secret(run_dir: Path) -> str:
    """What a caller of the job's coordinator must know. Raises OSError."""
    return (run_dir / "secret").read_text(encoding="utf-8").strip()


def read_summary(run_dir: Path, kind: Kind = OBJECT) -> dict[str, Any]:
    """The content of summary.json, of this kind; empty while the job runs.

    Raises UsageError if it cannot be read, or holds something else.
    """
    try:
        return read_object(run_dir / "summary.json", kind)
    except FileNotFoundError:
        return {}


def read_config(run_dir: Path) -> dict[str, Any]:
    """config.toml, with dotted keys; empty if it is not there. Raises UsageError if it is no TOML that can be read."""
    path = run_dir / "config.toml"
    try:
        return dict(_flat(tomllib.loads(path.read_text(encoding="utf-8")), ""))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: not TOML: {error}; {CHANGED}") from error


def _flat(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in table.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return pairs
