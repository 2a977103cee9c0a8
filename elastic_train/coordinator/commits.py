"""From the members' records of committed steps to the disk, and the acknowledgement back.

Each member keeps every record until it is acknowledged; only the lowest one sends. When the lowest member
changes, the new one sends what is unacknowledged again, while the old one's last message may still be under
way. So records come twice, and steps may come out of order: the `Records` put that right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from elastic_train.coordinator.loop import EventLoop

ACK_INTERVAL_S = 0.2
ACKS_PER_S = 1000
"""How many workers are told in a second at most; with more than 200 the interval is longer."""

GAP_TIMEOUT_S = 10.0
"""How long to wait for records that other members may still send, before they count as lost."""


class Records(Protocol):
    """Where events and committed steps are written (`telemetry.records.RunDirectory`)."""

    @property
    def flushed_step(self) -> int: ...
    @property
    def gap(self) -> tuple[int, int] | None: ...

    def event(self, name: str, /, **fields: Any) -> object: ...
    def commit(self, record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]: ...
    def skip_gap(self) -> Sequence[Mapping[str, Any]]: ...


class Commits:
    """Hands records on. Used from the event loop's thread only.

    Args:
      acknowledge: told, at most five times a second, up to which step everything is on disk; says how many workers
        that went to.
      lost: told the first and the last step whose records nobody has.
    """

    def __init__(
        self,
        loop: EventLoop,
        records: Records,
        acknowledge: Callable[[int], int],
        lost: Callable[[int, int], None],
    ) -> None:
        self._loop = loop
        self._records = records
        self._acknowledge = acknowledge
        self._lost = lost
        self._written_step = 0
        self._interval_s = ACK_INTERVAL_S

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            self._written(self._records.commit(record))

    def _written(self, records: Sequence[Mapping[str, Any]]) -> None:
        if records:
            self._written_step = records[-1]["step"]
        # Also after records that were known already: who sends them has missed an acknowledgement.
        if not self._loop.waits_for("acknowledge"):
            self._loop.after("acknowledge", self._interval_s, self._send_acknowledgement)
        if self._records.gap is None:
            self._loop.cancel("gap")
        elif not self._loop.waits_for("gap"):
            self._loop.after("gap", GAP_TIMEOUT_S, self._skip_gap)

    def _send_acknowledgement(self) -> None:
        step = self._records.flushed_step
        self._interval_s = max(ACK_INTERVAL_S, self._acknowledge(step) / ACKS_PER_S)
        if step < self._written_step:
            self._loop.after("acknowledge", self._interval_s, self._send_acknowledgement)

    def _skip_gap(self) -> None:
        if gap := self._records.gap:
            self._lost(*gap)
            self._written(self._records.skip_gap())
