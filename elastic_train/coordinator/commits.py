"""From the members' records of committed steps to the disk, and the acknowledgement back.

Each member keeps every record until it is acknowledged; only the first one sends. When the first member
changes, the new one sends what is unacknowledged again, while the old one's last message may still be under
way. So records come twice, and steps may come out of order: the `Records` put that right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from elastic_train.coordinator import control_pb2
from elastic_train.coordinator.connections import Connections
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
    """Hands records on, and tells all workers, at most five times a second, up to which step everything is on disk.
    Used from the event loop's thread only.

    Args:
      loop, connections, records: as in `service.Coordinator`.
      show: shows a line to the person who watches.
    """

    def __init__(
        self, loop: EventLoop, connections: Connections, records: Records, show: Callable[[str], None]
    ) -> None:
        self._loop, self._connections, self._records, self._show = loop, connections, records, show
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
        num_told = self._connections.tell_all(control_pb2.ToWorker(ack=control_pb2.Ack(step=step)))
        self._interval_s = max(ACK_INTERVAL_S, num_told / ACKS_PER_S)
        if step < self._written_step:
            self._loop.after("acknowledge", self._interval_s, self._send_acknowledgement)

    def _skip_gap(self) -> None:
        if gap := self._records.gap:
            first_step, last_step = gap
            # The event is written by whoever keeps the records.
            self._show(
                f"The records of steps {first_step} to {last_step} are lost: all members that had them died"
                " before they were sent. The steps themselves count."
            )
            self._written(self._records.skip_gap())
