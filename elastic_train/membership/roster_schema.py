"""Who is refused because it runs something else than the others. Pure."""

from __future__ import annotations

from elastic_train.membership.roster_events import RefuseWorker, SetTimer
from elastic_train.membership.roster_state import Turn, Worker, title
from elastic_train.membership.schema import MAX_SHOWN, Schema, describe, differences, most_common


def refuse_if_different(turn: Turn, worker: Worker) -> bool:
    """Compares a worker that is ready with the members, if there are any. Returns whether it was refused."""
    member = turn.roster.first_member
    return member is not None and _refused(turn, worker, member.schema)


def refuse_minority(turn: Turn) -> None:
    """Before a group forms that nobody is a member of yet: what most of the ready say counts, and the oldest's on a
    tie."""
    ready = sorted(turn.roster.ready, key=lambda worker: worker.identity.node)
    expected = most_common([worker.schema for worker in ready])
    for worker in ready:
        _refused(turn, worker, expected)


def _refused(turn: Turn, worker: Worker, expected: Schema) -> bool:
    found = differences(expected, worker.schema)
    if not found:
        return False
    slot, incarnation, _ = worker.identity
    turn.set_worker(worker, left=True)
    text = describe(found)
    again = turn.roster.slots[slot].refused == text
    turn.set_slot(slot, refused=text)
    show = f"{title(worker.identity)} was refused{' again, as before' if again else f': {text}'}"
    about = {each.key: [each.members, each.joiner] for each in found[:MAX_SHOWN]}
    turn.note("worker_refused", show, **worker.identity._asdict(), differences=about, num_differences=len(found))
    turn.emit(RefuseWorker(worker.identity, f"it runs something else than the members: {text}"))
    turn.emit(SetTimer(f"leave/{slot}/{incarnation}", turn.roster.limits.leave_timeout_s))
    return True
