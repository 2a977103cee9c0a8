"""Several trainings on one machine that take turns, so that what else the machine does hits all alike.

The file `turn` in a shared directory holds a number and a name; the members of the training of that name take one block
of steps and say so. Used by `step_time.py`, and imported by what it starts.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

POLL_S = 0.02
END = "end"


class Turn(NamedTuple):
    """Whose block of steps is next. Numbers ascend."""

    number: int
    name: str


class Turns:
    """Where the turn is told and answered.

    Args:
      directory: shared by all.
      member: which process of its training this is.
    """

    def __init__(self, directory: Path, member: int = 0) -> None:
        self._directory, self._member = directory, member
        self._last = -1

    def give(self, turn: Turn) -> None:
        """Says whose turn it is."""
        _replace(self._directory / "turn", json.dumps(turn))

    def wait(self, *names: str) -> Turn:
        """The next turn that is for one of `names`, or the end."""
        while True:
            turn = self._current()
            if turn.name == END or (turn.name in names and turn.number > self._last):
                self._last = turn.number
                return turn
            time.sleep(POLL_S)

    def done(self, turn: Turn, told: dict[str, Any]) -> None:
        """This member has taken its steps."""
        _replace(self._directory / f"{turn.number}-{self._member}", json.dumps(told))

    def told(self, turn: Turn, num_members: int) -> list[dict[str, Any]]:
        """What members have said of a turn, once all have; empty before."""
        paths = [self._directory / f"{turn.number}-{member}" for member in range(num_members)]
        if not all(path.exists() for path in paths):
            return []
        return [json.loads(path.read_text()) for path in paths]

    def _current(self) -> Turn:
        path = self._directory / "turn"
        return Turn(*json.loads(path.read_text())) if path.exists() else Turn(-1, "")


def memory() -> dict[str, float]:
    """This process's peaks so far, in MiB: of device memory, where the device counts it, and of host memory."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = {"peak_rss_mib": int(status["VmHWM"].split()[0]) / 1024}
    if "peak_bytes_in_use" in stats:
        found["peak_device_mib"] = stats["peak_bytes_in_use"] / 2**20
    return found


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)
