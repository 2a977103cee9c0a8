"""A coordinator in a process of its own: from its start to the end of the job."""

from __future__ import annotations

import signal
from types import FrameType

from elastic_train.coordinator.service import Coordinator
from elastic_train.membership.roster_events import End

LEAVE_TIMEOUT_S = 30.0
"""How long agents may take to end their workers after the end of the job."""


def run_coordinator(coordinator: Coordinator) -> End:
    """Waits for the job's end, lets everybody go, and closes `coordinator`. From the main thread only.

    The first SIGINT or SIGTERM asks for an agreed stop after a commit, a second one for a stop at once.
    """
    num_signals = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        coordinator.ask_stop(now=num_signals > 1, reason=f"the coordinator got {signal.Signals(number).name}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while (end := coordinator.wait(timeout=1.0)) is None:
            pass
        # JAX aborts workers whose service goes away; agents end theirs first, and then leave.
        coordinator.wait_left(LEAVE_TIMEOUT_S)
    finally:
        coordinator.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return end
