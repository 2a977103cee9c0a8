"""Who fills which slot, who is dead, who is ready: the coordinator's state machine. Pure.

`apply(roster, event)` returns the next roster and the actions to carry out, in order. It knows no clock:
what happens later (a back-off running out) is a `SetTimer` action that comes back as a `TimerOver` event.
Here is which event concerns whom, and what is looked at after each. What it means is in `roster_agents` (hosts),
`roster_workers` (one worker's way), `roster_schema` (who is refused), `roster_deaths`, `roster_views` (the list of
members), `roster_floor`, `roster_end` and `roster_generations`. Events and actions are in `roster_events`, the state is
in `roster_state`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastic_train.membership import roster_agents as agents
from elastic_train.membership import roster_deaths as deaths
from elastic_train.membership import roster_end as end
from elastic_train.membership import roster_floor as floor
from elastic_train.membership import roster_generations as generations
from elastic_train.membership import roster_views as views
from elastic_train.membership import roster_workers as workers
from elastic_train.membership.group import View
from elastic_train.membership.roster_events import (
    Action,
    AgentJoined,
    AgentLeaving,
    AgentLost,
    DrainAsked,
    Event,
    Evict,
    Exited,
    Failed,
    Finished,
    Hello,
    Ready,
    ResizeAsked,
    Silent,
    Started,
    Stepped,
    StopAsked,
    TimerOver,
    Unfit,
    Viewed,
    WorkerEvent,
)
from elastic_train.membership.roster_state import Floor, Limits, Roster, Slot, Turn, Worker, WorkerState
from elastic_train.membership.roster_workers import refuse_drain

__all__ = ["Floor", "Limits", "Roster", "Slot", "Worker", "WorkerState", "apply", "beginning", "refuse_drain"]


def beginning(
    limits: Limits,
    epoch: int,
    starts: Mapping[int, int],
    drained: Collection[int] = (),
    given_up: Collection[int] = (),
    failures: Mapping[int, int] | None = None,
    stop_wanted: str = "",
    returning: bool = False,
    ended: bool = False,
) -> Roster:
    """The roster of a job that goes on: epochs and incarnations are counted on, node ids begin anew.

    Args:
      limits: sizes and budgets.
      epoch: the newest one.
      starts: how often the worker of each slot was started.
      drained, given_up: slots that are not filled any more.
      failures: how often the worker of each slot has ended in a row.
      stop_wanted: why the members will be asked to stop; empty if nobody has asked.
      returning: the members of the generation before, if it had any, are to be expected, with their states.
      ended: the job is over, and only that is to be told.
    """
    slots = {
        slot: Slot(number, (failures or {}).get(slot, 0), drained=slot in drained, given_up=slot in given_up)
        for slot, number in starts.items()
    }
    returning = returning and epoch > 0
    view = View(epoch, ())
    return Roster(limits, view=view, slots=slots, stop_wanted=stop_wanted, returning=returning, ended=ended)


def apply(roster: Roster, event: Event) -> tuple[Roster, tuple[Action, ...]]:
    """The next roster, and what to do now, in this order. Does not change `roster`."""
    if roster.ended:
        return roster, ()
    turn = Turn(roster)
    match event:
        case AgentJoined():
            agents.joined(turn, event)
        case AgentLost():
            agents.lost(turn, event)
        case AgentLeaving():
            agents.leaving(turn, event)
        case TimerOver():
            _timer_over(turn, event)
        case StopAsked():
            end.stop_asked(turn, event)
        case DrainAsked():
            workers.drain_asked(turn, event)
        case ResizeAsked():
            agents.resized(turn, event)
        case _ if not roster.is_living(event.identity):
            _strayed(turn, event)
        case _:
            _worker_event(turn, roster.workers[event.identity.slot], event)
    end.end_if_over(turn)
    views.form_if_due(turn)
    floor.watch(turn)
    generations.watch(turn)
    return turn.roster, tuple(turn.actions)


def _worker_event(turn: Turn, worker: Worker, event: WorkerEvent) -> None:
    match event:
        case Started():
            workers.started(turn, worker, event)
        case Hello():
            workers.hello(turn, worker, event)
        case Ready():
            workers.ready(turn, worker, event)
        case Viewed():
            views.viewed(turn, worker, event)
        case Stepped():
            workers.stepped(turn, worker, event)
        case Failed():
            deaths.failed(turn, event)
        case Finished():
            end.finished(turn, worker, event)
        case Silent():
            workers.kill(turn, worker, event.reason)
        case Unfit():
            workers.kill(turn, worker, event.reason, event.kind)
        case Exited():
            deaths.exited(turn, worker, event)
        case _:
            raise TypeError(f"not an event of the roster: {event!r}")


def _strayed(turn: Turn, event: WorkerEvent) -> None:
    """An event of a start that is over. News of its process is ignored; its connection is told to exit."""
    if isinstance(event, Exited | Silent | Unfit | Started):
        return
    worker = turn.roster.workers.get(event.identity.slot)
    if worker is None:
        reason = f"slot {event.identity.slot} was never started"
    elif worker.identity == event.identity:
        reason = f"slot {event.identity.slot}, incarnation {event.identity.incarnation} was declared dead"
    else:
        newest, told = worker.identity, event.identity
        reason = (
            f"slot {told.slot} has incarnation {newest.incarnation} (node {newest.node}); "
            f"you are incarnation {told.incarnation} (node {told.node})"
        )
    if isinstance(event, Failed) and worker is not None:
        # Its exit, told by the agent, has overtaken its own last words, perhaps even by a whole restart.
        deaths.failed(turn, event)
    turn.emit(Evict(event.identity, reason))


def _timer_over(turn: Turn, event: TimerOver) -> None:
    match event.name.split("/"):
        case ["grace"]:
            views.grace_over(turn)
        case ["renew"]:
            generations.renew_now(turn)
        case ["floor"]:
            floor.timed_out(turn)
        case ["restart", slot]:
            agents.start(turn, int(slot))
        case ["start" | "leave" as kind, slot, incarnation]:
            workers.too_long(turn, kind, int(slot), int(incarnation))
        case _:
            raise ValueError(f"not a timer of the roster: {event.name!r}")
