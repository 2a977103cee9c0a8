"""How a job comes to its end: it is asked to stop, its members finish, or none of them is left. Pure."""

from __future__ import annotations

from elastic_train.membership.roster_deaths import with_first_traceback
from elastic_train.membership.roster_events import AskStop, Finished, StopAsked
from elastic_train.membership.roster_state import Turn, Worker, nodes_of


def stop_asked(turn: Turn, event: StopAsked) -> None:
    """The members are asked to agree on a stop. Where there are none, or on the second time, the job ends at once."""
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


def finished(turn: Turn, worker: Worker, event: Finished) -> None:
    """A worker trains no more. The job fails at once, or is over when the other members have finished, too."""
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


def end_if_over(turn: Turn) -> None:
    """Ends the job when no member trains any more."""
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
