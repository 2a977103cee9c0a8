"""One worker's way: started, ready, taking steps, and asked to leave or killed. Pure.

`roster_agents` starts it, `roster_deaths` has what follows when it is gone.
"""

from __future__ import annotations

from elastic_train.membership import roster_generations as generations
from elastic_train.membership.roster_events import AskLeave, DrainAsked, Hello, Kill, Ready, SetTimer, Started, Stepped
from elastic_train.membership.roster_schema import refuse_if_different
from elastic_train.membership.roster_state import Roster, Turn, Worker, WorkerState, title


def started(turn: Turn, worker: Worker, event: Started) -> None:
    """May come after the worker's own hello: agent and worker have separate streams."""
    slot, incarnation, _ = worker.identity
    turn.set_worker(worker, pid=event.pid)
    turn.note("worker_started", pid=event.pid, warm=event.warm, **worker.identity._asdict())
    if worker.state in (WorkerState.STARTING, WorkerState.WARMING):
        turn.emit(SetTimer(f"start/{slot}/{incarnation}", turn.roster.limits.faults.start_timeout_s))


def hello(turn: Turn, worker: Worker, event: Hello) -> None:
    """Its process has connected, and begins to prepare."""
    state = WorkerState.WARMING if worker.state is WorkerState.STARTING else worker.state
    turn.set_worker(worker, state=state, pid=event.pid, host=event.host)
    turn.note("worker_warming", pid=event.pid, host=event.host, **worker.identity._asdict())


def ready(turn: Turn, worker: Worker, event: Ready) -> None:
    """It could join: the members are told, unless it runs something else than they."""
    if worker.state not in (WorkerState.STARTING, WorkerState.WARMING):
        return
    turn.set_worker(worker, state=WorkerState.READY, schema=event.schema)
    turn.set(ever_ready=True)
    turn.note("worker_ready", start_s=dict(event.start_s), **worker.identity._asdict())
    if not refuse_if_different(turn, turn.roster.workers[worker.identity.slot]) and not turn.roster.closing:
        turn.announce()


def stepped(turn: Turn, worker: Worker, event: Stepped) -> None:
    """A worker that takes enough steps is forgiven its slot's failures."""
    first_step = worker.first_step
    if first_step is None and event.step > turn.roster.lost_step:
        first_step = event.step
    turn.set_worker(worker, step=event.step, first_step=first_step)
    slot = worker.identity.slot
    has_earned = first_step is not None and event.step - first_step + 1 >= turn.roster.limits.faults.forgive_after_steps
    if has_earned and turn.roster.slots[slot].failures:
        turn.set_slot(slot, failures=0)
    generations.renew_now(turn)


def kill(turn: Turn, worker: Worker, reason: str, kind: str = "stopped") -> None:
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


def too_long(turn: Turn, kind: str, slot: int, incarnation: int) -> None:
    """Kills a worker that was not ready in time (`start`), or has not exited in time (`leave`), if that is still so."""
    worker = turn.roster.workers.get(slot)
    if worker is None or worker.identity.incarnation != incarnation or not worker.living:
        return
    limits = turn.roster.limits
    if kind == "leave" and worker.left:
        said = "was refused" if worker.state is WorkerState.READY else "left the group"
        kill(turn, worker, f"slot {slot} {said} {limits.leave_timeout_s:g} s ago and has not exited")
    if kind == "start" and worker.state in (WorkerState.STARTING, WorkerState.WARMING):
        timeout_s = limits.faults.start_timeout_s
        kill(
            turn,
            worker,
            f"slot {slot} was not ready {timeout_s:g} s after its start (faults.start_timeout_s)",
            "stuck",
        )


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


def drain_asked(turn: Turn, event: DrainAsked) -> None:
    """Nobody takes the slot any more; its worker leaves after a commit, or at once if it is no member."""
    slot = event.slot
    turn.set_slot(slot, drained=True)
    turn.note("drain_asked", f"slot {slot} leaves for good ({event.reason})", slot=slot, reason=event.reason)
    worker = turn.roster.workers.get(slot)
    if worker is None or not worker.living:
        return
    if worker.member:
        turn.emit(AskLeave(worker.identity))
    else:
        kill(turn, worker, f"slot {slot} was drained")
