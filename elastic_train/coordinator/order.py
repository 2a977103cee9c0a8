"""The records of committed steps, put in order although several members send them. Pure.

Each member keeps every record until it is acknowledged; only the lowest one sends. When the lowest member
changes, the new one sends what is unacknowledged again, while the old one's last message may still be under
way. So records come twice, and steps may come out of order.
"""

from __future__ import annotations

from collections.abc import Iterable


class RecordOrder:
    """Lets records through in ascending steps, and holds those back that came before their predecessors.

    Attributes:
      acknowledged: the step up to which all records have been let through; None before the first.
    """

    def __init__(self) -> None:
        self.acknowledged: int | None = None
        self._held: dict[int, dict[str, object]] = {}

    @property
    def gap(self) -> tuple[int, int] | None:
        """The first and the last step that is missing before the oldest record held back."""
        if not self._held or self.acknowledged is None:
            return None
        return self.acknowledged + 1, min(self._held) - 1

    def add(self, records: Iterable[dict[str, object]]) -> list[dict[str, object]]:
        """Takes records with an integer `step`; returns those to write now, repeated ones among them."""
        released = []
        for record in records:
            step = record["step"]
            if not isinstance(step, int):
                raise ValueError(f"a record needs an integer `step`; got {step!r}")
            if self.acknowledged is None or step <= self.acknowledged + 1:
                released.append(record)
                self.acknowledged = step if self.acknowledged is None else max(step, self.acknowledged)
                released += self._follow()
            else:
                self._held[step] = record
        return released

    def skip(self) -> list[dict[str, object]]:
        """Gives the missing steps up, for nobody alive has them; returns what was held behind them."""
        if self._held:
            self.acknowledged = min(self._held) - 1
        return self._follow()

    def _follow(self) -> list[dict[str, object]]:
        released = []
        while self.acknowledged is not None and self.acknowledged + 1 in self._held:
            self.acknowledged += 1
            released.append(self._held.pop(self.acknowledged))
        return released
