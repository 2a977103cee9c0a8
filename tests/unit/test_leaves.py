"""What a run leaves of its final parameters."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from elastic_train.errors import UsageError
from elastic_train.state import sha256_of_leaves
from elastic_train.telemetry.leaves import read_array, read_leaves, write_leaves

ARRAYS = {
    "file": np.array([3.0, -4.0], np.float32),  # NumPy's savez would take this name for its own argument
    "layers/0/kernel": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    "narrow": np.array([0.5, -2.0, 1.0], ml_dtypes.bfloat16),
    "scalar": np.array(2, np.int32),
    "empty": np.zeros((0, 3), np.float32),
    "flags": np.array([True, False]),
}


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    write_leaves(tmp_path, 7, ARRAYS.items())
    found = read_leaves(tmp_path)
    assert found is not None and found["step"] == 7 and found["leaves"].keys() == ARRAYS.keys()
    for path, array in ARRAYS.items():
        description = found["leaves"][path]
        assert description["sha256"] == sha256_of_leaves([(path, array)])
        assert (description["dtype"], tuple(description["shape"])) == (array.dtype.name, array.shape)
        stored = read_array(tmp_path, path, description)
        assert stored is not None and stored.dtype == array.dtype
        np.testing.assert_array_equal(stored, array)
    assert (found["leaves"]["file"]["norm"], found["leaves"]["file"]["max_abs"]) == (5.0, 4.0)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["final_params.npz", "leaves.json"]
    with np.load(tmp_path / "final_params.npz") as loaded:
        np.testing.assert_array_equal(loaded["layers/0/kernel"], ARRAYS["layers/0/kernel"])


def test_large_parameters_are_only_described(tmp_path: Path) -> None:
    write_leaves(tmp_path, 1, ARRAYS.items())
    write_leaves(tmp_path, 2, ARRAYS.items(), max_bytes=20)
    assert [entry.name for entry in tmp_path.iterdir()] == ["leaves.json"]
    found = read_leaves(tmp_path)
    assert found is not None and found["step"] == 2 and read_array(tmp_path, "file", found["leaves"]["file"]) is None


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    write_leaves(tmp_path, 1, [("a", np.array([np.nan, 1.0], np.float32))])
    found = read_leaves(tmp_path)
    assert found is not None and (found["leaves"]["a"]["norm"], found["leaves"]["a"]["max_abs"]) == (None, None)


def test_arrays_of_another_end_are_not_taken(tmp_path: Path) -> None:
    write_leaves(tmp_path, 1, [("a", np.ones(3, np.float32))])
    found = read_leaves(tmp_path)
    assert found is not None
    assert read_array(tmp_path, "a", {**found["leaves"]["a"], "sha256": "0" * 64}) is None
    assert read_array(tmp_path, "b", found["leaves"]["a"]) is None


def test_damaged_files_are_named(tmp_path: Path) -> None:
    assert read_leaves(tmp_path) is None
    write_leaves(tmp_path, 1, [("a", np.ones(3, np.float32))])
    description = json.loads((tmp_path / "leaves.json").read_text())["leaves"]["a"]
    (tmp_path / "final_params.npz").write_bytes(b"PK nothing")
    with pytest.raises(UsageError, match=r"final_params\.npz"):
        read_array(tmp_path, "a", description)
    (tmp_path / "leaves.json").write_text("{")
    with pytest.raises(UsageError, match=r"leaves\.json"):
        read_leaves(tmp_path)


def test_nothing_is_left_of_a_description_that_failed(tmp_path: Path) -> None:
    def broken():
        yield "a", np.ones(3, np.float32)
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_leaves(tmp_path, 1, broken())
    assert list(tmp_path.iterdir()) == []
