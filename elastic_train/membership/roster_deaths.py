"""What follows when a worker dies or its user's code raises: fences, restarts, budgets. Pure."""

from __future__ import annotations

from elastic_train.errors import EXIT_USER_CODE, last_error
from elastic_train.membership.roster_events import Abort, Exited, Failed, SetTimer, Tombstone
from elastic_train.membership.roster_state import Roster, Slot, Turn, Worker, WorkerState, nodes_of, title

STARTUP_RESTART_S = 5.0
"""How long a worker is not started again whose code raised before anyone was ever ready: others may soon, too."""


def exited(turn: Turn, worker: Worker, event: Exited) -> None:
    """A process is gone: declares it dead, then plans the next start of its slot."""
    slot = worker.identity.slot
    reason = f"exit code {event.exit_code}"
    if event.exit_code == EXIT_USER_CODE:
        reason += ", because its code raised"
    if event.stuck_at:
        reason += f", stuck at {event.stuck_at}"
    turn.set_slot(slot, exit_code=event.exit_code)
    bury(turn, (worker,), event.exit_code, reason, _news_of(turn, slot, event.traceback))
    if worker.agent in turn.roster.leaving:
        turn.emit(SetTimer(f"restart/{slot}", 0.0))  # as asked: no failure, and another agent may fill the slot
    else:
        _restart_later(turn, slot)
    announce_who_is_left(turn, (worker,))


def bury(turn: Turn, dead: tuple[Worker, ...], exit_code: int | None, reason: str, traceback: str = "") -> None:
    """Declares workers dead. `traceback` is shown, if there is any.

    All tombstones come before any abort: a member that is thrown out of a collective must find the barrier
    already without the dead.
    """
    had_members = turn.roster.num_members > 0
    for worker in dead:
        turn.set_worker(worker, state=WorkerState.DEAD)
    fallen = {*turn.roster.fallen, *(worker.identity for worker in dead if turn.roster.view.has(worker.identity))}
    turn.set(fallen=tuple(sorted(fallen, key=lambda identity: identity.node)))
    for worker in dead:
        turn.emit(Tombstone(worker.identity))
    members = nodes_of(turn.roster.members)
    for worker in dead:
        if members:
            turn.emit(Abort(worker.identity, members))
    for worker in dead:
        # The worker's own last report is older than its last commit; the members say after which step they go on.
        how = "has left" if exit_code == 0 else "died"
        show = f"{title(worker.identity)} {how} ({worker.state}): {reason}" + (f"\n{traceback}" if traceback else "")
        about = {"exit_code": exit_code, "reason": reason, "step": worker.step, "state": str(worker.state)}
        turn.note("worker_died", show, **worker.identity._asdict(), **about)
    if had_members and not members:
        # Code that ends all workers at one step must not earn forgiveness with the steps before it, for ever.
        reached = max(worker.step for worker in turn.roster.workers.values())
        turn.set(lost_step=max(turn.roster.lost_step, reached))
    if had_members and not members and not turn.roster.closing:
        show = "all members died: the state in memory is lost, and the run goes on from the newest checkpoint"
        turn.note("group_lost", show, epoch=turn.roster.view.epoch)


def announce_who_is_left(turn: Turn, dead: tuple[Worker, ...]) -> None:
    """Tells the members if joiners are among the dead; after it is known whether the job goes on at all."""
    if any(worker.state is WorkerState.READY for worker in dead):
        turn.announce()


def _restart_later(turn: Turn, number: int) -> None:
    roster, limits = turn.roster, turn.roster.limits
    if roster.closing or roster.slots[number].drained:
        return
    failures = turn.set_slot(number, failures=roster.slots[number].failures + 1).failures
    if failures > limits.faults.max_restarts:
        _give_up(turn, number)
        return
    # The exponent is bounded before the delay is, so that a large budget cannot overflow a float.
    backoff_s = limits.faults.first_backoff_s * 2.0 ** min(failures - 2, 64)
    delay_s = 0.0 if failures == 1 else min(backoff_s, limits.faults.max_backoff_s)
    if roster.slots[number].startup_failed and not roster.ever_ready:
        delay_s = max(delay_s, STARTUP_RESTART_S)
    turn.emit(SetTimer(f"restart/{number}", delay_s))
    turn.note("restart_scheduled", slot=number, failures=failures, delay_s=delay_s)


def _give_up(turn: Turn, number: int) -> None:
    limits = turn.roster.limits
    slot = turn.set_slot(number, given_up=True)
    show = (
        f"gave up slot {number}: its worker ended {slot.failures} times in a row, last with exit code "
        f"{slot.exit_code}; {limits.faults.max_restarts} restarts are allowed (faults.max_restarts)"
    )
    turn.note("slot_given_up", show, slot=number, failures=slot.failures, exit_code=slot.exit_code)
    if turn.roster.num_coming >= limits.min_workers:
        return
    left = turn.roster.coming
    gone = (n for n in range(limits.num_slots) if n not in left and n in turn.roster.slots)
    codes = {n: turn.roster.slots[n].exit_code for n in gone}
    message = (
        f"gave up: {len(left)} of {limits.num_slots} slots are left and min_workers is {limits.min_workers}. "
        + "; ".join(f"slot {n}: last exit code {code}" for n, code in codes.items())
        + f". Each was started again {limits.faults.max_restarts} times in a row (faults.max_restarts)."
    )
    turn.end(4, "gave_up", *with_first_traceback(turn.roster, message))


def failed(turn: Turn, event: Failed) -> None:
    """User code raised. If it did on every slot before anyone was ever ready, more starts would not help."""
    number = event.identity.slot
    where = "while starting" if event.startup else f"at step {event.step + 1}"
    text = _news_of(turn, number, event.traceback) or f"again {last_error(event.traceback)}"
    about = {"step": event.step, "fatal": event.fatal, "startup": event.startup, "traceback": event.traceback}
    last = ", for the last time that faults.max_step_failures allows" if event.fatal and not event.startup else ""
    show = f"{title(event.identity)}: user code raised {where}{last}:\n{text}"
    if event.startup and not event.traceback.startswith("Traceback "):
        show = f"{title(event.identity)} cannot start: {text}"
    turn.note("user_code_failed", show, **event.identity._asdict(), **about)
    if event.fatal and not event.startup:
        _failed_for_good(turn, number, event.step)
    if not event.startup or turn.roster.ever_ready:
        return
    turn.set_slot(number, startup_failed=True)
    roster = turn.roster
    if all(slot.startup_failed for n, slot in roster.slots.items() if slot.starts and roster.is_coming(n)):
        message = "the user's code failed on every worker before training began."
        turn.end(3, "failed", *with_first_traceback(roster, message))


def _failed_for_good(turn: Turn, number: int, step: int) -> None:
    """A worker leaves because its code keeps raising at a step. If one of every slot has left so at the same step, as
    when one sample is bad and those who get it leave one after the other, more starts would not help."""
    turn.set_slot(number, failed_step=step)
    roster = turn.roster
    if all(roster.slots.get(n, Slot()).failed_step == step for n in roster.coming):
        message = f"the user's code failed on every worker at step {step + 1}."
        turn.end(3, "failed", *with_first_traceback(roster, message))


def _news_of(turn: Turn, number: int, traceback: str) -> str:
    """Keeps the first traceback of each slot. Returns what is new in it: nothing, if the slot's last was of the same
    type; one line, if another slot met the same error."""
    slots = turn.roster.slots
    if not traceback:
        return ""
    error = last_error(traceback)
    before = slots.get(number, Slot())
    if before.shown.partition(":")[0] == error.partition(":")[0]:
        return ""
    first = next((n for n, slot in sorted(slots.items()) if n != number and slot.shown == error), None)
    turn.set_slot(number, traceback=before.traceback or traceback, shown=error)
    if turn.roster.first_failed is None:
        turn.set(first_failed=number)
    return traceback.rstrip() if first is None else f"as on slot {first}: {error}"


def with_first_traceback(roster: Roster, message: str) -> tuple[str, str]:
    """The message of an End, and the traceback that belongs to it."""
    if roster.first_failed is None:
        return f"{message} No worker has left a traceback; see the logs.", ""
    traceback = roster.slots[roster.first_failed].traceback
    return f"{message} The first error, on slot {roster.first_failed}: {last_error(traceback)}", traceback
