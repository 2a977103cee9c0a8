"""Who fills which slot, who is dead, who is ready: the coordinator's state machine. Pure.

`apply(roster, event)` returns the next roster and the actions to carry out, in order. It knows no clock:
what happens later (a back-off running out) is a `SetTimer` action that comes back as a `TimerOver` event.
Events and actions are in `roster_events`, the state is in `roster_state`; `roster_agents` has the
hosts, `roster_deaths` what follows a death.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastic_train.membership import roster_agents as agents
from elastic_train.membership import roster_generations as generations
from elastic_train.membership.group import View, name_slots
from elastic_train.membership.roster_deaths import exited, failed, with_first_traceback
from elastic_train.membership.roster_events import (
    Abort,
    Action,
    AgentJoined,
    AgentLeaving,
    AgentLost,
    AskLeave,
    AskStop,
    DrainAsked,
    Event,
    Evict,
    Exited,
    Failed,
    Finished,
    Form,
    Hello,
    Kill,
    Note,
    Ready,
    ResizeAsked,
    SetTimer,
    Silent,
    Started,
    Stepped,
    StopAsked,
    TimerOver,
    Unfit,
    Viewed,
    WorkerEvent,
)
from elastic_train.membership.roster_schema import refuse_if_different, refuse_minority
from elastic_train.membership.roster_state import (
    Floor,
    Limits,
    Roster,
    Slot,
    Turn,
    Worker,
    WorkerState,
    nodes_of,
    slots_of,
    title,
)

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
    """
    slots = {
        slot: Slot(number, (failures or {}).get(slot, 0), drained=slot in drained, given_up=slot in given_up)
        for slot, number in starts.items()
    }
    return Roster(limits, view=View(epoch, ()), slots=slots, stop_wanted=stop_wanted, returning=returning and epoch > 0)


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
            _stop_asked(turn, event)
        case DrainAsked():
            _drain_asked(turn, event)
        case ResizeAsked():
            agents.resized(turn, event)
        case _ if not roster.is_living(event.identity):
            _strayed(turn, event)
        case _:
            _worker_event(turn, roster.workers[event.identity.slot], event)
    _end_if_over(turn)
    _form_if_due(turn)
    _watch_floor(turn)
    generations.watch(turn)
    return turn.roster, tuple(turn.actions)


# A worker's way -------------------------------------------------------------------------------------------


def _worker_event(turn: Turn, worker: Worker, event: WorkerEvent) -> None:
    match event:
        case Started():
            _started(turn, worker, event)
        case Hello():
            _hello(turn, worker, event)
        case Ready():
            _ready(turn, worker, event)
        case Viewed():
            _viewed(turn, worker, event)
        case Stepped():
            _stepped(turn, worker, event)
        case Failed():
            failed(turn, event)
        case Finished():
            _finished(turn, worker, event)
        case Silent():
            _kill(turn, worker, event.reason)
        case Unfit():
            _kill(turn, worker, event.reason, event.kind)
        case Exited():
            exited(turn, worker, event)
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
        failed(turn, event)
    turn.emit(Evict(event.identity, reason))


def _started(turn: Turn, worker: Worker, event: Started) -> None:
    """May come after the worker's own hello: agent and worker have separate streams."""
    slot, incarnation, _ = worker.identity
    turn.set_worker(worker, pid=event.pid)
    turn.note("worker_started", pid=event.pid, warm=event.warm, **worker.identity._asdict())
    if worker.state in (WorkerState.STARTING, WorkerState.WARMING):
        turn.emit(SetTimer(f"start/{slot}/{incarnation}", turn.roster.limits.faults.start_timeout_s))


def _hello(turn: Turn, worker: Worker, event: Hello) -> None:
    state = WorkerState.WARMING if worker.state is WorkerState.STARTING else worker.state
    turn.set_worker(worker, state=state, pid=event.pid, host=event.host)
    turn.note("worker_warming", pid=event.pid, host=event.host, **worker.identity._asdict())


def _ready(turn: Turn, worker: Worker, event: Ready) -> None:
    if worker.state not in (WorkerState.STARTING, WorkerState.WARMING):
        return
    turn.set_worker(worker, state=WorkerState.READY, schema=event.schema)
    turn.set(ever_ready=True)
    turn.note("worker_ready", start_s=dict(event.start_s), **worker.identity._asdict())
    if not refuse_if_different(turn, turn.roster.workers[worker.identity.slot]) and not turn.roster.closing:
        turn.announce()


def _stepped(turn: Turn, worker: Worker, event: Stepped) -> None:
    first_step = worker.first_step
    if first_step is None and event.step > turn.roster.lost_step:
        first_step = event.step
    turn.set_worker(worker, step=event.step, first_step=first_step)
    slot = worker.identity.slot
    has_earned = first_step is not None and event.step - first_step + 1 >= turn.roster.limits.faults.forgive_after_steps
    if has_earned and turn.roster.slots[slot].failures:
        turn.set_slot(slot, failures=0)
    generations.renew_now(turn)


def _kill(turn: Turn, worker: Worker, reason: str, kind: str = "stopped") -> None:
    """The process must be gone before its node is declared dead: `Exited` or `AgentLost` does the rest."""
    # One that does not answer at all would not dump its stacks either.
    turn.emit(Kill(worker.agent, worker.identity, reason, dump_stacks=kind == "stuck"))
    turn.note(
        "worker_killed",
        f"{title(worker.identity)}: {reason}: killed",
        kind=kind,
        reason=reason,
        **worker.identity._asdict(),
    )


# Views ----------------------------------------------------------------------------------------------------


def _viewed(turn: Turn, worker: Worker, event: Viewed) -> None:
    """The members' agreement is what counts; the roster follows it."""
    view = event.view
    # One that the others have left behind, or that is no member yet, does not speak for them.
    if not worker.member or not view.has(worker.identity):
        return
    tell = {worker.identity.node}
    if view.epoch > turn.roster.view.epoch:
        tell.update(_follow(turn, view, event.step))
    # They may have been told of a death before it concerned them: before they were in a view with the dead.
    roster = turn.roster
    dead = roster.fallen if view == roster.view else [who for who in view.members if not roster.is_living(who)]
    for member in dead:
        turn.emit(Abort(member, tuple(sorted(tell))))


def _follow(turn: Turn, view: View, step: int) -> tuple[int, ...]:
    """Takes over the members' new view. Returns the nodes of the joiners, who now learn it."""
    left = tuple(member for member in turn.roster.members if not view.has(member.identity))
    came = tuple(joiner for joiner in turn.roster.ready if view.has(joiner.identity))
    gone = sorted({member.slot for member in turn.roster.view.members if not view.has(member)})
    turn.set_view(view)
    for worker in left:
        slot, incarnation, _ = worker.identity
        turn.set_worker(worker, left=True)
        turn.emit(SetTimer(f"leave/{slot}/{incarnation}", turn.roster.limits.leave_timeout_s))
    for worker in came:
        turn.set_worker(worker, state=WorkerState.MEMBER)
    show = f"going on after step {step} without {name_slots(gone)}" if gone else ""
    _note_view(turn, step, slots_of(came), slots_of(left), show)
    nodes = nodes_of(came)
    if nodes:
        turn.emit(Form(view, nodes))
        if turn.roster.stopping:
            turn.emit(AskStop(nodes, now=False, reason="the job is stopping"))
    turn.announce()
    return nodes


def _form_if_due(turn: Turn) -> None:
    """Without any member the roster itself makes the first view, once those who can come are ready."""
    roster, limits = turn.roster, turn.roster.limits
    num_ready = roster.num_ready
    if roster.closing or roster.num_members or not num_ready:
        return
    is_enough = num_ready >= limits.min_workers and not roster.grace
    if num_ready < roster.num_coming and not is_enough:
        return  # as happens with nearly everyone who gets ready
    ready = slots_of(roster.ready)
    waited_for = sorted(set(roster.coming) - set(ready))
    if not waited_for:
        _form(turn)
    elif is_enough:
        turn.set(grace=True)
        turn.emit(SetTimer("grace", limits.faults.start_grace_s))
        show = (
            f"{num_ready} of {limits.num_slots} workers are ready; waiting up to {limits.faults.start_grace_s:g} s "
            f"for {name_slots(waited_for)}"
        )
        turn.note("waiting", show, ready=ready, waited_for=waited_for)


def _form(turn: Turn) -> None:
    refuse_minority(turn)
    ready = turn.roster.ready
    if len(ready) < turn.roster.limits.min_workers:
        return
    view = View.of(turn.roster.view.epoch + 1, (worker.identity for worker in ready))
    step = max(turn.roster.carried.values(), default=0)
    turn.set(grace=False, carried={}, returning=False)
    turn.set_view(view)
    for worker in ready:
        turn.set_worker(worker, state=WorkerState.MEMBER)
    _note_view(turn, step, slots_of(ready), ())
    turn.emit(Form(view, view.nodes))
    if turn.roster.stop_wanted:
        turn.set(stopping=True)
        turn.emit(AskStop(view.nodes, now=False, reason=turn.roster.stop_wanted))


def _note_view(turn: Turn, step: int, came: tuple[int, ...], left: tuple[int, ...], show: str = "") -> None:
    view = turn.roster.view
    slots = tuple(member.slot for member in view.members)
    about = {"epoch": view.epoch, "members": slots, "nodes": view.nodes, "came": came, "left": left}
    turn.emit(Note("view_changed", {**about, "step": step}, show))


# The floor, timers, the end -------------------------------------------------------------------------------


def _watch_floor(turn: Turn) -> None:
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
        turn.note("below_floor", show, **_about_floor(roster))
        turn.emit(SetTimer("floor", limits.faults.floor_timeout_s))
    elif not below and roster.floor is not Floor.REACHED:
        turn.set(floor=Floor.REACHED)
        if roster.floor is Floor.BELOW:
            turn.note("floor_reached", f"{roster.num_members} members again: going on", **_about_floor(roster))


def _about_floor(roster: Roster) -> dict[str, object]:
    members, limits = slots_of(roster.members), roster.limits
    return {"members": members, "missing": roster.missing, "min_workers": limits.min_workers}


def _timer_over(turn: Turn, event: TimerOver) -> None:
    match event.name.split("/"):
        case ["grace"]:
            _grace_over(turn)
        case ["renew"]:
            generations.renew_now(turn)
        case ["floor"]:
            _floor_over(turn)
        case ["restart", slot]:
            agents.start(turn, int(slot))
        case ["start" | "leave" as kind, slot, incarnation]:
            _too_long(turn, kind, int(slot), int(incarnation))
        case _:
            raise ValueError(f"not a timer of the roster: {event.name!r}")


def _grace_over(turn: Turn) -> None:
    roster = turn.roster
    if not roster.grace:
        return
    turn.set(grace=False)
    if not roster.num_members and not roster.closing and roster.num_ready >= roster.limits.min_workers:
        _form(turn)


def _floor_over(turn: Turn) -> None:
    roster, limits = turn.roster, turn.roster.limits
    if roster.floor is Floor.REACHED:
        return
    message = (
        f"gave up: fewer than {limits.min_workers} members (min_workers) for {limits.faults.floor_timeout_s:g} s "
        f"(faults.floor_timeout_s); missing: {name_slots(roster.missing)}."
    )
    turn.end(4, "gave_up", *with_first_traceback(roster, message))


def _too_long(turn: Turn, kind: str, slot: int, incarnation: int) -> None:
    worker = turn.roster.workers.get(slot)
    if worker is None or worker.identity.incarnation != incarnation or not worker.living:
        return
    limits = turn.roster.limits
    if kind == "leave" and worker.left:
        said = "was refused" if worker.state is WorkerState.READY else "left the group"
        _kill(turn, worker, f"slot {slot} {said} {limits.leave_timeout_s:g} s ago and has not exited")
    if kind == "start" and worker.state in (WorkerState.STARTING, WorkerState.WARMING):
        timeout_s = limits.faults.start_timeout_s
        _kill(
            turn,
            worker,
            f"slot {slot} was not ready {timeout_s:g} s after its start (faults.start_timeout_s)",
            "stuck",
        )


def _stop_asked(turn: Turn, event: StopAsked) -> None:
    members = turn.roster.members
    expected = turn.roster.returning or turn.roster.carried
    if not members and expected and not event.now and not turn.roster.stop_wanted:
        turn.set(stop_wanted=event.reason)
        show = f"stopping when the members are back ({event.reason}); once more stops at once, and loses their state"
        turn.note("stop_asked", show, reason=event.reason)
        return
    if not members:
        when = "while no worker was a member" if turn.roster.view.epoch else "before training began"
        turn.end(130, "stopped", f"stopped {when}: {event.reason}")
        return
    if event.now or turn.roster.stopping:
        turn.end(130, "stopped", f"stopped at once, not after a commit: {event.reason}")
        return
    turn.set(stopping=True)
    show = f"stopping after the next commit ({event.reason}); once more stops at once"
    turn.note("stop_asked", show, reason=event.reason)
    turn.emit(AskStop(nodes_of(members), now=False, reason=event.reason))
    if turn.roster.num_ready:
        turn.announce()


def refuse_drain(roster: Roster, slot: int) -> str:
    """Why a slot cannot be drained; empty if it can."""
    limits = roster.limits
    if not 0 <= slot < limits.num_slots:
        return f"there is no slot {slot}: the job has slots 0 to {limits.num_slots - 1}"
    if not roster.is_coming(slot):
        return f"slot {slot} is not filled any more: it was drained or given up"
    left = roster.num_coming - 1
    if left < limits.min_workers:
        floor = f"min_workers is {limits.min_workers}"
        return f"without slot {slot} {left} workers would be left, and {floor}; stop the job instead"
    return ""


def _drain_asked(turn: Turn, event: DrainAsked) -> None:
    slot = event.slot
    turn.set_slot(slot, drained=True)
    turn.note("drain_asked", f"slot {slot} leaves for good ({event.reason})", slot=slot, reason=event.reason)
    worker = turn.roster.workers.get(slot)
    if worker is None or not worker.living:
        return
    if worker.member:
        turn.emit(AskLeave(worker.identity))
    else:
        _kill(turn, worker, f"slot {slot} was drained")


def _finished(turn: Turn, worker: Worker, event: Finished) -> None:
    turn.set_worker(worker, finished=event.status)
    turn.note("worker_finished", status=event.status, **worker.identity._asdict())
    if not worker.member:
        return
    if event.message:
        turn.end(3 if event.status == "failed" else 4, event.status, event.message)
    elif event.status == "failed":
        message = f"the user's code failed on every worker at step {event.step + 1}."
        turn.end(3, "failed", *with_first_traceback(turn.roster, message))
    elif not turn.roster.finishing:
        turn.set(finishing=event.status)
        if turn.roster.num_ready:
            turn.announce()


def _end_if_over(turn: Turn) -> None:
    roster = turn.roster
    if roster.ended:
        return
    if roster.finishing and not roster.num_training:
        if living := roster.living:
            turn.emit(AskStop(nodes_of(living), now=True, reason=roster.finishing))
        stopped = roster.finishing == "stopped"
        turn.end(130 if stopped else 0, roster.finishing, "stopped after a commit" if stopped else "done")
    elif roster.stopping and not roster.num_members:
        message = "all members died before they could agree on a stop; the newest checkpoint is what is left"
        turn.end(130, "stopped", message)
