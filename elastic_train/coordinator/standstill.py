"""Says who is where when no step has committed for long. From the event loop's thread only."""

from __future__ import annotations

from elastic_train.coordinator.reports import Reports, phases_in_words
from elastic_train.coordinator.watch import Note
from elastic_train.membership.group import View


class Standstill:
    """Only tells: what becomes of members that hold up the others is up to `watch`.

    Args:
      reports: what the workers say.
      note: an event, and a line for the display.
      limit_s: how long is too long.
    """

    def __init__(self, reports: Reports, note: Note, limit_s: float) -> None:
        self._reports, self._note, self._limit_s = reports, note, limit_s

    def look(self, view: View, step: int) -> float:
        """Looks whether that is so after `step`; returns in how many seconds to look again."""
        quiet_s = self._reports.quiet_s
        if view.members and quiet_s >= self._limit_s:
            phases = self._reports.phases(view)
            self._note(
                "no_progress",
                f"No step has committed for {quiet_s:.0f} s; the last is {step}. Now: {phases_in_words(phases)}.",
                step=step,
                waited_s=round(quiet_s, 1),
                phases={str(slot): phase for slot, phase in phases.items()},
            )
            quiet_s = 0.0
        return max(0.0, self._limit_s - quiet_s)
