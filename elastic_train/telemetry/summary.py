"""The content of summary.json, from what the run directory holds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from elastic_train.telemetry.faults import Event, Fault, Rejoin, find_faults, find_rejoins, time_lost
from elastic_train.telemetry.phase_times import added
from elastic_train.telemetry.time_account import Span, account, with_shares


class Part(NamedTuple):
    """What lies between one start of the job and the next: a run that was resumed has several."""

    began: float  # Unix time
    events: Sequence[Event]
    commits: Sequence[Event]


def parts_of(events: Sequence[Event], commits: Sequence[Event]) -> list[Part]:
    """The parts of a run. Workers that ended with one part are no faults of the next one."""
    starts = [index for index, event in enumerate(events) if event["event"] == "job_started"]
    edges = [0, *starts[1:], len(events)]
    if len(edges) == 2:
        began = events[0]["time"] if events else 0.0
        return [Part(began, events, commits)]
    times = [events[start]["time"] for start in starts]
    until = [*times[1:], float("inf")]
    return [
        Part(
            began,
            events[edges[number] : edges[number + 1]],
            [commit for commit in commits if (number == 0 or commit["time"] >= began) and commit["time"] < end],
        )
        for number, (began, end) in enumerate(zip(times, until, strict=True))
    ]


def summarize(events: Sequence[Event], commits: Sequence[Event], end: Mapping[str, Any]) -> dict[str, Any]:
    """What the job did, and what its faults cost.

    Two figures need a definition:

    - `goodput`: the share of the time from the first to the last committed step that brought training forward.
      Denominator: the time from the first commit to the last, plus one median step for the first one; of a run that was
      resumed the sum over its parts, so that the time between them is not in it.
      Numerator: that, less the part of `time_lost_s` in it, less a median step for each of `steps_lost`. None
      before the first commit. Start-up and the end are in neither; evaluations and slow steps are in both.
    - `time_lost_s`: the time from each death or raise to the next committed step, and the stalls at rejoins; what
      overlaps counts once. For a worker that fell silent it begins a median step after the last commit before.

    `wall_s` is the time in which the job ran, that between its parts left out. `time_accounts` says where all of it
    went: for each account of `time_account.account` its `seconds` and its `share`. `final_loss` is the training loss
    of the last step, whether it was logged or not. `message` is one sentence;
    `traceback` is the first one of the user's code, if the job failed. `faults_missed` are faults that `--chaos` was to
    inject and that found no occasion, as in a chaos file.

    Args:
      events: lines of events.jsonl.
      commits: lines of metrics.jsonl, in the order of their steps.
      end: `status`, `exit_code`, `time`, and where there is a final state also `step`, `samples`,
        `params_sha256`, `state_sha256`, `versions`, `metrics` (final), `message` and `traceback`.
    """
    last = commits[-1] if commits else None
    parts = parts_of(events, commits)
    step_times = [commit["step_time_s"] for commit in commits if commit.get("step_time_s") is not None]
    step_time_s = statistics.median(step_times) if step_times else None
    faults = [fault for part in parts for fault in find_faults(part.events, part.commits, step_time_s)]
    rejoins = [rejoin for part in parts for rejoin in find_rejoins(part.events, step_time_s)]
    steps_lost = _steps_lost(events)
    spans, accounts = _spans(parts, end["time"]), dict[str, float]()
    for span, part in zip(spans, parts, strict=True):
        accounts = added(accounts, account(span, part.events, part.commits, step_time_s, faults, rejoins))
    # Without a final state, what the lines say.
    metrics = end.get("metrics") or _last_evaluation(commits)
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
        "goodput": _goodput(parts, step_time_s, faults, rejoins, steps_lost),
        "wall_s": sum(span.ended - span.began for span in spans),
        "time_accounts": with_shares(accounts),
        "resumes": len(parts) - 1,
        "time_lost_s": time_lost(faults, rejoins),
        "steps_lost": steps_lost,
        "faults": [fault.as_json() for fault in faults],
        "rejoins": [rejoin.as_json() for rejoin in rejoins],
        "faults_missed": [fault for e in events if e["event"] == "faults_missed" for fault in e["faults"]],
        "versions": end.get("versions", {}),
    }


def _spans(parts: Sequence[Part], ended: float) -> list[Span]:
    """When each part ran. One that was broken off ends with its last line."""
    if not any(event["event"] == "job_started" for event in parts[-1].events):
        return [Span(0.0, 0.0) for _ in parts]
    ends = [max(event["time"] for event in (*part.events, *part.commits)) for part in parts[:-1]]
    return [Span(part.began, max(part.began, end)) for part, end in zip(parts, [*ends, ended], strict=True)]


def _goodput(
    parts: Sequence[Part],
    step_time_s: float | None,
    faults: Sequence[Fault],
    rejoins: Sequence[Rejoin],
    steps_lost: int,
) -> float | None:
    spans = [(part.commits[0]["time"], part.commits[-1]["time"]) for part in parts if part.commits]
    if not spans or not step_time_s:
        return None
    total_s = sum(max(0.0, last - first) + step_time_s for first, last in spans)
    lost_s = sum(time_lost(faults, rejoins, first, last) for first, last in spans) + steps_lost * step_time_s
    return max(0.0, 1 - lost_s / total_s)


def _steps_lost(events: Sequence[Event]) -> int:
    """Steps that had been committed and were taken again, because no member was left that had them."""
    repeats = (event for event in events if event["event"] == "steps_repeated")
    return sum(event["last_step"] - event["first_step"] + 1 for event in repeats)


def _last_evaluation(commits: Sequence[Event]) -> dict[str, Any]:
    evaluations = ({n: v for n, v in commit.items() if n.startswith("eval_")} for commit in reversed(commits))
    return next((evaluation for evaluation in evaluations if evaluation), {})
