"""The files of a run directory that are read as a whole."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_train.errors import UsageError
from elastic_train.telemetry.json_files import CHANGED, read_object, unreadable
from elastic_train.telemetry.kinds import OBJECT, Kind
from elastic_train.telemetry.records import is_run_directory

_JOB = {
    "address": (str, None),
    "steps?": (int, None),
    "tls?": dict.fromkeys(("cert?", "key?", "ca?", "peer_uri_prefix?"), str),
}
"""What is read of job.json, as `kinds` has it."""


def require_run_directory(path: Path) -> None:
    """Raises UsageError unless `path` holds a run."""
    if not is_run_directory(path):
        raise UsageError(
            f"{path} is no run directory: it has no job.json; give the --run-dir of an `elastic-train run`"
        )


def read_job(run_dir: Path) -> dict[str, Any]:
    """The content of job.json: among others `address` of the coordinator, None if there is none.

    Raises:
      FileNotFoundError: there is no such file.
      UsageError: it cannot be read, or holds something else.
    """
    job = read_object(run_dir / "job.json", _JOB)
    address = job["address"]
    if address is not None and not _is_address(address):
        wrong = f"address = {json.dumps(address)}: expected HOST:PORT or null"
        raise UsageError(f"{run_dir / 'job.json'} is not what a run writes: {wrong}; {CHANGED}")
    return job


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536
    return bool(host) and host.isprintable() and is_port


def read_secret(run_dir: Path) -> str:
    """What a caller of the job's coordinator must know. Raises OSError, and UsageError if no call could carry it."""
    path = run_dir / "secret"
    secret = path.read_text(encoding="utf-8", errors="replace").strip()
    if not (secret and secret.isascii() and secret.isprintable()):
        raise UsageError(f"{path} holds no secret; {CHANGED}")
    return secret


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
