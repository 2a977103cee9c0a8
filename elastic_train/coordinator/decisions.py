"""The roster as it is now, and the one way to change it. From the event loop's thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from elastic_train.membership import roster_events as r
from elastic_train.membership.roster import Roster

Apply = Callable[[Roster, r.Event], tuple[Roster, Iterable[r.Action]]]
CarryOut = Callable[[Iterable[r.Action], Mapping[str, object]], None]


class Decisions:
    """One transition after the other.

    Args:
      roster: the state before the first event.
      apply: the state machine, `elastic_train.membership.roster.apply`.
      carry_out: does what a transition asks for, see `Actions.carry_out`; the roster is the new one already.

    Attributes:
      roster: the newest state; may be read from any thread.
      failed: nothing is decided any more, since the roster may be wrong.
    """

    def __init__(self, roster: Roster, apply: Apply, carry_out: CarryOut) -> None:
        self.roster = roster
        self.failed = False
        self._decide, self._carry_out = apply, carry_out

    def apply(self, event: r.Event, **source: object) -> None:
        """One transition. `source` is added to the notes it causes."""
        if self.failed:
            return
        self.roster, actions = self._decide(self.roster, event)
        self._carry_out(actions, source)
