"""The standard schedule of `elastic-train verify-faults`, and what its two runs prove. Pure.

The schedule kills a worker in the exchange and the one of slot 0 between exchange and commit, raises an exception,
stops a worker for longer than any deadline and asks one to leave. Each fault waits for the workers lost before to be
back, however long that takes, and strikes in a step of its own. The run ends soon after the last one was survived; the
pace of another run only says how many steps that takes at most, and about how long.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic_train.chaos.faults import Fault
from elastic_train.chaos.schedule import LONG_STOP_S, SURVIVED
from elastic_train.chaos.throughput import Kept, calm_step_times, throughput_kept
from elastic_train.data.ledger import Report
from elastic_train.telemetry.barriers import BarrierReport
from elastic_train.telemetry.compare import Comparison
from elastic_train.telemetry.faults import moment
from elastic_train.telemetry.report import missed_fault, planned_fault

Line = Mapping[str, Any]

FIRST_STEP = 10
"""Steps before the first fault, and after all are survived."""

SPARE = 1.25
"""How much longer a worker may take to come back than those of the first group took to start."""

SHARE_OF_GAP, MAX_APART = 0.1, 20
"""What two faults are apart at least, as a share of the steps in which a worker comes back, but no more than so many:
what takes long is that a worker comes back, and steps in which nothing happens prove nothing."""

NOT_COMPARABLE = (
    'not promised: with batch_policy = "per_worker" the batch, and with it the result, depends on how many members '
    "there are"
)


@dataclass(frozen=True)
class Pace:
    """How fast a job is.

    Attributes:
      step_s: median step time, in seconds.
      start_s: the longest that a worker took from its start until it was ready.
    """

    step_s: float
    start_s: float

    def gap(self, keepalive_s: float) -> int:
        """Steps in which a worker that falls silent is found and its successor comes back, with some to spare."""
        return math.ceil(SPARE * (self.start_s + 2 * keepalive_s + 2.0) / self.step_s) + FIRST_STEP

    def disturbed_s(self, keepalive_s: float) -> float:
        """About how long the standard schedule takes, from the first step on: four workers come back, of which one
        was silent before."""
        num_steps = 2 * FIRST_STEP + 4 * MAX_APART
        return 4 * (self.start_s + 1.0) + 2 * keepalive_s + num_steps * self.step_s


def pace(events: Sequence[Line], commits: Sequence[Line]) -> Pace:
    """The pace of a run without faults. Raises ValueError if it has too few steps to tell."""
    times = sorted(commit["step_time_s"] for commit in commits[1:])
    if not times:
        raise ValueError("no step after the first was logged")
    began = {event["slot"]: moment(event) for event in events if event["event"] == "worker_starting"}
    took = [moment(e) - began[e["slot"]] for e in events if e["event"] == "worker_ready" and e["slot"] in began]
    return Pace(max(times[len(times) // 2], 1e-4), max(took, default=0.0))


def standard_faults(workers: int, gap: int, keepalive_s: float = 0.0) -> tuple[Fault, ...]:
    """The faults, in the order of their steps.

    Args:
      workers: slots of the job.
      gap: steps in which a worker comes back. Faults are less apart: they wait for it, and if one was quick the others
        have more time.
      keepalive_s: a worker that is silent for about twice as long is found.
    """
    last = workers - 1
    whom = (
        ("kill", "exchange", last),
        ("raise", "compute", 0),
        ("kill", "barrier", 0),
        ("stop", "compute", last),
        ("leave", "anywhere", 0),
    )
    return tuple(
        Fault(
            kind=kind,
            where=where,
            slot=slot,
            step=FIRST_STEP + number * _least_gap(gap),
            duration_s=max(LONG_STOP_S, 4 * keepalive_s) if kind == "stop" else None,
        )
        for number, (kind, where, slot) in enumerate(whom)
    )


def _least_gap(gap: int) -> int:
    return max(1, min(MAX_APART, round(gap * SHARE_OF_GAP)))


def steps_needed(gap: int) -> int:
    """How many steps the standard schedule takes until the last worker is back."""
    return FIRST_STEP + 4 * gap + _least_gap(gap)


def gap_within(steps: int) -> int:
    """The widest gap for which the standard schedule takes no more than so many steps; at least 1."""
    narrow, wide = (steps - FIRST_STEP - 1) / (4 + SHARE_OF_GAP), (steps - FIRST_STEP - MAX_APART) / 4
    return max(1, math.floor(narrow), math.floor(wide))


def fits(workers: int, steps: int) -> bool:
    """Whether so many steps have room for the standard schedule at all; with few, workers need not come back."""
    return max(fault.step or 0 for fault in standard_faults(workers, gap_within(steps))) < steps


@dataclass(frozen=True)
class Verdict:
    """What the two runs prove.

    Attributes:
      exact: digests are equal, ledger and barriers are proven, no step was lost with all members. None if digests need
        not be equal (`batch_policy = "per_worker"`) and all else is so.
      survived: the disturbed run came to its end, and no slot was given up.
      promised: equal bits are promised on this platform with these settings.
      back: every worker that was lost was a member again before the end.
      num_injected, missed: faults that struck; those that found no occasion.
      untold: faults that struck, but of which no event tells: nothing is known of how the job met them.
      faults: rows of summary.json's `faults`.
      rejoins: rows of summary.json's `rejoins`.
      kept: throughput kept at equal numbers of members.
      time_lost_s: as in summary.json.
      reasons: why it is not exact, or not survived, in words.
    """

    exact: bool | None
    survived: bool
    promised: bool
    back: bool
    num_injected: int
    missed: tuple[Line, ...]
    untold: tuple[Line, ...]
    faults: tuple[Line, ...]
    rejoins: tuple[Line, ...]
    kept: Kept
    time_lost_s: float
    reasons: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Nothing speaks against it, and every fault was tried."""
        return self._is_fine and not self.missed

    @property
    def is_incomplete(self) -> bool:
        """Nothing speaks against it, but a fault was not tried."""
        return self._is_fine and bool(self.missed)

    @property
    def _is_fine(self) -> bool:
        return self.exact is not False and self.survived and not self.untold

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


@dataclass(frozen=True)
class Disturbed:
    """What is read of a run directory.

    Attributes:
      events, commits, ledger: lines of events.jsonl, metrics.jsonl and ledger.jsonl.
      summary: summary.json.
      proof: the verified ledger.
      barriers: the verified barriers.
    """

    events: Sequence[Line]
    commits: Sequence[Line]
    ledger: Sequence[Line]
    summary: Line
    proof: Report
    barriers: BarrierReport


def has_ended(events: Sequence[Line], summary: Line) -> bool:
    """Whether a disturbed run came to its end: to its last step, or, since all faults were survived, to a stop."""
    stops = {event["reason"] for event in events if event["event"] == "stop_asked"}
    return summary["status"] == "done" or (
        summary["status"] == "stopped" and stops == {SURVIVED} and bool(summary["state_sha256"])
    )


def untold_faults(events: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Faults that struck without an event that tells of it, as in a chaos file. Each event tells of one fault.

    A worker that a lethal fault has struck must die, and an exception must have been reported. Other faults may leave
    no trace, such as a short stop, and are taken for told.

    Returns:
      (those; those that came too late: their worker finished before they could do anything).
    """
    traces = Counter(trace for event in events if (trace := _trace(event)))
    finished = {_worker(event) for event in events if event["event"] == "worker_finished"}
    untold, late = [], []
    for event in events:
        if event["event"] != "fault_injected" or not (event["lethal"] or event["kind"] == "raise"):
            continue
        trace = (*_worker(event), "gone" if event["lethal"] else event["step"])
        if event["lethal"] and _worker(event) in finished:
            late.append(event["fault"])
        elif not traces[trace]:
            untold.append(event["fault"])
        traces[trace] -= 1
    return untold, late


def _trace(event: Line) -> tuple[Any, ...] | None:
    """What an event tells of a worker: that it is gone, or after how many steps its code has raised."""
    match event["event"]:
        case "worker_died":
            return (*_worker(event), "gone")
        case "worker_exited" if event["exit_code"] != 0:  # after the end
            return (*_worker(event), "gone")
        case "user_code_failed" if not event["startup"]:
            return (*_worker(event), event["step"])
    return None


def _worker(event: Line) -> tuple[int, int, int]:
    return event["slot"], event["incarnation"], event["node"]


def judge(
    calm_events: Sequence[Line],
    calm_commits: Sequence[Line],
    disturbed: Disturbed,
    comparison: Comparison,
    workers: int,
    promised: bool,
    comparable: bool = True,
) -> Verdict:
    """The verdict on an undisturbed run (its events and commits) and a disturbed one.

    Args:
      workers: slots of both jobs.
      promised: equal bits are promised on this platform with these settings.
      comparable: the batch is the same with any number of members.
    """
    events, summary = disturbed.events, disturbed.summary
    struck = [event for event in events if event["event"] == "fault_injected"]
    missed = [fault for event in events if event["event"] == "faults_missed" for fault in event["faults"]]
    untold, late = untold_faults(events)
    given_up = sorted({event["slot"] for event in events if event["event"] == "slot_given_up"})
    inexact, lost = [], []
    if comparable and not comparison.same:
        inexact.append("the digests differ")
    if not disturbed.proof.proven:
        inexact.append("the ledger is not proven")
    if not disturbed.barriers.proven:
        inexact.append("what the barriers gave is not proven to be right: try `elastic-train barriers verify`")
    if summary["steps_lost"]:
        inexact.append(f"{summary['steps_lost']} steps were lost with all members, and taken again")
    if any(event["event"] == "digests_differ" for event in events):
        inexact.append("members ended with different states")
    if not has_ended(events, summary):
        lost.append(f"the run ended as {summary['status']}: {summary['message']}")
    if given_up:
        lost.append(f"given up: slots {', '.join(map(str, given_up))}")
    # What is calm in the disturbed run tells of the numbers of members that the other run never had.
    calm = {**calm_step_times(events, disturbed.commits), **calm_step_times(calm_events, calm_commits)}
    return Verdict(
        exact=False if inexact else True if comparable else None,
        survived=not lost,
        promised=promised,
        back=bool(disturbed.ledger) and len(disturbed.ledger[-1]["workers"]) == workers,
        num_injected=len(struck) - len(late),
        missed=(*missed, *late),
        untold=tuple(untold),
        faults=tuple(summary["faults"]),
        rejoins=tuple(summary["rejoins"]),
        kept=throughput_kept(disturbed.commits, calm),
        time_lost_s=summary["time_lost_s"],
        reasons=(*inexact, *lost),
    )


def format_verdict(verdict: Verdict, comparison: str) -> str:
    """In words. `comparison` says whether, or where, the two runs part."""
    result = "PASSED" if verdict.passed else "INCOMPLETE" if verdict.is_incomplete else "FAILED"
    lines = ["", f"verify-faults: {result}"]
    exact = {True: "yes", False: "NO", None: NOT_COMPARABLE}[verdict.exact]
    lines.append(f"exact       {exact}")
    lines += [f"            {line}" for line in comparison.splitlines() if verdict.exact is not None]
    lines.append(f"survived    {'yes' if verdict.survived else 'NO'}, {verdict.num_injected} faults injected")
    lines += [f"            {reason}" for reason in verdict.reasons]
    lines += [
        f"no effect   {planned_fault(fault)} struck, but no event tells of it: whether it is survived is not known"
        for fault in verdict.untold
    ]
    lines += [f"not tried   {missed_fault(fault)}; use more --steps" for fault in verdict.missed]
    if not verdict.back:
        lines.append(
            "            not every worker was back before the end, so later faults met fewer; use more --steps"
        )
    if verdict.exact is False and not verdict.promised:
        lines.append(
            "            On GPUs equal bits are promised with deterministic = true only: try again with "
            "--set deterministic=true"
        )
    for fault in verdict.faults:
        total = "?" if fault["total_s"] is None else f"{fault['total_s']:.2f}"
        lines.append(f"fault       {fault['kind']} slot {fault['slot']} at step {fault['step']}: {total} s lost")
    for rejoin in verdict.rejoins:
        took = rejoin["start_to_member_s"]
        since = "" if took is None else f", {took:.1f} s after its start"
        lines.append(
            f"return      slot {rejoin['slot']} at step {rejoin['step']}: the others waited "
            f"{rejoin['stall_s']:.2f} s{since}"
        )
    share = verdict.kept.share
    kept = "not known: too few steps" if share is None else f"{share:.1%} of what as many members do without faults"
    lines.append(f"throughput  {kept}; {verdict.time_lost_s:.2f} s lost in all")
    return "\n".join(lines)
