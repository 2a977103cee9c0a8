"""What a worker has to tell the coordinator, and which of it is sent next. Imports neither jax nor grpc."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from elastic_train.config import REPORT_INTERVAL_S
from elastic_train.coordinator import control_pb2

RECORDS_INTERVAL_S = 0.05
MAX_RECORDS_PER_MESSAGE = 256


class _Place(NamedTuple):
    """Where this worker is. `beats` counts how often it has said so."""

    phase: str = ""
    step: int = 0
    beats: int = 0


class _Work(NamedTuple):
    """What this worker has done by itself so far."""

    seconds: float = 0.0
    num_shards: int = 0
    num_steps: int = 0


class Outbox:
    """Messages in the order in which they were put; records of steps, kept until they are acknowledged; and, where
    nothing else is to be sent, a report of where this worker is. From any thread.

    Args:
      changed: guards everything here, and is notified when there is something to send.

    Attributes:
      is_open: the coordinator has said welcome; records and reports wait for that.
      is_closing: nothing more will be put.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self.is_open = self.is_closing = False
        self._changed = changed
        self._messages: deque[control_pb2.FromWorker] = deque()
        self._unacknowledged: deque[tuple[int, str]] = deque()
        self._records: list[str] = []
        self._records_due = 0.0
        self._recorded_step = 0
        self._place = _Place()
        self._work = _Work()
        self._report_due = 0.0
        self._report_interval_s = REPORT_INTERVAL_S
        self._is_dropped = False

    def put(self, message: control_pb2.FromWorker) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    def put_first(self, hello: control_pb2.FromWorker) -> None:
        """Before all that was put already."""
        with self._changed:
            self._messages.appendleft(hello)

    def open(self, report_interval_s: float) -> None:
        """From now on everything is sent, and at least one report in that time."""
        with self._changed:
            self.is_open = True
            self._report_interval_s = report_interval_s
            self._changed.notify_all()

    def close(self) -> None:
        """`outgoing` ends when all is sent."""
        with self._changed:
            self.is_closing = True
            self._changed.notify_all()

    def drop(self) -> None:
        """`outgoing` ends at once: nobody receives it."""
        with self._changed:
            self._is_dropped = True
            self._changed.notify_all()

    # Records of committed steps -------------------------------------------------------------------

    def record(self, record: Mapping[str, object], flush: bool, send: bool) -> None:
        """Keeps a record, JSON values with an integer `step`; sends it now (`flush`), soon, or only with `resend`."""
        step = record["step"]
        if not isinstance(step, int):
            raise TypeError(f"a record needs an integer `step`; got {step!r}")
        text = json.dumps(record)
        with self._changed:
            self._recorded_step = step
            self._unacknowledged.append((step, text))
            if send:
                self._queue_records([text], 0.0 if flush else RECORDS_INTERVAL_S)

    def pending_records(self) -> list[str]:
        """All that are not acknowledged, as JSON, oldest first."""
        with self._changed:
            return [text for _, text in self._unacknowledged]

    def restore(self, records: Sequence[str]) -> None:
        """Keeps these, too; see `pending_records`."""
        with self._changed:
            self._unacknowledged.extend((json.loads(text)["step"], text) for text in records)

    def resend(self) -> None:
        """Sends all that are not acknowledged (again)."""
        with self._changed:
            self._records.clear()
            self._queue_records([text for _, text in self._unacknowledged], 0.0)

    def acknowledged(self, step: int) -> None:
        """The coordinator has all records up to this step on disk."""
        with self._changed:
            while self._unacknowledged and self._unacknowledged[0][0] <= step:
                self._unacknowledged.popleft()
            self._changed.notify_all()

    def _queue_records(self, records: list[str], delay_s: float) -> None:
        due = time.monotonic() + delay_s
        if not self._records or due < self._records_due:
            self._records_due = due
            self._changed.notify_all()
        self._records += records

    # Where this worker is; without the lock, since it is said many times in a step ----------------

    def phase(self, name: str, step: int) -> None:
        """What this worker does now, after so many steps; -1 says nothing of them."""
        place = self._place
        self._place = _Place(name, place.step if step < 0 else step, place.beats + 1)

    def worked(self, seconds: float, num_shards: int) -> None:
        """So many shards more have taken so long."""
        work = self._work
        self._work = _Work(work.seconds + seconds, work.num_shards + num_shards, work.num_steps + 1)

    # The sending thread ---------------------------------------------------------------------------

    def outgoing(self) -> Iterator[control_pb2.FromWorker]:
        """What is to be sent; waits for it."""
        while (message := self._next_message()) is not None:
            yield message

    def _next_message(self) -> control_pb2.FromWorker | None:
        """Waits for the next message to send; None when all is sent after `close`, or after `drop`."""
        with self._changed:
            while not self._is_dropped:
                now = time.monotonic()
                # Records come before messages that were sent after them; hello comes before everything.
                hurry = self.is_closing or (bool(self._messages) and self.is_open)
                if self._records and self.is_open and (hurry or now >= self._records_due):
                    return self._progress(self._take_records())
                if self._messages:
                    return self._messages.popleft()
                if self.is_closing:
                    return None
                if self.is_open and now >= self._report_due:
                    return self._progress([])
                wait_s = self._report_due - now if self.is_open else self._report_interval_s
                if self._records and self.is_open:
                    wait_s = min(wait_s, self._records_due - now)
                self._changed.wait(wait_s)
        return None

    def _take_records(self) -> list[str]:
        taken = self._records[:MAX_RECORDS_PER_MESSAGE]
        del self._records[:MAX_RECORDS_PER_MESSAGE]
        return taken

    def _progress(self, records: list[str]) -> control_pb2.FromWorker:
        self._report_due = time.monotonic() + self._report_interval_s
        place, work = self._place, self._work
        progress = control_pb2.Progress(
            step=max(place.step, self._recorded_step),
            phase=place.phase,
            records=records,
            beats=place.beats,
            work_s=work.seconds,
            num_shards=work.num_shards,
            num_worked_steps=work.num_steps,
        )
        return control_pb2.FromWorker(progress=progress)
