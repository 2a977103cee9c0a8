"""TensorBoard gets the numbers of metrics.jsonl, each step once."""

import importlib.util

import pytest

from elastic_train.errors import UsageError
from elastic_train.telemetry import trackers


class Writer:
    """Stands in for tensorboardX's writer: what is asked of it, in order."""

    def __init__(self) -> None:
        self.scalars: list[tuple] = []
        self.closed = False

    def add_scalar(self, *scalar) -> None:
        self.scalars.append(scalar)

    def close(self) -> None:
        self.closed = True


def test_scalars_are_written_under_their_step_and_time(tmp_path):
    board = trackers.TensorBoard(tmp_path)
    board._writer.close()
    board._writer = writer = Writer()
    board.log({"step": 7, "time": 99.5, "loss": 0.25, "eval_accuracy": 1, "workers": [0, 1], "learning_rate": None})
    board.close()
    assert writer.scalars == [("loss", 0.25, 7, 99.5), ("eval_accuracy", 1, 7, 99.5)]
    assert writer.closed


def test_a_file_of_events_is_left_in_the_run_directory(tmp_path):
    (board,) = trackers.open_trackers(True, tmp_path)
    board.log({"step": 1, "time": 1.0, "loss": 2.0})
    board.close()
    assert [path.name.startswith("events.out") for path in (tmp_path / "tensorboard").iterdir()] == [True]
    assert list(trackers.open_trackers(False, tmp_path)) == []


def test_a_missing_package_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    trackers.check_trackers(False)
    with pytest.raises(UsageError, match=r"tensorboardX is not installed: install elastic-train\[tensorboard\]"):
        trackers.check_trackers(True)
    monkeypatch.undo()
    assert importlib.util.find_spec("tensorboardX") is not None
    trackers.check_trackers(True)
