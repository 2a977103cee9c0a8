"""The end of a job: what workers finished with, the last lines, and who is let go when. In the event loop's thread."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping

from elastic_train.coordinator import control_pb2
from elastic_train.coordinator.commits import Records
from elastic_train.coordinator.connections import Connections
from elastic_train.coordinator.loop import EventLoop
from elastic_train.coordinator.reports import different_ends
from elastic_train.coordinator.watch import Note
from elastic_train.membership import roster_events as r
from elastic_train.membership.group import Identity
from elastic_train.membership.roster import Roster

ORDERLY_END_S = 3.0
"""How long workers that were told that all is done may take to exit by themselves, before their agent ends them."""

OnEnd = Callable[[r.End, Mapping[int, control_pb2.Finished]], None]


class Ending:
    """Follows the job to its end.

    Args:
      connections, records, loop, on_end: as in `service.Coordinator`.
      note: an event, and a line for the display.

    Attributes:
      end: how the job ended; None while it goes on.
      is_over: set when everything about the end is written; may be waited for in any thread.
      finished: the last report of each slot that finished.
      exited: nodes whose process is gone.
    """

    def __init__(
        self,
        connections: Connections,
        records: Records,
        loop: EventLoop,
        note: Note,
        on_end: OnEnd | None,
    ) -> None:
        self._connections, self._records, self._loop = connections, records, loop
        self._note, self._on_end = note, on_end
        self.end: r.End | None = None
        self.is_over = threading.Event()
        self.finished: dict[int, control_pb2.Finished] = {}
        self.exited: set[int] = set()
        self._awaited: set[int] = set()  # nodes that exit by themselves
        self._digests: set[tuple[int, str, str]] = set()
        self._has_said_different = False

    def worker_finished(self, slot: int, finished: control_pb2.Finished) -> None:
        """A living worker trains no more. Its state must be that of all others."""
        self.finished[slot] = finished
        self._digests.add((finished.step, finished.params_sha256, finished.state_sha256))
        if len(self._digests) < 2 or self._has_said_different or not (different := different_ends(self.finished)):
            return
        self._has_said_different = True
        lines = [
            f"  slot {slot}: step {step}, params {params}, state {state}"
            for slot, (step, params, state) in different.items()
        ]
        self._note(
            "digests_differ",
            "ERROR: the members have finished with DIFFERENT states, which must never happen:\n"
            + "\n".join(lines)
            + "\nDo not use the result; please report this with the run directory.",
            slots={str(slot): list(end) for slot, end in different.items()},
        )

    def worker_exited(self, identity: Identity, exit_code: int, reported_time: float) -> bool:
        """Returns whether that is all there is to it: the job has ended, and its roster is at rest."""
        self.exited.add(identity.node)
        if self.end is None:
            return False
        # That a worker is gone is still worth a line.
        about = {"exit_code": exit_code, "reported_time": reported_time}
        self._records.event("worker_exited", **identity._asdict(), **about)
        if identity.node in self._awaited:
            self._awaited.remove(identity.node)
            if not self._awaited:
                self._shut_down(self.end)
        return True

    def finish(self, end: r.End, roster: Roster | None, is_written: bool = False) -> None:
        """Writes the end and lets the agents go. A second End changes nothing.

        If all have finished, workers exit by themselves now. In any other case their agents end them.

        Args:
          end: the roster's last word.
          roster: None if it may be wrong.
          is_written: an earlier coordinator has noted this end.
        """
        if self.end is not None:
            return
        self.end = end
        if roster is not None and roster.finishing and not roster.num_training:
            self._awaited = {worker.identity.node for worker in roster.living} - self.exited
        try:
            if not is_written:
                self._records.event("end", status=end.status, exit_code=end.exit_code, message=end.message)
            if self._on_end is not None:
                self._on_end(end, dict(self.finished))
        except Exception as error:
            self.end = r.End(
                end.exit_code or 1,
                "failed",
                f"{end.message}; the end could not be written down: {error!r}",
                traceback.format_exc(),
            )
        finally:
            if self._awaited:
                last = self.end
                self._loop.after("shutdown", ORDERLY_END_S, lambda: self._shut_down(last))
            else:
                self._shut_down(self.end)

    def _shut_down(self, end: r.End) -> None:
        self._loop.cancel("shutdown")
        self._connections.tell_all_agents(shutdown_message(end))


def shutdown_message(end: r.End) -> control_pb2.ToAgent:
    return control_pb2.ToAgent(shutdown=control_pb2.Shutdown(exit_code=end.exit_code, reason=end.message))
