"""The list of members: the roster follows the one that they agree on, and makes the first one itself. Pure."""

from __future__ import annotations

from elastic_train.membership.group import View, name_slots
from elastic_train.membership.roster_events import Abort, AskStop, Form, Note, SetTimer, Viewed
from elastic_train.membership.roster_schema import refuse_minority
from elastic_train.membership.roster_state import Turn, Worker, WorkerState, nodes_of, slots_of


def viewed(turn: Turn, worker: Worker, event: Viewed) -> None:
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


def form_if_due(turn: Turn) -> None:
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


def grace_over(turn: Turn) -> None:
    """Those who are not ready by now are not waited for."""
    roster = turn.roster
    if not roster.grace:
        return
    turn.set(grace=False)
    if not roster.num_members and not roster.closing and roster.num_ready >= roster.limits.min_workers:
        _form(turn)


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
