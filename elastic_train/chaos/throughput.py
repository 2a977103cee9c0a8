"""Throughput kept: what a disturbed run was slower than a fault-free one with as many members. Pure.

    throughput kept = sum over all steps of calm(n_k), divided by the time from the first commit to the last

`n_k` is the number of members that committed step k, and `calm(n)` the median step time of a fault-free run of n
members. The first step is in neither: the start of the job does not count. Everything else does: the time in which
nobody noticed a fault, the steps taken again, compiling for the members that are left, the wait for a worker that
comes back, and the slower steps while a starting worker uses the processors. With fewer members a step may take
longer: that is no loss here, since the fault-free run has as few. What exceeds 1 is noise in the medians.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic_train.telemetry.faults import moment

Line = Mapping[str, Any]

SETTLING_STEPS = 3
"""Steps after a change of members that are not calm: caches are cold, and the first one has waited."""

MIN_CALM_STEPS = 5
"""Fewer calm steps say nothing: one that has waited for a joiner would stand for all with as many members."""


@dataclass(frozen=True)
class Kept:
    """How much throughput was kept.

    Attributes:
      share: see above; None without two steps, or without any calm step time.
      wall_s: from the first commit to the last.
      ideal_s: the time that the same steps take without faults, at the same numbers of members.
      num_steps: by the number of members.
      calm_step_time_s: by the number of members.
      estimated: numbers of members for which no calm step was seen; the nearest number's time stands for theirs.
    """

    share: float | None
    wall_s: float
    ideal_s: float
    num_steps: dict[int, int]
    calm_step_time_s: dict[int, float]
    estimated: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def calm_step_times(events: Sequence[Line], commits: Sequence[Line]) -> dict[int, float]:
    """Median step time in seconds by the number of members, over the calm steps of a run.

    A step is calm if no worker was starting while it ran, if its members are those of the `SETTLING_STEPS` steps
    before, and if no step was tried twice. A fault-free run is calm once it has begun. Numbers of members with fewer
    than `MIN_CALM_STEPS` such steps are left out.

    Args:
      events: lines of events.jsonl.
      commits: lines of metrics.jsonl, in the order of their steps.
    """
    starts = _starting(events)
    retried = {event["step"] + 1 for event in events if event["event"] in ("user_code_failed", "fault_injected")}
    times: dict[int, list[float]] = {}
    settled, epoch = 0, None
    for commit in commits:
        settled = settled + 1 if commit["epoch"] == epoch else 0
        epoch = commit["epoch"]
        ended, took = commit["time"], commit["step_time_s"]
        is_alone = all(ended < began or until < ended - took for began, until in starts)
        if settled >= SETTLING_STEPS and is_alone and commit["step"] not in retried and "eval_loss" not in commit:
            times.setdefault(len(commit["workers"]), []).append(took)
    return {
        members: statistics.median(found) for members, found in sorted(times.items()) if len(found) >= MIN_CALM_STEPS
    }


def throughput_kept(commits: Sequence[Line], calm: Mapping[int, float]) -> Kept:
    """The throughput that a run kept.

    Args:
      commits: lines of its metrics.jsonl, one for each step.
      calm: calm step times by the number of members, from a fault-free run where there is one.
    """
    counted = commits[1:]
    num_steps = Counter(len(commit["workers"]) for commit in counted)
    wall_s = commits[-1]["time"] - commits[0]["time"] if commits else 0.0
    estimated = tuple(sorted(members for members in num_steps if members not in calm))
    if not counted or not calm or wall_s <= 0:
        return Kept(None, wall_s, 0.0, dict(num_steps), dict(calm), estimated)
    nearest = {members: min(calm, key=lambda known: (abs(known - members), -known)) for members in num_steps}
    ideal_s = sum(number * calm[nearest[members]] for members, number in num_steps.items())
    return Kept(ideal_s / wall_s, wall_s, ideal_s, dict(sorted(num_steps.items())), dict(calm), estimated)


def _starting(events: Sequence[Line]) -> list[tuple[float, float]]:
    """Spans of Unix time in which a worker was on its way: from its start until it was ready or dead."""
    began: dict[tuple[int, int], float] = {}
    spans = []
    for event in events:
        worker = (event.get("slot", -1), event.get("incarnation", -1))
        if event["event"] == "worker_starting":
            began[worker] = moment(event)
        elif event["event"] in ("worker_ready", "worker_died") and worker in began:
            spans.append((began.pop(worker), moment(event)))
    return spans + [(moment_, float("inf")) for moment_ in began.values()]
