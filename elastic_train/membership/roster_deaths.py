"""What follows when a worker dies or its user's code raises: fences, restarts, budgets. Pure."""

from __future__ import annotations

from elastic_train.membership.roster_events import Abort, Exited, Failed, SetTimer, Tombstone
from elastic_train.membership.roster_state import Roster, Slot, Turn, Worker, WorkerState, nodes_of, title


def exited(turn: Turn, worker: Worker, event: Exited) -> None:
    """A process is gone: declares it dead, then plans the next start of its slot."""
    slot = worker.identity.slot
    _remember(turn, slot, event.traceback)
    turn.set_slot(slot, exit_code=event.exit_code)
    bury(turn, (worker,), event.exit_code, f"exit code {event.exit_code}")
    _restart_later(turn, slot)


def bury(turn: Turn, dead: tuple[Worker, ...], exit_code: int | None, reason: str) -> None:
    """Declares workers dead.

    All tombstones come before any abort: a member that is thrown out of a collective must find the barrier
    already without the dead.
    """
    had_members = bool(turn.roster.members)
    for worker in dead:
        turn.set_worker(worker, state=WorkerState.DEAD)
    for worker in dead:
        turn.emit(Tombstone(worker.identity))
    members = turn.roster.members
    for worker in dead:
        if members:
            turn.emit(Abort(worker.identity, nodes_of(members)))
    if any(worker.state is WorkerState.READY for worker in dead):
        turn.announce()
    for worker in dead:
        show = f"{title(worker.identity)} died at step {worker.step} ({worker.state}): {reason}"
        about = {"exit_code": exit_code, "reason": reason, "step": worker.step, "state": str(worker.state)}
        turn.note("worker_died", show, **worker.identity._asdict(), **about)
    if had_members and not members:
        # Code that ends all workers at one step must not earn forgiveness with the steps before it, for ever.
        reached = max(worker.step for worker in turn.roster.workers.values())
        turn.set(lost_step=max(turn.roster.lost_step, reached))
    if had_members and not members and not turn.roster.closing:
        show = "all members died: the state in memory is lost, and the run goes on from the start"
        turn.note("group_lost", show, epoch=turn.roster.view.epoch)


def _restart_later(turn: Turn, number: int) -> None:
    roster, limits = turn.roster, turn.roster.limits
    if roster.closing:
        return
    failures = turn.set_slot(number, failures=roster.slots[number].failures + 1).failures
    if failures > limits.max_restarts:
        _give_up(turn, number)
        return
    # The exponent is bounded before the delay is, so that a large budget cannot overflow a float.
    backoff_s = limits.first_backoff_s * 2.0 ** min(failures - 2, 64)
    delay_s = 0.0 if failures == 1 else min(backoff_s, limits.max_backoff_s)
    turn.emit(SetTimer(f"restart/{number}", delay_s))
    turn.note("restart_scheduled", slot=number, failures=failures, delay_s=delay_s)


def _give_up(turn: Turn, number: int) -> None:
    limits = turn.roster.limits
    slot = turn.set_slot(number, given_up=True)
    show = (
        f"gave up slot {number}: its worker ended {slot.failures} times in a row, last with exit code "
        f"{slot.exit_code}; {limits.max_restarts} restarts are allowed (faults.max_restarts)"
    )
    turn.note("slot_given_up", show, slot=number, failures=slot.failures, exit_code=slot.exit_code)
    left = turn.roster.coming
    if len(left) >= limits.min_workers:
        return
    codes = {n: turn.roster.slots[n].exit_code for n in range(limits.num_slots) if n not in left}
    message = (
        f"gave up: {len(left)} of {limits.num_slots} slots are left and min_workers is {limits.min_workers}. "
        + "; ".join(f"slot {n}: last exit code {code}" for n, code in codes.items())
        + f". Each was started again {limits.max_restarts} times in a row (faults.max_restarts)."
    )
    turn.end(4, "gave_up", message + first_traceback(turn.roster))


def failed(turn: Turn, event: Failed) -> None:
    """User code raised. If it did on every slot before anyone was ever ready, more starts would not help."""
    number = event.identity.slot
    where = "while starting" if event.startup else f"after step {event.step}"
    text = event.traceback if _remember(turn, number, event.traceback) else event.traceback.rstrip().rpartition("\n")[2]
    about = {"step": event.step, "fatal": event.fatal, "startup": event.startup, "traceback": event.traceback}
    show = f"{title(event.identity)}: user code raised {where}:\n{text}"
    turn.note("user_code_failed", show, **event.identity._asdict(), **about)
    if not event.startup or turn.roster.ever_ready:
        return
    turn.set_slot(number, startup_failed=True)
    if all(slot.startup_failed for slot in turn.roster.slots.values() if slot.starts):
        message = "the user's code failed on every worker before training began."
        turn.end(3, "failed", message + first_traceback(turn.roster))


def _remember(turn: Turn, number: int, traceback: str) -> bool:
    """Keeps the first traceback of each slot. Returns whether this is it."""
    if not traceback or turn.roster.slots.get(number, Slot()).traceback:
        return False
    turn.set_slot(number, traceback=traceback)
    if turn.roster.first_failed is None:
        turn.set(first_failed=number)
    return True


def first_traceback(roster: Roster) -> str:
    """The end of a message about a job that failed."""
    if roster.first_failed is None:
        return " No worker has left a traceback; see the logs."
    return f" First traceback, of slot {roster.first_failed}:\n{roster.slots[roster.first_failed].traceback}"
