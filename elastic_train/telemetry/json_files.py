"""JSON in files: whole files that appear at once, and files of one object a line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic_train.errors import UsageError
from elastic_train.telemetry.kinds import OBJECT, Kind, what_is_wrong

CHANGED = "the file was changed; bring it back as the run wrote it"
"""The end of every message about a file that holds what no run writes."""


def read_lines(path: Path, kind_of: Callable[[dict[str, Any]], Kind] = lambda line: OBJECT) -> list[dict[str, Any]]:
    """The objects of a `.jsonl` file; none if it does not exist. A last line that was cut off is left out.

    Args:
      path: the file.
      kind_of: what must be in a line, as `kinds` has it.

    Raises:
      UsageError: another line is no JSON object, or not of its kind; or the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(path, error) from error
    objects = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: not JSON: {error}; {CHANGED}") from error
        if wrong := what_is_wrong(found, OBJECT) or what_is_wrong(found, kind_of(found)):
            raise UsageError(f"{path}, line {number}, is not what a run writes: {wrong}; {CHANGED}")
        objects.append(found)
    return objects


def read_object(path: Path, kind: Kind = OBJECT) -> dict[str, Any]:
    """The JSON object that is the whole of a file, of this kind.

    Raises:
      FileNotFoundError: there is no such file.
      UsageError: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: not JSON: {error}; {CHANGED}") from error
    if wrong := what_is_wrong(found, OBJECT) or what_is_wrong(found, kind):
        raise UsageError(f"{path} is not what a run writes: {wrong}; {CHANGED}")
    return found


def unreadable(path: Path, error: OSError) -> UsageError:
    """What to raise for a file that the system does not let be read."""
    return UsageError(f"cannot read {path}: {error.strerror or error}")


def write_atomically(path: Path, text: str, mode: int) -> None:
    """Writes `text` with these permissions. A reader finds the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, mode)  # whatever the umask says
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    temporary.rename(path)


def dump(value: object, indent: int | None = None) -> str:
    """`value` as JSON. Numbers that are not finite become null: JSON has no word for them."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
