"""The content of summary.json, from what the run directory holds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_train.telemetry.faults import Event, Fault, Rejoin, find_faults, find_rejoins, time_lost


def summarize(events: Sequence[Event], commits: Sequence[Event], end: Mapping[str, Any]) -> dict[str, Any]:
    """What the job did, and what its faults cost.

    Two figures need a definition:

    - `goodput`: the share of the time from the first to the last committed step that brought training forward.
      Denominator: the time from the first commit to the last, plus one median step for the first one.
      Numerator: that, less the part of `time_lost_s` in it, less a median step for each of `steps_lost`. None
      before the first commit. Start-up and the end are in neither; evaluations and slow steps are in both.
    - `time_lost_s`: the time from each death or raise to the next committed step, and the stalls at rejoins; what
      overlaps counts once. For a worker that fell silent it begins a median step after the last commit before.

    `final_loss` is the training loss of the last step, whether it was logged or not. `message` is one sentence;
    `traceback` is the first one of the user's code, if the job failed.

    Args:
      events: lines of events.jsonl.
      commits: lines of metrics.jsonl, in the order of their steps.
      end: `status`, `exit_code`, `time`, and where there is a final state also `step`, `samples`,
        `params_sha256`, `state_sha256`, `versions`, `metrics` (final), `message` and `traceback`.
    """
    first, last = (commits[0], commits[-1]) if commits else (None, None)
    step_times = [commit["step_time_s"] for commit in commits if commit.get("step_time_s") is not None]
    step_time_s = statistics.median(step_times) if step_times else None
    faults, rejoins = find_faults(events, commits, step_time_s), find_rejoins(events, step_time_s)
    steps_lost = _steps_lost(events)
    # Without a final state, what the lines say.
    metrics = end.get("metrics") or _last_evaluation(commits)
    began = next((e["time"] for e in events if e["event"] == "job_started"), end["time"])
    return {
        "status": end["status"],
        "exit_code": end["exit_code"],
        "message": end.get("message", ""),
        "traceback": end.get("traceback", ""),
        "step": end.get("step", last["step"] if last else 0),
        "samples": end.get("samples", last["samples"] if last else 0),
        "params_sha256": end.get("params_sha256"),
        "state_sha256": end.get("state_sha256"),
        "final_loss": metrics.get("loss", last["loss"] if last else None),
        "metrics": metrics,
        "step_time_s": step_time_s,
        "goodput": _goodput(first, last, step_time_s, faults, rejoins, steps_lost),
        "wall_s": max(0.0, end["time"] - began),
        "time_lost_s": time_lost(faults, rejoins),
        "steps_lost": steps_lost,
        "faults": [fault.as_json() for fault in faults],
        "rejoins": [rejoin.as_json() for rejoin in rejoins],
        "versions": end.get("versions", {}),
    }


def _goodput(
    first: Event | None,
    last: Event | None,
    step_time_s: float | None,
    faults: Sequence[Fault],
    rejoins: Sequence[Rejoin],
    steps_lost: int,
) -> float | None:
    if first is None or last is None or not step_time_s:
        return None
    total_s = max(0.0, last["time"] - first["time"]) + step_time_s
    lost_s = time_lost(faults, rejoins, first["time"], last["time"]) + steps_lost * step_time_s
    return max(0.0, 1 - lost_s / total_s)


def _steps_lost(events: Sequence[Event]) -> int:
    """Steps that had been committed and were taken again, because no member was left that had them."""
    repeats = (event for event in events if event["event"] == "steps_repeated")
    return sum(event["last_step"] - event["first_step"] + 1 for event in repeats)


def _last_evaluation(commits: Sequence[Event]) -> dict[str, Any]:
    evaluations = ({n: v for n, v in commit.items() if n.startswith("eval_")} for commit in reversed(commits))
    return next((evaluation for evaluation in evaluations if evaluation), {})
