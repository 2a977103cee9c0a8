"""What a person sees while a job runs: one display for all workers.

On a terminal a bar and one line below it, redrawn in place; otherwise plain lines, few enough for a log file.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from elastic_train.terminal import harmless

PLAIN_INTERVAL_S = 5.0
"""Least time between two plain lines, news of the members aside."""

PACE_WINDOW_S = 5.0
"""From how many seconds of steps the samples per second are taken."""


class Pace:
    """How many samples a second the recent steps consume, while steps are taken.

    An epoch's first step is left out, and what came before it is forgotten: its time began with the last commit before,
    and so holds the pause for want of members, compiling and healing. Evaluations are in no step's time.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque()
        self._num_samples, self._seconds = 0, 0.0

    def committed(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Takes the record of the next step, see `step_lines`. Returns what a display is told: `samples_per_s`, or
        nothing as long as that is not known."""
        if "recovered" in record:
            self._steps.clear()
            self._num_samples, self._seconds = 0, 0.0
        elif record.get("step_time_s"):
            self._steps.append((record["num_samples"], record["step_time_s"]))
            self._num_samples += record["num_samples"]
            self._seconds += record["step_time_s"]
        while self._steps and self._seconds - self._steps[0][1] >= PACE_WINDOW_S:
            num_samples, seconds = self._steps.popleft()
            self._num_samples -= num_samples
            self._seconds -= seconds
        return {"samples_per_s": self._num_samples / self._seconds} if self._steps else {}


class Display:
    """Shows a job. All methods may be called from any thread.

    Args:
      stream: where to write; a terminal gets the redrawn form.
      num_workers: slots of the job.
      total_steps: the last step.
      first_step: the step that training starts from; a resumed run passes its checkpoint's.
      clock: gives seconds, for the pace of plain lines.
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
        self._first_step = first_step
        self._lock = threading.Lock()
        self._snapshot: dict[str, Any] = {"step": first_step, "epoch": 0}
        self._has_begun = False
        self._members: object = None
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
            self._surface.note(harmless(text))

    def update(self, snapshot: Mapping[str, Any]) -> None:
        """Shows the newest state.

        Args:
          snapshot: any of `num_workers` (slots of the job), `step`, `loss`, `samples_per_s` (see `Pace`), `ready`
            (slots of the workers that could train), `workers` (slots of the members), `epoch`, `time_lost_s`,
            `evaluation` (means of the last one). What is absent keeps its last value, other keys are ignored: a record
            of a committed step will do. Members of an older epoch than the newest are ignored, too: records come late.
        """
        with self._lock:
            is_old = snapshot.get("epoch", self._snapshot["epoch"]) < self._snapshot["epoch"]
            left_out = ("epoch", "workers") if is_old else ()
            self._snapshot |= {key: value for key, value in snapshot.items() if key not in left_out}
            self._num_workers = snapshot.get("num_workers", self._num_workers)
            self._has_begun = self._has_begun or self._snapshot["step"] > self._first_step
            members = self._snapshot["epoch"] if self._has_begun else self._starting()
            has_news, self._members = members != self._members, members
            self._surface.show(self._snapshot["step"], self._line, has_news)

    def stop(self) -> None:
        """Shows the last state and ends. Does nothing the second time."""
        with self._lock:
            self._surface.stop(self._line)

    def _starting(self) -> str:
        num_ready = len(self._snapshot.get("ready", ()))
        workers = "worker" if self._num_workers == 1 else "workers"
        return f"starting {self._num_workers} {workers} (ready {num_ready}/{self._num_workers})"

    def _line(self) -> str:
        """Before the first commit there is only one thing to tell."""
        if not self._has_begun:
            return self._starting()
        snapshot = self._snapshot
        width = len(str(self._total_steps))
        parts = [f"step {snapshot['step']:>{width}}/{self._total_steps}"]
        if snapshot.get("loss") is not None:
            parts.append(f"loss {snapshot['loss']:.4f}")
        if "samples_per_s" in snapshot:
            parts.append(f"{_short(snapshot['samples_per_s'])} samples/s")
        if "workers" in snapshot:
            parts.append(f"members {len(snapshot['workers'])}/{self._num_workers}")
        if snapshot["epoch"]:
            parts.append(f"epoch {snapshot['epoch']}")
        if snapshot.get("time_lost_s"):
            parts.append(f"lost {snapshot['time_lost_s']:.1f} s")
        for name, value in snapshot.get("evaluation", {}).items():
            parts.append(f"eval_{name} {value:.4g}" if isinstance(value, float) else f"eval_{name} {value}")
        return harmless("  ".join(parts))


class _Surface(Protocol):
    def start(self) -> None: ...
    def note(self, text: str) -> None: ...
    def show(self, step: int, line: Callable[[], str], has_news: bool) -> None: ...
    def stop(self, line: Callable[[], str]) -> None: ...


class _PlainSurface:
    """Lines: news of the members, and the last state; in between a new step at most every `PLAIN_INTERVAL_S`."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._printed_at = -math.inf
        self._printed_step: int | None = None
        self._step: int | None = None

    def start(self) -> None:
        pass

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def show(self, step: int, line: Callable[[], str], has_news: bool) -> None:
        now = self._clock()
        is_due = step != self._printed_step and now - self._printed_at >= PLAIN_INTERVAL_S
        self._step = step
        if has_news or is_due:
            self._printed_at, self._printed_step = now, step
            self.note(line())

    def stop(self, line: Callable[[], str]) -> None:
        if self._step != self._printed_step:
            self._printed_step = self._step
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

    def show(self, step: int, line: Callable[[], str], has_news: bool) -> None:
        self._progress.update(self._task, completed=step)
        self._line.plain = line()
        if has_news:
            self._live.refresh()

    def stop(self, line: Callable[[], str]) -> None:
        self._live.stop()


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}" if number >= 10 else f"{number:.1f}"
