"""What a run needs from outside: the coordinator's link in a job, files and signals in a plain process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from elastic_train.checkpoint.saves import Requests
from elastic_train.membership.group import Identity, View
from elastic_train.telemetry.phase_times import PhaseTimes


class Outside(Requests, Protocol):
    """What a run needs from outside: the coordinator's link in a job, files and signals in a plain process."""

    @property
    def candidates(self) -> tuple[Identity, ...]: ...
    @property
    def stop_requested(self) -> str | None: ...
    @property
    def drained(self) -> bool:
        """Whether this worker's slot is to be empty."""
        ...

    @property
    def times(self) -> PhaseTimes:
        """How long this worker was in which phase."""
        ...

    def phase(self, name: str, step: int) -> None: ...
    def worked(self, seconds: float, num_shards: int) -> None: ...
    def viewed(self, view: View, reason: str, gone: Any, came: Any, step: int, time: float) -> None: ...
    def record(self, record: dict[str, Any], flush: bool = False, send: bool = True) -> None: ...
    def resend(self) -> None: ...
    def noted(self, event: str, show: str, **fields: object) -> None:
        """Something worth a line in the events, `event` with its `fields`, and one on the display."""
        ...

    @property
    def has_checkpoints(self) -> bool:
        """Whether the run has some. What lies in the directory besides belongs to another run."""
        ...

    @property
    def generation(self) -> int:
        """That of the coordinator; 0 without one."""
        ...

    def pending_records(self) -> Sequence[str]:
        """Records, as JSON, that may not be on disk yet; oldest first."""
        ...

    def loaded(self, step: int, samples: int, path: str, seconds: float) -> None:
        """The first member has the state out of a checkpoint; at step 0 without one, if all were damaged."""
        ...

    def set_aside(self, text: str) -> None:
        """A checkpoint was found damaged; `text` says which one, and what is wrong with it."""
        ...

    def failed(self, step: int, fatal: bool, startup: bool, traceback: str) -> None: ...
