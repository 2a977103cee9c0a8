"""A run's final parameters, described leaf by leaf, for `elastic-train compare`.

`leaves.json` holds {"step", "leaves": {key path: {"dtype", "shape", "sha256", "norm", "max_abs"}}}. Unless they are
too large the parameters themselves are in `final_params.npz`, under their key paths.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # NumPy learns bfloat16 and the like from it
import numpy as np

from elastic_train.digests import sha256_of_leaf
from elastic_train.errors import UsageError
from elastic_train.telemetry.json_files import CHANGED, dump, read_object, unreadable, write_atomically

DESCRIPTION = "leaves.json"
ARRAYS = "final_params.npz"
_LEAF = {"dtype": str, "shape": [int], "sha256": str, "norm": (float, None), "max_abs": (float, None)}
MAX_BYTES = 256 << 20

# What zipfile and NumPy raise of bytes that are no archive, or hold no array of such a dtype.
_NO_ARRAY = (ValueError, TypeError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)
_CHUNK = 1 << 20


def write_leaves(run_dir: Path, step: int, named: Iterable[tuple[str, np.ndarray]], max_bytes: int = MAX_BYTES) -> None:
    """Writes both files; each appears whole or not at all. One leaf at a time is held.

    Args:
      run_dir: exists already.
      step: completed updates.
      named: key paths and their arrays.
      max_bytes: if the arrays take more, only the description is written, and older arrays are removed.

    Raises:
      OSError: `run_dir` cannot be written.
    """
    leaves: dict[str, Any] = {}
    num_bytes = 0
    temporary = run_dir / f".{ARRAYS}.{os.getpid()}"
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            for path, array in named:
                leaves[path] = _describe(path, array)
                num_bytes += array.nbytes
                if num_bytes <= max_bytes:
                    with archive.open(f"{path}.npy", "w", force_zip64=True) as file:
                        np.lib.format.write_array(file, np.asarray(array, order="C"), allow_pickle=False)
        if num_bytes <= max_bytes:
            temporary.rename(run_dir / ARRAYS)
        else:
            (run_dir / ARRAYS).unlink(missing_ok=True)
    finally:
        temporary.unlink(missing_ok=True)
    write_atomically(run_dir / DESCRIPTION, dump({"step": step, "leaves": leaves}, indent=2) + "\n", 0o644)


def read_leaves(run_dir: Path) -> dict[str, Any] | None:
    """The content of leaves.json; None if there is none. Raises UsageError if it is not what a run writes."""
    path = run_dir / DESCRIPTION
    try:
        found = read_object(path, {"step": int, "leaves": {str: _LEAF}})
    except FileNotFoundError:
        return None
    for name, leaf in found["leaves"].items():
        if not _is_dtype(leaf["dtype"]):
            wrong = f"leaves.{name}.dtype = {leaf['dtype']!r}: expected the name of a dtype"
            raise UsageError(f"{path} is not what a run writes: {wrong}; {CHANGED}")
    return found


def _is_dtype(name: str) -> bool:
    try:
        return np.dtype(name).name == name
    except (TypeError, ValueError, SyntaxError):  # the last one of texts that look like the dtype of a record
        return False


def read_array(run_dir: Path, path: str, description: dict[str, Any]) -> np.ndarray | None:
    """One leaf, if its bits are there; None if they are not, or are not those of the description.

    Arrays of another run's end may lie there: the two files are not replaced in one moment.

    Raises UsageError if they cannot be read.
    """
    dtype = np.dtype(description["dtype"])
    try:
        with zipfile.ZipFile(run_dir / ARRAYS) as archive, archive.open(f"{path}.npy") as file:
            stored = np.lib.format.read_array(file, allow_pickle=False)
        # NumPy stores dtypes that it does not know itself as plain bytes.
        array = stored if stored.dtype == dtype else stored.view(dtype)
    except (FileNotFoundError, KeyError):
        return None
    except OSError as error:
        raise unreadable(run_dir / ARRAYS, error) from error
    except _NO_ARRAY as error:
        raise UsageError(f"cannot read {path} in {run_dir / ARRAYS}: {error}; {CHANGED}") from error
    return array if sha256_of_leaf(path, array) == description["sha256"] else None


def _describe(path: str, array: np.ndarray) -> dict[str, Any]:
    squares, max_abs = 0.0, 0.0
    flat = np.ascontiguousarray(array).reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        chunk = np.abs(flat[start : start + _CHUNK].astype(_wide(array.dtype)))
        squares += float(np.square(chunk).sum())
        max_abs = float(np.maximum(max_abs, chunk.max()))  # NaN goes through
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "sha256": sha256_of_leaf(path, array),
        "norm": math.sqrt(squares),
        "max_abs": max_abs,
    }


def _wide(dtype: np.dtype) -> type:
    return np.complex128 if dtype.kind == "c" else np.float64
