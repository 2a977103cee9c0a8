"""What members send of a committed step, and the lines of ledger.jsonl and metrics.jsonl that it makes.

A *record* describes one committed step. Members send it as JSON:

| field | meaning |
|---|---|
| `step`, `samples` | optimizer updates and samples consumed, after this step |
| `loss`, `learning_rate` | of this step |
| `workers` | slots of the members that committed it |
| `epoch` | version of the member list |
| `time`, `step_time_s` | Unix time of the commit; seconds the step took |
| `phases` | seconds since the record before, by what the member that tells of it did |
| `first_sample`, `num_samples` | position of its first sample since the start of training; how many |
| `passes` | list of [pass, first position in that pass, count]: which part of which pass over the data |
| `pass_size` | samples of a pass: the length of the data set |
| `evaluation` | optional: means of an evaluation of the state after this step |
| `recovered` | optional, on an epoch's first record: fields of the event `recovered` |
| `skipped` | optional, true: parameters and optimizer stayed as they were, since the gradient was not finite |
| any other | a metric of the user's |

A line of metrics.jsonl has these fields, less those of the ledger. What `evaluation` holds is there as `eval_NAME`, and
`phases` is the sum over the steps since the line before, those of an epoch's first step left out: the event `recovered`
has them.

A line of the ledger whose batch crosses from one pass into the next has the pass of its first sample as `pass`, and in
`crosses` all parts as [pass, first position, count]. Other lines have no `crosses`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from elastic_train.telemetry.json_files import dump
from elastic_train.telemetry.phase_times import added
from elastic_train.telemetry.trackers import Tracker

_NOT_LOGGED = frozenset({"first_sample", "num_samples", "passes", "pass_size", "recovered", "evaluation", "phases"})


class StepLines:
    """Writes the lines of steps that come in order, each once. For one thread at a time.

    Args:
      metrics, ledger: the open files. Whoever opened them closes them.
      log_every: steps between two lines of metrics.jsonl. Logged besides: the first and the last step, every step
        with an evaluation, and every step that was tried again.
      has_logged: metrics.jsonl has lines already, so that the next step is not the first.
      trackers: get every line of metrics.jsonl, too.
    """

    def __init__(
        self, metrics: TextIO, ledger: TextIO, log_every: int, has_logged: bool, trackers: Sequence[Tracker]
    ) -> None:
        self._metrics, self._ledger, self._log_every, self._trackers = metrics, ledger, log_every, trackers
        self._has_logged = has_logged
        self._unlogged: Mapping[str, Any] | None = None
        self._phases: Mapping[str, float] = {}
        self._retried: set[int] = set()

    def retried(self, step: int) -> None:
        """This step is tried again."""
        self._retried.add(step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes a step to the ledger, and to the metrics if it is to be there."""
        passes = record["passes"]
        line = {
            "step": record["step"],
            "pass": passes[0][0],
            "first_sample": record["first_sample"],
            "num_samples": record["num_samples"],
            "pass_size": record["pass_size"],
            "workers": record["workers"],
        }
        if record.get("skipped"):
            line["skipped"] = True
        if len(passes) > 1:
            line["crosses"] = passes
        self._ledger.write(dump(line) + "\n")
        self.log_if_due(record)

    def log_if_due(self, record: Mapping[str, Any]) -> None:
        """Writes a step to the metrics, if it is to be there."""
        self._unlogged = record
        if "recovered" not in record:
            self._phases = added(self._phases, record.get("phases") or {})
        is_special = not self._has_logged or "evaluation" in record or record["step"] in self._retried
        if is_special or record["step"] % self._log_every == 0:
            self._log(record)

    def finish(self) -> None:
        """No step comes after the last one: it is logged in any case."""
        if self._unlogged is not None:
            self._log(self._unlogged)

    def flush(self) -> None:
        """Hands all lines to the kernel."""
        self._ledger.flush()
        self._metrics.flush()

    def close_trackers(self) -> None:
        """No line follows."""
        for tracker in self._trackers:
            tracker.close()

    def _log(self, record: Mapping[str, Any]) -> None:
        line = {key: value for key, value in record.items() if key not in _NOT_LOGGED}
        line |= {f"eval_{name}": value for name, value in record.get("evaluation", {}).items()}
        if self._phases:
            line["phases"] = {name: round(seconds, 6) for name, seconds in self._phases.items()}
            self._phases = {}
        self._metrics.write(dump(line) + "\n")
        for tracker in self._trackers:
            tracker.log(line)
        self._unlogged, self._has_logged = None, True
