"""Where metrics go besides `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from elastic_train.errors import UsageError


class Tracker(Protocol):
    """Takes the lines of `metrics.jsonl` as they are written: each step once, in ascending order."""

    def log(self, line: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Writes scalars to `DIR/tensorboard`."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, line: Mapping[str, Any]) -> None:
        for name, value in line.items():
            if name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, line["step"], line["time"])

    def close(self) -> None:
        self._writer.close()


def check_trackers(tensorboard: bool) -> None:
    """Raises UsageError if what the config asks for is not installed."""
    if tensorboard and find_spec("tensorboardX") is None:
        raise UsageError(
            "tensorboard = true, but the package tensorboardX is not installed: install elastic-train[tensorboard], or "
            "leave the setting out (metrics.jsonl has the same numbers)"
        )


def open_trackers(tensorboard: bool, run_dir: Path) -> Sequence[Tracker]:
    """The trackers that the config asks for."""
    return [TensorBoard(run_dir)] if tensorboard else []
