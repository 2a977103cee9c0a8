"""What a person reads when a job has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_STATUS = {"done": "done", "failed": "failed", "gave_up": "gave up"}
_KINDS = {
    "killed": "was killed",
    "exited": "exited",
    "stopped": "did not answer and was killed",
    "stuck": "was stuck and was killed",
    "slow": "was too slow and was replaced",
}
_TRIED_AGAIN = {
    "raised": "{who} raised an exception{place}: the step was tried again{times}",
    "nonfinite": "the gradient {who} was not finite{place}{times}",
    "differs": "{who} held another state{place} and was healed{times}",
}

_SECONDS = (float, None)
_MISSED = {"kind": str, "slot": (int, str), "where?": str}

SUMMARY = {
    "status": str,
    "step": int,
    "samples": int,
    "message": str,
    "traceback": str,
    "params_sha256": (str, None),
    "state_sha256": (str, None),
    "final_loss": (float, None),
    "metrics": {str: (float, None)},
    "step_time_s": _SECONDS,
    "goodput": (float, None),
    "wall_s": float,
    "time_accounts?": {str: {"share": float}},
    "resumes?": int,
    "time_lost_s": float,
    "steps_lost": int,
    "faults": [
        {
            "kind": frozenset({*_KINDS, *_TRIED_AGAIN, "coordinator"}),
            "slot": (int, None),
            "step": (int, None),
            "cause?": (str, None),
            **dict.fromkeys(("detect_s", "rebuild_s", "heal_s", "total_s"), _SECONDS),
        }
    ],
    "rejoins": [{"slot": int, "step": (int, None), "stall_s": float, "start_to_member_s": _SECONDS}],
    "faults_missed?": [({**_MISSED, "step": int}, {**_MISSED, "after_s": float})],
}
"""What `format_summary` reads, as `kinds` has it."""


def format_summary(summary: Mapping[str, Any], run_dir: Path) -> str:
    """The summary of a job in words, over several lines, without a newline at the end.

    Args:
      summary: the content of summary.json.
      run_dir: named as the place of logs and metrics.
    """
    lines = [
        # Of a stop the message says whether it was after a commit or at once.
        _line("status", _STATUS.get(summary["status"]) or summary["message"] or summary["status"]),
        _line("steps", f"{summary['step']} ({_count(summary['samples'])} samples)"),
    ]
    if summary["final_loss"] is not None:
        lines.append(_line("loss", f"{summary['final_loss']:.6g}"))
    evaluation = {name: value for name, value in summary["metrics"].items() if name.startswith("eval_")}
    if evaluation:
        values = (f"{name.removeprefix('eval_')} {_value(value)}" for name, value in evaluation.items())
        lines.append(_line("evaluation", ", ".join(values)))
    if summary["step_time_s"] is not None:
        lines.append(_line("step time", f"{_seconds(summary['step_time_s'])} (median)"))
    total = f"{_seconds(summary['wall_s'])} in total"
    if summary["goodput"] is not None:
        total += f"; {summary['goodput']:.1%} of the time between first and last step was not lost"
    lines.append(_line("time", total))
    if went := _accounts(summary.get("time_accounts", {})):
        lines.append(_line("", went))
    if resumes := summary.get("resumes"):
        lines.append(_line("resumed", "once" if resumes == 1 else f"{resumes} times"))
    lines += _faults(summary["faults"])
    lines += _rejoins(summary["rejoins"])
    lines += [_line("not tried", missed_fault(fault)) for fault in summary.get("faults_missed", ())]
    lines.append(_line("lost", _lost(summary)))
    if summary["params_sha256"]:
        state = f", state {summary['state_sha256'][:12]}" if summary["state_sha256"] else ""
        lines.append(_line("digests", f"parameters {summary['params_sha256'][:12]}{state}"))
    lines.append(_line("files", f"{run_dir} (workers' output in {run_dir / 'logs'})"))
    if summary["message"] and summary["status"] in ("failed", "gave_up"):
        lines += ["", summary["message"].rstrip()]
        if summary["traceback"]:
            lines.append(f"Its traceback is above, and in {run_dir / 'summary.json'}.")
    return "\n".join(lines)


def _accounts(accounts: Mapping[str, Mapping[str, float]]) -> str:
    """Where the time went, the largest shares first; what rounds to nothing is left out."""
    found = sorted(accounts.items(), key=lambda item: -item[1]["share"])
    return ", ".join(f"{name.replace('_', ' ')} {each['share']:.1%}" for name, each in found if each["share"] >= 0.0005)


def _faults(faults: Sequence[Mapping[str, Any]]) -> list[str]:
    if not faults:
        return [_line("faults", "none")]
    # One worker's code may raise several times at one step, and the worker exits because of it.
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for number, fault in enumerate(faults):
        is_raise = fault["kind"] == "raised" or fault.get("cause") == "raised"
        kind = "raised" if is_raise else fault["kind"]
        key = (kind, fault["slot"], fault["step"]) if kind in _TRIED_AGAIN else (number, None, None)
        groups.setdefault(key, []).append(fault)
    return [_line("fault", _fault(group)) for group in groups.values()]


def _fault(group: Sequence[Mapping[str, Any]]) -> str:
    """Faults of one worker at one step, in one line."""
    last = group[-1]
    place = "" if last["step"] is None else f" after step {last['step']}"
    if last["kind"] == "coordinator":
        return f"the coordinator died{place}; the workers went on with the next one: {_cost(last)}"
    if last["kind"] in _TRIED_AGAIN:
        times = f" {len(group)} times" if len(group) > 1 else ""
        longest = max((fault["total_s"] for fault in group if fault["total_s"] is not None), default=None)
        cost = "" if longest is None else f", {_seconds(longest)} until it committed"
        if last.get("cause") == "skipped":
            cost = ": the step was skipped"
        if last["kind"] == "raised" and not cost:
            return f"worker {last['slot']} raised an exception{place}{times}"  # in the last step's hook, or at the end
        who = f"worker {last['slot']}"
        if last["kind"] == "nonfinite":
            who = "summed over all workers" if last["slot"] is None else f"of {who}"
        return _TRIED_AGAIN[last["kind"]].format(who=who, place=place, times=times) + cost
    because = ""
    if last.get("cause") == "raised":
        times = f", {len(group)} times in a row" if len(group) > 1 else ""
        because = f" because its code raised{times}"
    elif last.get("cause") == "refused":
        because = ", refused because it ran something else than the members"
    return f"worker {last['slot']} {_KINDS[last['kind']]}{place}{because}: {_cost(last)}"


def _cost(fault: Mapping[str, Any]) -> str:
    if fault["total_s"] is None:
        return "no step was committed afterwards"
    if fault["total_s"] == 0:
        return "no step had to wait"
    parts = [
        f"{name} {_seconds(fault[field])}"
        for name, field in (("detect", "detect_s"), ("rebuild", "rebuild_s"), ("heal", "heal_s"))
        if fault[field] is not None
    ]
    detail = f" ({', '.join(parts)})" if parts else ""
    return f"{_seconds(fault['total_s'])} to the next step{detail}"


def _rejoins(rejoins: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for rejoin in rejoins:
        place = "" if rejoin["step"] is None else f" at step {rejoin['step']}"
        text = f"worker {rejoin['slot']} joined{place}: the others waited {_seconds(rejoin['stall_s'])}"
        if rejoin["start_to_member_s"] is not None:
            text += f"; {_seconds(rejoin['start_to_member_s'])} from its start"
        lines.append(_line("rejoin", text))
    return lines


def missed_fault(fault: Mapping[str, Any]) -> str:
    """A fault of a chaos file that found no occasion."""
    return f"{planned_fault(fault)} found no occasion before the end"


def planned_fault(fault: Mapping[str, Any]) -> str:
    """A fault of a chaos file."""
    due = f"step {fault['step']}" if "step" in fault else f"{fault['after_s']:g} s after the first step"
    slot = f"slot {fault['slot']}" if isinstance(fault["slot"], int) else f"the {fault['slot']} slot"
    where = fault.get("where", "anywhere")
    return f"the fault {fault['kind']} ({slot}, {where}, due at {due})"


def _lost(summary: Mapping[str, Any]) -> str:
    if not summary["faults"] and not summary["rejoins"] and not summary["steps_lost"]:
        return "nothing"
    steps = summary["steps_lost"]
    return f"{steps} {'step' if steps == 1 else 'steps'}; {_seconds(summary['time_lost_s'])} of time"


def _line(name: str, text: str) -> str:
    return f"{name:<11} {text}"


def _count(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
