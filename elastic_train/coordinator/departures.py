"""What it means that a worker's stream has ended. From the event loop's thread only."""

from __future__ import annotations

import time
from functools import partial

from elastic_train.coordinator.connections import Connections
from elastic_train.coordinator.decisions import Decisions
from elastic_train.coordinator.ending import Ending
from elastic_train.coordinator.loop import EventLoop
from elastic_train.coordinator.streams import Stream
from elastic_train.membership import roster_events as r
from elastic_train.membership.group import Identity

LEAVE_TIMEOUT_S = 3.0
"""How long a worker that has closed its stream in order may take to exit before it counts as silent."""

EXIT_REPORT_S = 1.0
"""How long an agent may take to report the exit of a worker whose connection broke, before the worker is killed."""


class Departures:
    """Waits for the exits of workers whose streams have ended; who does not exit is silent.

    Args:
      decisions, loop, connections, ending: as in `service.Coordinator`.
    """

    def __init__(self, decisions: Decisions, loop: EventLoop, connections: Connections, ending: Ending) -> None:
        self._decisions, self._loop, self._connections, self._ending = decisions, loop, connections, ending

    def stream_ended(self, stream: Stream, broken: bool) -> None:
        """A worker's stream is over; `broken` if it was not closed in order."""
        identity, had_place = self._connections.remove_worker(stream)
        if identity is None or self._connections.closed or not had_place:
            return  # of a stray; whoever has its node's place is not silent because of it
        # A process that ends loses its connection just before its agent reports the exit, which says more.
        limit_s = EXIT_REPORT_S if broken else LEAVE_TIMEOUT_S
        reason = self._how_lost(stream, broken) + f", and no exit was reported within {limit_s:g} s"
        self._loop.after(f"leave {identity.node}", limit_s, partial(self._silent, identity, reason))

    def exited(self, identity: Identity) -> None:
        """A worker's exit was reported: it is not waited for any more."""
        self._loop.cancel(f"leave {identity.node}")

    def _how_lost(self, stream: Stream, broken: bool) -> str:
        """gRPC does not say why a connection broke, but keepalive takes this long, and other causes rarely do."""
        if not broken:
            return "its control connection was closed"
        quiet_s, keepalive_s = time.monotonic() - stream.heard, self._decisions.roster.limits.faults.keepalive_s
        if quiet_s > 1.9 * keepalive_s:
            return f"no answer for {quiet_s:.0f} s (faults.keepalive_s = {keepalive_s:g})"
        return "its control connection broke"

    def _silent(self, identity: Identity, reason: str) -> None:
        if identity.node not in self._ending.exited:
            self._decisions.apply(r.Silent(identity, reason))
