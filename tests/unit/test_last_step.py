"""A run that stops before its `steps`, which the recipe may compute with: the same numbers, only fewer."""

from __future__ import annotations

from functools import partial

import pytest

from elastic_train import plain
from elastic_train.state import state_sha256
from elastic_train.training import Training
from recipes.digits_mlp import Digits, DigitsConfig


class Noted(Digits):
    """The learning rate falls along `steps`."""

    def __init__(self, config: DigitsConfig) -> None:
        super().__init__(config)
        self.losses: list[float] = []
        self.outside = plain.Nobody()
        self.stop_at = 0

    def on_step(self, event) -> None:
        self.losses.append(event.metrics["loss"])
        if event.step + 1 == self.stop_at:  # the next step is the last
            self.outside.stop_requested = "enough"


def trained(last_step: int = 0, stop_at: int = 0, steps: int = 12) -> tuple[Noted, str, str]:
    """The trainer, the status, the digest of the state."""
    trainer = Noted(DigitsConfig(steps=steps, width=8, batch_size=8, eval_every=4))
    trainer.stop_at = stop_at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "Training", partial(Training, last_step=last_step))
        result = plain.fit_alone(trainer, trainer.outside)
    return trainer, result.status, state_sha256(result.state)


def test_a_run_stops_after_its_last_step_with_the_state_that_it_has_there_anyway() -> None:
    whole, status, _ = trained()
    assert status == "done" and len(whole.losses) == 12
    _, _, asked = trained(stop_at=5)
    short, status, digest = trained(last_step=5)
    assert (status, digest) == ("stopped", asked)
    assert short.losses == whole.losses[:5]
    assert trained(steps=5)[2] != digest  # another schedule of learning rates


@pytest.mark.parametrize("last_step", [12, 99])
def test_no_run_goes_on_after_its_steps(last_step: int) -> None:
    trainer, status, _ = trained(last_step=last_step)
    assert status == "done" and len(trainer.losses) == 12
