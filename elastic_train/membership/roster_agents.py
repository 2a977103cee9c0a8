"""Agents that come, leave and are lost, and the starting of workers on them. Pure.

Each slot is filled by one agent. Further agents that offer it stand by: when the first is lost, or leaves, they take
over. So an agent that is started anew before the loss of the old one was noticed only has to wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic_train.membership import roster_generations as generations
from elastic_train.membership.group import Identity, name_slots
from elastic_train.membership.roster_deaths import announce_who_is_left, bury
from elastic_train.membership.roster_events import (
    AgentJoined,
    AgentLeaving,
    AgentLost,
    Kill,
    Refuse,
    ResizeAsked,
    Start,
)
from elastic_train.membership.roster_state import Slot, Turn, Worker, WorkerState


def joined(turn: Turn, event: AgentJoined) -> None:
    roster = turn.roster
    unknown = tuple(sorted(slot for slot in set(event.slots) if not 0 <= slot < roster.limits.num_slots))
    filled = {slot for agent, slots in roster.agents.items() if agent != event.agent for slot in slots}
    offered = [slot for slot in event.slots if slot not in unknown]
    slots = tuple(slot for slot in offered if slot not in filled)
    taken = tuple(sorted(set(offered) & filled))
    turn.set(agents={**roster.agents, event.agent: slots}, spare={**roster.spare, event.agent: event.spare})
    if taken or unknown:
        turn.set(standby={**roster.standby, event.agent: tuple(sorted({*taken, *unknown}))})
    turn.note("agent_joined", agent=event.agent, slots=slots)
    if unknown:
        last = roster.limits.num_slots - 1
        _refuse(turn, event.agent, unknown, f"the job has slots 0 to {last} (--workers {last + 1})")
    if taken:
        owners = sorted({agent for agent, slots in roster.agents.items() if set(slots) & set(taken)})
        reason = (
            f"filled by agent {', '.join(owners)} already. If that one was lost or leaves, this one takes over; "
            "otherwise give each host its own --slots"
        )
        _refuse(turn, event.agent, taken, reason)
    generations.take_carried(turn, event)
    # A job that had grown may have slots of which no agent has heard yet.
    generations.find_room(turn, range(turn.roster.limits.num_slots))
    for slot in turn.roster.agents[event.agent]:
        start(turn, slot)


def _refuse(turn: Turn, agent: str, slots: tuple[int, ...], reason: str) -> None:
    show = f"agent {agent} offers {name_slots(slots)}, which it does not fill: {reason}"
    turn.note("slots_refused", show, agent=agent, slots=slots)
    turn.emit(Refuse(agent, slots, reason))


def lost(turn: Turn, event: AgentLost) -> None:
    """Nobody can tell any more whether its workers live: they count as dead, fenced by their node ids."""
    roster = turn.roster
    slots = roster.agents.get(event.agent, ())
    is_leaving = event.agent in roster.leaving
    turn.set(
        agents=_without(roster.agents, event.agent),
        standby=_without(roster.standby, event.agent),
        leaving=roster.leaving - {event.agent},
        spare={name: number for name, number in roster.spare.items() if name != event.agent},
        carried={slot: step for slot, step in roster.carried.items() if slot not in slots},
    )
    dead = tuple(worker for worker in roster.living if worker.agent == event.agent)
    if is_leaving:
        show = f"agent {event.agent} has left" + (f"; {_wait(dead)}" if dead else "")
    else:
        show = f"lost agent {event.agent}" + (f"; {name_slots(slots)} wait for an agent" if slots else "")
    turn.note("agent_lost", show, agent=event.agent, leaving=is_leaving)
    bury(turn, dead, exit_code=None, reason=f"agent {event.agent} was lost")
    announce_who_is_left(turn, dead)
    _hand_over(turn)


def leaving(turn: Turn, event: AgentLeaving) -> None:
    """Its members leave by themselves. Who is no member yet has nothing to leave in order."""
    roster = turn.roster
    if event.agent not in roster.agents or event.agent in roster.leaving:
        return
    slots = roster.agents[event.agent]
    turn.set(
        agents={**roster.agents, event.agent: ()},
        standby=_without(roster.standby, event.agent),
        leaving=roster.leaving | {event.agent},
    )
    show = f"agent {event.agent} leaves ({event.reason}); " + (
        f"{name_slots(slots)} wait for an agent" if slots else "it fills no slot"
    )
    turn.note("agent_leaving", show, agent=event.agent, slots=slots, reason=event.reason)
    for worker in roster.living:
        if worker.agent == event.agent and worker.state is not WorkerState.MEMBER:
            turn.emit(Kill(worker.agent, worker.identity, "its agent leaves"))
    _hand_over(turn)


def resized(turn: Turn, event: ResizeAsked) -> None:
    new = generations.resize(turn, event)
    _hand_over(turn)
    for slot in new:
        start(turn, slot)


def _hand_over(turn: Turn) -> None:
    """Gives slots that nobody fills to agents that stand by for them, in the order in which they came."""
    for agent, offered in turn.roster.standby.items():
        filled = {slot for slots in turn.roster.agents.values() for slot in slots}
        free = tuple(slot for slot in offered if slot not in filled and slot < turn.roster.limits.num_slots)
        if not free:
            continue
        rest = tuple(slot for slot in offered if slot not in free)
        standby = _without(turn.roster.standby, agent)
        agents = {**turn.roster.agents, agent: tuple(sorted({*turn.roster.agents[agent], *free}))}
        turn.set(agents=agents, standby={**standby, agent: rest} if rest else standby)
        turn.note("slots_taken_over", f"agent {agent} takes over {name_slots(free)}", agent=agent, slots=free)
        for slot in free:
            start(turn, slot)


def start(turn: Turn, slot: int) -> None:
    """Starts the slot's worker, if that is wanted and possible now."""
    roster = turn.roster
    agent = next((name for name, slots in roster.agents.items() if slot in slots), None)
    worker = roster.workers.get(slot)
    if agent is None or roster.closing or not roster.is_coming(slot) or (worker and worker.living):
        return
    if roster.next_node >= roster.limits.num_nodes:
        number = roster.limits.num_nodes - 1
        generations.renew(turn, f"all {number} node ids of this one are used, and slot {slot} needs another")
        return
    incarnation = roster.slots.get(slot, Slot()).starts
    identity = Identity(slot, incarnation, roster.next_node)
    turn.set(next_node=roster.next_node + 1)
    turn.set_slot(slot, starts=incarnation + 1)
    turn.set_worker(Worker(identity, agent, WorkerState.STARTING))
    # Written down before it is done: the next generation counts incarnations on from what is written.
    turn.note("worker_starting", agent=agent, **identity._asdict())
    turn.emit(Start(agent, identity, restore=slot in roster.carried and not roster.num_members))


def _wait(dead: Iterable[Worker]) -> str:
    return f"{name_slots(worker.identity.slot for worker in dead)} had not left in order"


def _without(agents: dict[str, tuple[int, ...]], agent: str) -> dict[str, tuple[int, ...]]:
    return {name: slots for name, slots in agents.items() if name != agent}
