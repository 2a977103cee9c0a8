"""Whose turn it is: whether faults that wait may strike now. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elastic_train.chaos.faults import Fault
from elastic_train.chaos.schedule import Planned, num_taken

MAJORITY = 3
"""So many members can tell which of them holds another state than the others."""


def may_begin(
    planned: Planned, members: Collection[int], workers: int, max_down: int, num_pending: int, is_settled: bool
) -> bool:
    """Whether faults that wait may strike now.

    Args:
      planned: the faults.
      members: slots that have a member.
      workers: slots of the job.
      max_down: how many slots may be without a member at once. 0: every slot must have one, and one member stays,
        whatever orders are left that wait for others (a donor's death waits for a joiner, who comes after a death).
      num_pending: members that will be lost to orders that nobody has carried out yet.
      is_settled: all workers that were struck and are to go have gone.
    """
    if any(fault.kind == "flip" for fault in planned.faults) and len(members) - num_pending < MAJORITY:
        return False  # nobody could say who is right, and one alone would not even be asked
    missing, taken = workers - len(members), num_pending + num_taken(planned.faults)
    if max_down == 0:
        return is_settled and missing == 0 and taken < workers
    return is_settled and missing + taken <= max_down


def is_spaced(pending: Iterable[Fault], struck_at: int, step: int) -> bool:
    """Whether a patient fault that is given out now strikes in a step of its own.

    Two faults in one step may be one to everybody else: a worker that has raised still takes part in the exchange, and
    if it is killed there, nobody hears that it had raised.

    Args:
      pending: faults that were given out and that nobody has carried out yet. Those that wait for the members to change
        hold up nobody: perhaps it is the next fault that changes them.
      struck_at: completed steps at the newest strike, -1 before the first.
      step: completed steps.
    """
    return step > struck_at and all(fault.awaits_change for fault in pending)
