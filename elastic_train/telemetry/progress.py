"""What a person sees while a job runs: one display for all workers.

On a terminal a bar and one line below it, redrawn in place; otherwise plain lines, few enough for a log file.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

PLAIN_INTERVAL_S = 5.0
"""Least time between two plain lines, changes of the members aside."""

_RATE_WINDOW_S = 5.0


class Display:
    """Shows a job. All methods may be called from any thread.

    Args:
      stream: where to write; a terminal gets the redrawn form.
      num_workers: slots of the job.
      total_steps: the last step.
      first_step: the step that training starts from; a resumed run passes its checkpoint's.
      clock: gives seconds; for the pace of plain lines, and for samples per second.
    """

    def __init__(
        self,
        stream: TextIO,
        num_workers: int,
        total_steps: int,
        *,
        first_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_workers = num_workers
        self._total_steps = total_steps
        self._clock = clock
        self._lock = threading.Lock()
        self._snapshot: dict[str, Any] = {"step": first_step}
        self._rates: deque[tuple[float, int]] = deque()
        is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._surface: _Surface = (
            _TerminalSurface(stream, total_steps, first_step) if is_terminal else _PlainSurface(stream, clock)
        )

    def start(self) -> None:
        """Begins to show."""
        with self._lock:
            self._surface.start()

    def note(self, text: str) -> None:
        """Shows a message that stays, above the line that changes."""
        with self._lock:
            self._surface.note(text)

    def update(self, snapshot: Mapping[str, Any]) -> None:
        """Shows the newest state.

        Args:
          snapshot: any of `step`, `loss`, `samples` (consumed so far), `workers` (slots of the members),
            `epoch`, `time_lost_s`, `eval` (metrics of the last evaluation). What is absent keeps its last
            value, other keys are ignored: a record of a committed step will do.
        """
        with self._lock:
            before = self._snapshot.get("workers")
            # An empty evaluation is none: the last one stays.
            self._snapshot |= {key: value for key, value in snapshot.items() if key != "eval" or value}
            if "samples" in snapshot:
                self._count(snapshot["samples"])
            members_changed = self._snapshot.get("workers") != before
            self._surface.show(self._snapshot["step"], self._line, members_changed)

    def stop(self) -> None:
        """Shows the last state and ends. Does nothing the second time."""
        with self._lock:
            self._surface.stop(self._line)

    def _count(self, samples: int) -> None:
        now = self._clock()
        self._rates.append((now, samples))
        while len(self._rates) > 2 and self._rates[1][0] < now - _RATE_WINDOW_S:
            self._rates.popleft()

    def _line(self) -> str:
        snapshot = self._snapshot
        width = len(str(self._total_steps))
        parts = [f"step {snapshot['step']:>{width}}/{self._total_steps}"]
        if snapshot.get("loss") is not None:
            parts.append(f"loss {snapshot['loss']:.4f}")
        if len(self._rates) > 1:
            (began, first), (ended, last) = self._rates[0], self._rates[-1]
            if ended > began and last >= first:
                parts.append(f"{_short((last - first) / (ended - began))} samples/s")
        if "workers" in snapshot:
            parts.append(f"members {len(snapshot['workers'])}/{self._num_workers}")
        if "epoch" in snapshot:
            parts.append(f"epoch {snapshot['epoch']}")
        if snapshot.get("time_lost_s"):
            parts.append(f"lost {snapshot['time_lost_s']:.1f} s")
        for name, value in snapshot.get("eval", {}).items():
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
        return "  ".join(parts)


class _Surface(Protocol):
    def start(self) -> None: ...
    def note(self, text: str) -> None: ...
    def show(self, step: int, line: Callable[[], str], members_changed: bool) -> None: ...
    def stop(self, line: Callable[[], str]) -> None: ...


class _PlainSurface:
    """Lines: the first state, each change of members, the last; else at most one in `PLAIN_INTERVAL_S`."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._printed_at: float | None = None
        self._is_behind = False

    def start(self) -> None:
        pass

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def show(self, step: int, line: Callable[[], str], members_changed: bool) -> None:
        now = self._clock()
        is_due = self._printed_at is None or now - self._printed_at >= PLAIN_INTERVAL_S
        self._is_behind = not (is_due or members_changed)
        if not self._is_behind:
            self._printed_at = now
            self.note(line())

    def stop(self, line: Callable[[], str]) -> None:
        if self._is_behind:
            self._is_behind = False
            self.note(line())


class _TerminalSurface:
    """A bar and a line, redrawn by rich in a thread of its own."""

    def __init__(self, stream: TextIO, total_steps: int, first_step: int) -> None:
        # Imported late: only a terminal needs it, and it takes a tenth of a second.
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn
        from rich.text import Text

        console = Console(file=stream, force_terminal=True)
        columns = (BarColumn(bar_width=None), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, auto_refresh=False, expand=True)
        self._task = self._progress.add_task("", total=total_steps, completed=first_step)
        self._line = Text("starting", no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._progress, self._line), console=console, refresh_per_second=5)

    def start(self) -> None:
        self._live.start()

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def show(self, step: int, line: Callable[[], str], members_changed: bool) -> None:
        self._progress.update(self._task, completed=step)
        self._line.plain = line()
        if members_changed:
            self._live.refresh()

    def stop(self, line: Callable[[], str]) -> None:
        self._live.stop()


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}" if number >= 10 else f"{number:.1f}"
