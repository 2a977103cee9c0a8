"""What is done about user code that raises and about gradients that are not finite: budgets and words. Pure."""

from __future__ import annotations

from elastic_train.config import FaultConfig
from elastic_train.membership.group import NonFinite


class Failures:
    """How often in a row one worker's code has raised: at one step, and in the hook `on_step`.

    A hook that raises makes the next step fail once, and that step is committed at the second try. So hooks are
    counted from step to step, or one that always raises would never be found out.

    Args:
      limit: how many are too many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._attempts = 0
        self._hooks = 0

    @property
    def next_is_last(self) -> bool:
        """Whether the budget is spent if the attempt that is made now fails here."""
        return max(self._attempts + 1, self._hooks) >= self._limit

    def raised(self) -> None:
        """An attempt has failed here."""
        self._attempts += 1

    def committed(self) -> None:
        """An attempt was a success."""
        self._attempts = 0

    def hook(self, raised: bool) -> None:
        """`on_step` was called."""
        self._hooks = self._hooks + 1 if raised else 0


def action_message(found: NonFinite, step: int, loss: float, action: str, faults: FaultConfig) -> str:
    """One line for the display.

    Args:
      found: what was found.
      step: in which step; counted from 1.
      loss: the step's loss.
      action: "retry", "skip" or "stop".
      faults: the policy.
    """
    number = found.in_a_row
    doing = {
        "retry": f"trying the step again ({number} of {faults.max_nonfinite_retries} times)",
        "skip": f"skipping the step ({number} in a row, at most {faults.max_skipped_steps})",
        "stop": "stopping",
    }
    return f"{what(found, step, loss)}: {doing[action]}"


def what(found: NonFinite, step: int, loss: float) -> str:
    """What was found, and where."""
    if not found.members:
        return (
            f"step {step}: the sum of the gradients is not finite, or has no weight, although every shard's is finite "
            f"(loss {loss:g})"
        )
    places = [f"shard {shard} on slot {m.slot}" for m, shard in zip(found.members, found.shards, strict=True)]
    more = found.num_shards - len(places)
    also = f" and {more} more" if more else ""
    return f"step {step}: not finite is the gradient or the loss of {', '.join(places)}{also} (loss {loss:g})"


def stop_message(found: NonFinite, step: int, loss: float, faults: FaultConfig) -> str:
    """Why the job ends, and what to do."""
    tried = {
        "retry": f"It was so {found.in_a_row} times in a row, so it is no passing fault of the hardware. ",
        "skip": f"{found.in_a_row - 1} steps in a row were skipped already (faults.max_skipped_steps). ",
        "stop": "",
    }[faults.nonfinite]
    others = {
        "retry": "--set faults.nonfinite=skip leaves such steps out",
        "skip": "--set faults.max_skipped_steps=N allows more of them",
        "stop": '--set faults.nonfinite=retry tries again, "skip" leaves such steps out',
    }[faults.nonfinite]
    return (
        f"{what(found, step, loss)}. {tried}Nothing of this step was applied. Look at its samples (`ledger.jsonl` says "
        f"which come after step {step - 1}), lower the learning rate, clip gradients, or use a wider dtype; {others}."
    )
