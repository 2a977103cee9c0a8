"""What a running job is asked for from outside: to stop, to save, to drain a slot, to have another size.

From the event loop's thread only. The callers' end is in `calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from elastic_train.coordinator import control_pb2
from elastic_train.coordinator.checkpoints import Checkpoints
from elastic_train.coordinator.decisions import Decisions
from elastic_train.coordinator.ending import Ending
from elastic_train.membership import roster_events as r
from elastic_train.membership.roster import refuse_drain
from elastic_train.membership.roster_generations import refuse_resize


class Orders:
    """Carries out orders, or says why not: a refusal is empty if there is none.

    Args:
      decisions, ending, checkpoints, on_resized: as in `service.Coordinator`.
    """

    def __init__(
        self,
        decisions: Decisions,
        ending: Ending,
        checkpoints: Checkpoints,
        on_resized: Callable[[int], None] | None,
    ) -> None:
        self._decisions, self._ending, self._checkpoints = decisions, ending, checkpoints
        self._on_resized = on_resized
        self._num_stops = 0

    def stop(self, reason: str) -> None:
        """After a commit; the second time at once."""
        self._num_stops += 1
        self._decisions.apply(r.StopAsked(now=self._num_stops > 1, reason=reason))

    def save(self, reply: Future[control_pb2.SaveReply]) -> None:
        """`reply` comes when a save has ended."""
        if self._ending.end is None:
            self._checkpoints.ask(reply)
        else:
            reply.set_result(control_pb2.SaveReply(error="the job has ended"))

    def drain(self, slot: int, reason: str, refusal: Future[str]) -> None:
        """The slot's worker leaves for good."""
        why_not = refuse_drain(self._decisions.roster, slot)
        if not why_not:
            self._decisions.apply(r.DrainAsked(slot, reason))
        refusal.set_result(why_not)

    def resize(self, workers: int, reason: str, refusal: Future[str]) -> None:
        """The job gets another number of workers."""
        why_not = refuse_resize(self._decisions.roster, workers)
        if not why_not:
            if self._on_resized is not None:
                self._on_resized(workers)
            self._decisions.apply(r.ResizeAsked(workers, reason))
        refusal.set_result(why_not)
