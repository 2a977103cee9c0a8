"""What outlives a generation, when the next one begins on purpose, and the number of slots. Pure.

Node ids are drawn once in a generation. When a worker is to be started and none is left, the coordinator ends right
after the next commit, and is started again. For everybody else that is as if it had died: workers leave their state
with their agent, and the workers of the next generation begin with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic_train.membership.group import View, name_slots
from elastic_train.membership.roster_events import AgentJoined, AskLeave, Kill, NextGeneration, ResizeAsked, SetTimer
from elastic_train.membership.roster_state import Roster, Slot, Turn

RENEW_LIMIT_S = 10.0
"""How long the next commit is waited for before a generation ends on purpose."""


def take_carried(turn: Turn, event: AgentJoined) -> None:
    """Notes which states an agent offers. They count while nobody is a member: whoever is may have a newer one."""
    roster = turn.roster
    if not event.carried or roster.num_members:
        return
    view = View(max(roster.view.epoch, event.epoch), ())
    turn.set(carried={**roster.carried, **event.carried}, view=view)
    newest = max(event.carried.values())
    show = f"agent {event.agent} holds the state of {name_slots(sorted(event.carried))}, after step {newest}"
    turn.note("state_carried", show, agent=event.agent, steps={str(n): step for n, step in event.carried.items()})


def renew(turn: Turn, reason: str) -> None:
    """The next generation is needed: after the next commit, or at once if none is to be expected."""
    if turn.roster.renewing or turn.roster.closing:
        return
    turn.set(renewing=reason)
    turn.note("generation_ending", f"the next generation begins after the next commit: {reason}", reason=reason)
    turn.emit(SetTimer("renew", RENEW_LIMIT_S))


def renew_now(turn: Turn) -> None:
    """A step was committed, or that takes too long."""
    if turn.roster.renewing and not turn.roster.closing:
        turn.emit(NextGeneration(turn.roster.renewing))
        turn.set(ended=True)


def watch(turn: Turn) -> None:
    """Below the floor no step is committed that could be waited for."""
    if turn.roster.num_members < turn.roster.limits.min_workers:
        renew_now(turn)


def refuse_resize(roster: Roster, workers: int) -> str:
    """Why the job cannot have this many workers; empty if it can."""
    limits = roster.limits
    if roster.closing:
        return "the job is ending"
    if workers == limits.num_slots:
        return f"it has {workers} workers already"
    if workers < limits.min_workers:
        return f"min_workers is {limits.min_workers}; use at least so many"
    if limits.max_slots and workers > limits.max_slots:
        return f"the batch is cut into shards = {limits.max_slots}, and every worker needs one; use at most so many"
    left = [slot for slot in roster.coming if slot < workers]
    new = range(limits.num_slots, workers)
    if len(left) + len(new) < limits.min_workers:
        return f"{len(left)} workers would be left, since others were drained or given up; min_workers is " + str(
            limits.min_workers
        )
    known = {n for slots in (*roster.agents.values(), *roster.standby.values()) for n in slots}
    homeless = [slot for slot in new if slot not in known][sum(roster.spare.values()) :]
    if homeless:
        slots = name_slots(homeless)
        return (
            f"no host has room for {slots}. Start `elastic-train run … --coordinator … --slots` with {slots} on a host "
            "that has: it stands by until the job grows"
        )
    return ""


def resize(turn: Turn, event: ResizeAsked) -> tuple[int, ...]:
    """Changes the number of slots. The highest are drained, or new ones are given to agents. Returns those that are
    to be started now, and for which there may be no agent yet."""
    before, after = turn.roster.limits.num_slots, event.workers
    show = f"the job has {after} workers from now on, after {before} ({event.reason})"
    turn.note("resized", show, workers=after, before=before, reason=event.reason)
    turn.set(limits=replace(turn.roster.limits, num_slots=after))
    for slot in range(after, before):
        turn.set_slot(slot, drained=True)
        worker = turn.roster.workers.get(slot)
        if worker is None or not worker.living:
            continue
        if worker.member:
            turn.emit(AskLeave(worker.identity))
        else:
            turn.emit(Kill(worker.agent, worker.identity, f"slot {slot} is one too many"))
    new = tuple(range(before, after))
    for slot in new:
        turn.set_slot(slot, **{name: getattr(Slot(), name) for name in ("drained", "given_up", "failures")})
    find_room(turn, new)
    if after > turn.roster.limits.capacity:
        renew(turn, f"{after} workers need a larger coordinator")
    return new


def find_room(turn: Turn, slots: Iterable[int]) -> None:
    """Gives those slots that no agent has offered to agents with room for more."""
    offered = (*turn.roster.agents.values(), *turn.roster.standby.values())
    known = {slot for slots in offered for slot in slots}
    for slot in slots:
        roster = turn.roster
        if slot in known:
            continue
        agent = next((name for name in roster.agents if roster.spare.get(name, 0) > 0), None)
        if agent is not None:
            turn.set(
                agents={**roster.agents, agent: (*roster.agents[agent], slot)},
                spare={**roster.spare, agent: roster.spare[agent] - 1},
            )
