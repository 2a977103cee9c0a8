"""From the members' records of committed steps to the disk, and the acknowledgement back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from elastic_train.coordinator.loop import EventLoop
from elastic_train.coordinator.order import RecordOrder

ACK_INTERVAL_S = 0.2
GAP_TIMEOUT_S = 10.0
"""How long to wait for records that other members may still send, before they count as lost."""


class Records(Protocol):
    """Where events and committed steps are written; called from one thread only."""

    def event(self, name: str, /, **fields: object) -> None: ...
    def commit(self, record: dict[str, object]) -> None: ...


class Commits:
    """Writes records in ascending steps. Used from the event loop's thread only.

    Args:
      acknowledge: told, at most five times a second, up to which step everything is on disk.
      lost: told the first and the last step whose records nobody has.
    """

    def __init__(
        self,
        loop: EventLoop,
        records: Records,
        acknowledge: Callable[[int], None],
        lost: Callable[[int, int], None],
    ) -> None:
        self._loop = loop
        self._records = records
        self._acknowledge = acknowledge
        self._lost = lost
        self._order = RecordOrder()
        self._acknowledged_at = 0.0

    @property
    def step(self) -> int:
        """The step up to which everything is on disk."""
        return self._order.acknowledged or 0

    def add(self, records: Iterable[dict[str, object]]) -> None:
        self._write(self._order.add(records))

    def _write(self, released: Iterable[dict[str, object]]) -> None:
        for record in released:
            self._records.commit(record)
        if not self._loop.waits_for("acknowledge"):
            delay_s = max(0.0, self._acknowledged_at + ACK_INTERVAL_S - time.monotonic())
            self._loop.after("acknowledge", delay_s, self._send_acknowledgement)
        if self._order.gap is None:
            self._loop.cancel("gap")
        elif not self._loop.waits_for("gap"):
            self._loop.after("gap", GAP_TIMEOUT_S, self._skip_gap)

    def _send_acknowledgement(self) -> None:
        self._acknowledged_at = time.monotonic()
        if self._order.acknowledged is not None:
            self._acknowledge(self._order.acknowledged)

    def _skip_gap(self) -> None:
        if gap := self._order.gap:
            self._lost(*gap)
            self._write(self._order.skip())
