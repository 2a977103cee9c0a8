"""Who is stuck: told from what the members say they do, and for how long. Pure.

A member either works by itself (reads data, computes, runs a hook) or waits for all the others. Local results are
awaited in the phase that computes them, an endless kernel included; so whoever is said to wait has done its part. A
member that works for longer than its phase may take is stuck; those that wait for it are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elastic_train.membership.group import Identity

WAITING = ("reconcile", "heal", "pause", "gather", "exchange", "doubt", "barrier", "await_save")
"""Phases in which a member waits for all the others, in the order in which a step or an epoch goes through them."""

STEP = ("data", "compute", "update")
"""Phases of a step in which a member works by itself."""

FIRST_STEP = ("prepare", "ready", "compile")
"""How an epoch begins: joiners come from `ready`."""

EVALUATION = ("evaluate",)
"""Told anew with every batch."""

SAVING = ("save", "load")
"""Waiting for a checkpoint to be written; reading one."""

AT_LENGTH = ("hook", "leaves", "end")
"""Hooks of the trainer, and what is written at the end; what is named nowhere here may take as long."""


class Limit(NamedTuple):
    """A time limit, and the field of `FaultConfig` that it comes from."""

    limit_s: float
    setting: str


@dataclass(frozen=True)
class Deadlines:
    """How long a phase may take, in seconds; see `FaultConfig`.

    Attributes:
      step_s: a phase of a step, at least.
      step_factor: a phase of a step, as a multiple of the median step time, if that is longer.
      first_step_s: a phase of an epoch's beginning and of its first step.
      evaluate_s: a batch of an evaluation.
      hook_s: a hook, or what is written at the end.
      save_s: writing or reading a checkpoint.
    """

    step_s: float
    step_factor: float
    first_step_s: float
    evaluate_s: float
    hook_s: float
    save_s: float

    def of_step(self, is_first: bool, step_time_s: float) -> Limit:
        """For a phase of a step, or for a wait of all. `step_time_s`: the median of late, 0 if unknown."""
        limits = [
            Limit(self.step_s, "step_timeout_s"),
            Limit(self.step_factor * step_time_s, "step_timeout_factor"),
            *([Limit(self.first_step_s, "first_step_timeout_s")] if is_first else []),
        ]
        return max(limits, key=lambda limit: limit.limit_s)

    def of(self, sign: Sign, step_time_s: float) -> Limit:
        """For what a member does by itself; that of a step while it waits for the others."""
        # Only what crosses members is compiled anew with every epoch, and that is nobody's own work.
        of_step = self.of_step(sign.is_new if sign.phase in STEP else sign.is_first_step, step_time_s)
        if sign.phase in STEP or sign.phase in WAITING:
            return of_step
        if sign.phase in FIRST_STEP:
            own = Limit(self.first_step_s, "first_step_timeout_s")
        elif sign.phase in EVALUATION:
            own = Limit(self.evaluate_s, "evaluate_timeout_s")
        elif sign.phase in SAVING:
            own = Limit(self.save_s, "save_timeout_s")
        else:
            own = Limit(self.hook_s, "hook_timeout_s")
        return max(own, of_step, key=lambda limit: limit.limit_s)


@dataclass(frozen=True)
class Sign:
    """What is known of a member.

    Attributes:
      step: the steps it has completed.
      phase: what it does, by its last report.
      quiet_s: how long it has been doing that, or has been a member, if that is shorter.
      silent_s: how long ago its last report came.
      is_first_step: it has not completed a step in this epoch.
      is_new: it has not completed a step since it became a member.
    """

    identity: Identity
    step: int
    phase: str
    quiet_s: float
    silent_s: float
    is_first_step: bool
    is_new: bool

    @property
    def waits(self) -> bool:
        return self.phase in WAITING


@dataclass(frozen=True)
class Stuck:
    """A member to be replaced.

    Attributes:
      rule: "works" (too long in a phase of its own), "silent" (no reports, although its connection lives) or
        "wait" (all wait for each other, and it was chosen).
      waited_s, limit_s, setting: how long, how long is allowed, and by which field of `FaultConfig`.
    """

    identity: Identity
    step: int
    phase: str
    rule: str
    waited_s: float
    limit_s: float
    setting: str


@dataclass(frozen=True)
class Judgement:
    """What to do now.

    Attributes:
      stuck: who is to be replaced.
      chosen: all wait for each other; this one will be replaced once they have done so for twice `limit_s`.
    """

    stuck: tuple[Stuck, ...] = ()
    chosen: Stuck | None = None


def judge_members(
    signs: Sequence[Sign],
    deadlines: Deadlines,
    *,
    step_time_s: float,
    unchanged_s: float,
    since_last_s: float,
    is_pending: bool,
) -> Judgement:
    """Finds those that hold up the others.

    If somebody is left who is not stuck, all who are stuck are replaced at once. Otherwise only the one that has been
    stuck longest, and the next one a whole limit later: what holds up everybody may be a disk that comes back, and
    the state in memory lives as long as one member does.

    If all wait for each other, a collective hangs. That is said after one limit. After two, one member is replaced,
    which makes the others leave the collective: of those that are behind (fewest steps, then the earliest phase) the
    one that came last.

    Args:
      signs: of the members that train, without those that were condemned before.
      step_time_s: the median of late; 0 if unknown.
      unchanged_s: how long there have been exactly these members.
      since_last_s: how long ago a member was condemned; infinite if none was.
      is_pending: a member that was condemned has not ended yet.
    """
    stuck = [found for sign in signs if (found := _stuck(sign, deadlines, step_time_s))]
    if stuck and len(stuck) == len(signs):
        longest = max(stuck, key=lambda found: (found.waited_s - found.limit_s, found.identity.node))
        is_due = not is_pending and since_last_s > longest.limit_s
        return Judgement((longest,) if is_due else ())
    if stuck:
        return Judgement(tuple(stuck))
    if is_pending or not signs or not all(sign.waits for sign in signs):
        return Judgement()
    limit_s, setting = deadlines.of_step(any(sign.is_first_step for sign in signs), step_time_s)
    waited_s = min(unchanged_s, *(sign.quiet_s for sign in signs))
    if waited_s <= limit_s:
        return Judgement()
    last = min(signs, key=lambda sign: (sign.step, WAITING.index(sign.phase), -sign.identity.node))
    chosen = Stuck(last.identity, last.step, last.phase, "wait", waited_s, limit_s, setting)
    return Judgement((chosen,) if waited_s > 2 * limit_s else (), chosen)


def _stuck(sign: Sign, deadlines: Deadlines, step_time_s: float) -> Stuck | None:
    limit = deadlines.of(sign, step_time_s)
    about = sign.identity, sign.step, sign.phase
    # Who is silent may be elsewhere by now, so what it did last allows it no more than a step.
    silent = limit if sign.phase in SAVING else deadlines.of_step(sign.is_first_step, step_time_s)
    if sign.silent_s > silent.limit_s:
        return Stuck(*about, "silent", sign.silent_s, *silent)
    if sign.quiet_s > limit.limit_s and not sign.waits:
        return Stuck(*about, "works", sign.quiet_s, *limit)
    return None


def in_words(stuck: Stuck) -> str:
    """Why it is replaced."""
    doing = f"{stuck.phase!r} after step {stuck.step}"
    allowed = f"allowed are {stuck.limit_s:.0f} s (faults.{stuck.setting})"
    if stuck.rule == "silent":
        return (
            f"has said nothing for {stuck.waited_s:.0f} s although its connection lives, as when code keeps the "
            f"interpreter's lock; {allowed}; before that it was in {doing}"
        )
    if stuck.rule == "wait":
        return f"all wait for each other for {stuck.waited_s:.0f} s, this one in {doing}; {allowed}, twice"
    return f"in {doing} for {stuck.waited_s:.0f} s; {allowed}"
