"""Where the time of a job went: every second of it in one account. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elastic_train.telemetry.faults import Event, Fault, Rejoin, moment, time_lost

ACCOUNTS: tuple[str, ...] = (
    "productive",
    "starting",
    "recovering",
    "compiling",
    "saving",
    "waiting_for_data",
    "waiting_for_members",
    "ending",
)


class Span(NamedTuple):
    """One part of a run, from a start of the job to its end, in Unix time."""

    began: float
    ended: float


def account(
    span: Span,
    events: Sequence[Event],
    commits: Sequence[Event],
    step_time_s: float | None,
    faults: Sequence[Fault],
    rejoins: Sequence[Rejoin],
) -> dict[str, float]:
    """Seconds of one part of a run, by account; together they are its length.

    - `starting`: up to the beginning of the first step: the first commit, less one median step.
    - `ending`: what follows the last commit, less the last save.
    - Between: `recovering` is the time lost to faults and rejoins (`faults.time_lost`), less what follows here,
      and steps that were taken again, a median step each. `waiting_for_members`: below the floor. `compiling`: what
      the member that tells of it waited for programs, in recoveries and elsewhere. `saving`: what training waited for
      saves. `waiting_for_data`: what that member waited for its samples. `productive` is all else: computing,
      exchanging, evaluating, hooks.

    Args:
      span: beginning and end.
      events: the part's lines of events.jsonl.
      commits: its lines of metrics.jsonl.
      step_time_s: the median step; None before the first one.
      faults, rejoins: of the whole run.
    """
    found = dict.fromkeys(ACCOUNTS, 0.0)
    length = max(0.0, span.ended - span.began)
    if not commits or not step_time_s:
        return found | {"starting": length}
    recoveries = [event for event in events if event["event"] == "recovered"]
    committed = min([commits[0]["time"], *map(moment, recoveries)])
    first, last = _within(committed - step_time_s, span), _within(commits[-1]["time"], span)
    found["starting"] = first - span.began
    saves = [event for event in events if event["event"] == "checkpoint_saved"]
    last_save = sum(save["seconds"] for save in saves if save["time"] > last)
    found["saving"] = min(last_save, span.ended - last)
    found["ending"] = span.ended - last - found["saving"]
    remaining = steps = last - first

    def put(name: str, seconds: float) -> float:
        nonlocal remaining
        seconds = min(max(0.0, seconds), remaining)
        remaining -= seconds
        found[name] += seconds
        return seconds

    lost = min(time_lost(faults, rejoins, first, last), steps)
    lost -= put("waiting_for_members", min(lost, _below_floor(events, first, last)))
    lost -= put(
        "compiling", min(lost, sum(_spent(event, "compile") for event in recoveries if moment(event) > committed))
    )
    repeats = (event for event in events if event["event"] == "steps_repeated")
    again = sum(event["last_step"] - event["first_step"] + 1 for event in repeats)
    put("recovering", lost + again * step_time_s)
    put("compiling", sum(_spent(commit, "compile") for commit in commits))
    put("saving", sum(save.get("stall_s") or 0.0 for save in saves if save["time"] <= last))
    put("waiting_for_data", sum(_spent(commit, "data") for commit in commits))
    found["productive"] = remaining
    return found


def with_shares(seconds: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Every account's `seconds`, and its `share` of all."""
    total = sum(seconds.values())
    return {name: {"seconds": value, "share": value / total if total else 0.0} for name, value in seconds.items()}


def _within(time: float, span: Span) -> float:
    return min(max(time, span.began), span.ended)


def _spent(line: Event, phase: str) -> float:
    return (line.get("phases") or {}).get(phase, 0.0)


def _below_floor(events: Sequence[Event], first: float, last: float) -> float:
    total, since = 0.0, None
    for event in events:
        if event["event"] == "below_floor" and since is None:
            since = event["time"]
        elif event["event"] == "floor_reached" and since is not None:
            total += max(0.0, min(event["time"], last) - max(since, first))
            since = None
    return total if since is None else total + max(0.0, last - max(since, first))
