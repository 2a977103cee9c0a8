"""The content of summary.json, from what the run directory holds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_train.telemetry.faults import Event, find_faults, find_rejoins, time_lost


def summarize(events: Sequence[Event], commits: Sequence[Event], end: Mapping[str, Any]) -> dict[str, Any]:
    """What the job did, and what its faults cost.

    Two figures need a definition:

    - `goodput`: the share of the wall time that went into steps. Numerator: the median step time, times the
      steps from the first to the last commit of this job. Denominator: the time from the first commit to the
      last, plus one median step for the first one. At most 1; None before the first commit. Start-up and
      the end are in neither; faults, rejoins, evaluations and slow steps are in the denominator only.
    - `time_lost_s`: the time from each death to the next committed step and the stalls at rejoins; what
      overlaps counts once. Less than what goodput lacks, which also has evaluations and slow steps.

    Args:
      events: lines of events.jsonl.
      commits: lines of metrics.jsonl, in the order of their steps.
      end: `status`, `exit_code`, `time`, and where there is a final state also `step`, `samples`,
        `params_sha256`, `state_sha256`, `versions`, `metrics` (final) and `message`.
    """
    first, last = (commits[0], commits[-1]) if commits else (None, None)
    step_times = [commit["step_time_s"] for commit in commits if commit.get("step_time_s") is not None]
    step_time_s = statistics.median(step_times) if step_times else None
    faults, rejoins = find_faults(events, commits), find_rejoins(events, step_time_s)
    began = next((e["time"] for e in events if e["event"] == "job_started"), end["time"])
    return {
        "status": end["status"],
        "exit_code": end["exit_code"],
        "message": end.get("message", ""),
        "step": end.get("step", last["step"] if last else 0),
        "samples": end.get("samples", last["samples"] if last else 0),
        "params_sha256": end.get("params_sha256"),
        "state_sha256": end.get("state_sha256"),
        "final_loss": last["loss"] if last else None,
        "metrics": end.get("metrics") or _last_evaluation(commits),
        "step_time_s": step_time_s,
        "goodput": _goodput(first, last, step_time_s),
        "wall_s": max(0.0, end["time"] - began),
        "time_lost_s": time_lost(faults, rejoins),
        "steps_lost": _steps_lost(events),
        "faults": [fault.as_json() for fault in faults],
        "rejoins": [rejoin.as_json() for rejoin in rejoins],
        "versions": end.get("versions", {}),
    }


def _goodput(first: Event | None, last: Event | None, step_time_s: float | None) -> float | None:
    if first is None or last is None or not step_time_s:
        return None
    productive_s = step_time_s * (last["step"] - first["step"] + 1)
    return min(1.0, productive_s / (max(0.0, last["time"] - first["time"]) + step_time_s))


def _steps_lost(events: Sequence[Event]) -> int:
    """Steps that had been committed and were taken again, because no member was left that had them."""
    repeats = (event for event in events if event["event"] == "steps_repeated")
    return sum(event["last_step"] - event["first_step"] + 1 for event in repeats)


def _last_evaluation(commits: Sequence[Event]) -> dict[str, Any]:
    return next((dict(commit["eval"]) for commit in reversed(commits) if commit.get("eval")), {})
