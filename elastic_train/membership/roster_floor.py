"""The least number of members: below it the job pauses, and after some time it is given up. Pure."""

from __future__ import annotations

from elastic_train.membership.group import name_slots
from elastic_train.membership.roster_deaths import with_first_traceback
from elastic_train.membership.roster_events import SetTimer
from elastic_train.membership.roster_state import Floor, Roster, Turn, slots_of


def watch(turn: Turn) -> None:
    """Notes when there are too few members, and when there are enough again."""
    roster, limits = turn.roster, turn.roster.limits
    if roster.ended or roster.finishing or (roster.floor is Floor.UNWATCHED and not roster.agents):
        return
    below = roster.num_members < limits.min_workers
    if below and roster.floor is Floor.UNWATCHED:
        turn.set(floor=Floor.STARTING)
        turn.emit(SetTimer("floor", limits.faults.floor_timeout_s))
    elif below and roster.floor is Floor.REACHED:
        turn.set(floor=Floor.BELOW)
        show = (
            f"{roster.num_members} members, min_workers is {limits.min_workers}: pausing until enough of "
            f"{name_slots(roster.missing)} are back, at most {limits.faults.floor_timeout_s:g} s"
        )
        turn.note("below_floor", show, **_about(roster))
        turn.emit(SetTimer("floor", limits.faults.floor_timeout_s))
    elif not below and roster.floor is not Floor.REACHED:
        turn.set(floor=Floor.REACHED)
        if roster.floor is Floor.BELOW:
            turn.note("floor_reached", f"{roster.num_members} members again: going on", **_about(roster))


def _about(roster: Roster) -> dict[str, object]:
    members, limits = slots_of(roster.members), roster.limits
    return {"members": members, "missing": roster.missing, "min_workers": limits.min_workers}


def timed_out(turn: Turn) -> None:
    """Gives the job up, if there are still too few."""
    roster, limits = turn.roster, turn.roster.limits
    if roster.floor is Floor.REACHED:
        return
    message = (
        f"gave up: fewer than {limits.min_workers} members (min_workers) for {limits.faults.floor_timeout_s:g} s "
        f"(faults.floor_timeout_s); missing: {name_slots(roster.missing)}."
    )
    turn.end(4, "gave_up", *with_first_traceback(roster, message))
