"""The files of a run directory that are read as a whole."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_train.errors import UsageError
from elastic_train.telemetry.records import is_run_directory


def require_run_directory(path: Path) -> None:
    """Raises UsageError unless `path` holds a run."""
    if not is_run_directory(path):
        raise UsageError(
            f"{path} is no run directory: it has no job.json; give the --run-dir of an `elastic-train run`"
        )


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that is the whole of a file. Raises OSError, and UsageError if it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: not JSON: {error}; the file was changed") from error
    if not isinstance(found, dict):
        raise UsageError(f"cannot read {path}: no JSON object; the file was changed")
    return found


def read_secret(run_dir: Path) -> str:
    """What a caller of the job's coordinator must know. Raises OSError."""
    return (run_dir / "secret").read_text(encoding="utf-8").strip()


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The content of summary.json; empty while the job runs. Raises UsageError if it cannot be read, or is no JSON."""
    try:
        return read_object(run_dir / "summary.json")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"cannot read {run_dir / 'summary.json'}: {error.strerror}") from error


def read_config(run_dir: Path) -> dict[str, Any]:
    """config.toml, with dotted keys; empty if it is not there. Raises UsageError if it is no TOML."""
    path = run_dir / "config.toml"
    try:
        return dict(_flat(tomllib.loads(path.read_text(encoding="utf-8")), ""))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UsageError(f"{path}: not TOML: {error}; the file was changed") from error


def _flat(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in table.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return pairs
