"""Another recipe, which waits for its turn every few steps. What is measured is a job like any other.

`step_time.py` says in the environment which recipe, where the turns are told, and how many steps a turn has.
"""

import os
from pathlib import Path
from typing import Any

from turns import END, Turn, Turns, memory

import elastic_train as et
from elastic_train.launch.recipe import load_recipe

NAME, BLOCK = os.environ["TURNS_NAME"], int(os.environ["TURNS_BLOCK"])
RECIPE: Any = load_recipe(os.environ["TURNS_RECIPE"])


class InTurns(RECIPE):
    """The recipe, in turns: the first one after step 1."""

    _turns: Turns | None = None
    _turn: Turn | None = None

    def on_step(self, event: et.StepCommitted) -> None:
        super().on_step(event)
        if (event.step - 1) % BLOCK or (self._turn is not None and self._turn.name == END):
            return
        if self._turns is None:
            self._turns = Turns(Path(os.environ["TURNS_DIR"]), int(os.environ["ELASTIC_TRAIN_SLOT"]))
        if self._turn is not None:
            self._turns.done(self._turn, memory())
        self._turn = self._turns.wait(NAME)
