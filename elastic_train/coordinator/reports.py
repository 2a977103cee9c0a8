"""What workers say about themselves: where they are while they train, and what they ended with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from elastic_train.coordinator import control_pb2
from elastic_train.membership.group import Identity, View


class Report(NamedTuple):
    """The newest word of one worker."""

    step: int = 0
    phase: str = ""


class Reports:
    """The newest report of every worker. `step` may be called from any thread."""

    def __init__(self) -> None:
        self._newest: dict[int, Report] = {}
        self._quiet_since = time.monotonic()

    def add(self, identity: Identity, step: int, phase: str) -> bool:
        """Returns whether the worker's step has changed."""
        before = self._newest.get(identity.node)
        self._newest[identity.node] = Report(step, phase)
        changed = before is None or before.step != step
        if changed:
            self.rest()
        return changed

    def rest(self) -> None:
        """Begins `quiet_s` anew: nothing is expected to happen now."""
        self._quiet_since = time.monotonic()

    @property
    def quiet_s(self) -> float:
        """Seconds since any worker's step changed."""
        return time.monotonic() - self._quiet_since

    def step(self, view: View, default: int) -> int:
        """The newest step that a member of `view` has reported."""
        newest = self._newest
        return max((newest[node].step for node in view.nodes if node in newest), default=default)

    def phases(self, view: View) -> dict[int, str]:
        """What the members did last, by slot; empty if one has not said yet."""
        return {member.slot: self._newest.get(member.node, Report()).phase for member in view.members}


def different_ends(finished: Mapping[int, control_pb2.Finished]) -> dict[int, tuple[int, str, str]]:
    """Step and digests (parameters, state) by slot if they are not all equal, as they must be; else empty."""
    ends = {
        slot: (report.step, report.params_sha256, report.state_sha256)
        for slot, report in sorted(finished.items())
        if report.status in ("done", "stopped")
    }
    return ends if len(set(ends.values())) > 1 else {}
