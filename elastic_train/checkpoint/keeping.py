"""A training's checkpoints: what one member loads, and what it saves as training goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from elastic_train.checkpoint import places
from elastic_train.checkpoint.manifest import ManifestError, Position, Run, refuse_others
from elastic_train.checkpoint.saves import Saves
from elastic_train.checkpoint.snapshot import leaf_kinds
from elastic_train.config_files import config_digest, to_values
from elastic_train.errors import UsageError
from elastic_train.launch.versions import versions
from elastic_train.membership.live import Group
from elastic_train.state import TrainState

if TYPE_CHECKING:
    from elastic_train.outside import Outside
    from elastic_train.recipe import Recipe


class Keeping:
    """Ties `Saves` and `load_newest` to one member's training.

    Args:
      recipe: the trainer, made ready.
      group: the members.
      outside: told of what is saved, loaded or damaged.
      directory: the checkpoint directory; None for a run that leaves no trace.
    """

    def __init__(self, recipe: Recipe, group: Group, outside: Outside, directory: str | None) -> None:
        self._recipe, self._group, self._outside = recipe, group, outside
        self._root = None if directory is None else places.Path(directory)
        self._metrics: dict[str, float] = {}
        self._saves: Saves | None = None
        if self._root is not None:
            config = recipe.config
            run = Run(
                trainer=type(recipe.trainer).__name__,
                config=to_values(config),
                config_digest=config_digest(config),
                versions=versions(),
            )
            self._saves = Saves(self._root, config.checkpoint, run, config.steps, config.faults.save_timeout_s, outside)

    def refuse_other(self) -> None:
        """Raises UsageError if the newest checkpoint is one of another model, its data were others, or it cannot be
        read."""
        if self._root is None or not self._outside.has_checkpoints:
            return
        try:
            with places.refuse_unreadable(self._root):
                steps = places.saved_steps(self._root)
                if not steps:
                    return
                path = places.checkpoint(self._root, steps[-1])
                manifest = places.read_manifest(path)
        except ManifestError:
            return  # whoever loads it sees to that
        refuse_others(path, manifest, leaf_kinds(self._recipe.local.initial.arrays))
        pass_size, now = manifest.position.pass_size, self._recipe.batches.sampler.num_samples
        if pass_size != now:
            raise UsageError(
                f"the checkpoint {path} was saved while a pass over the training data had {pass_size} samples; now it "
                f"has {now}. Its position in the data means nothing then. Use the same data, or give another --run-dir "
                "to begin anew."
            )

    def warm_up(self, state: TrainState) -> None:
        """Starts what the first save needs, in the background; `state` is of the shapes to be saved."""
        if self._saves is not None:
            self._saves.warm_up(state)

    def load(self, like: TrainState) -> TrainState | None:
        """The state of the newest good checkpoint; None if there is none. Raises as `refuse_other`.

        `like` is a state with the shapes and dtypes that are wanted.
        """
        if self._root is None or not self._outside.has_checkpoints:
            return None
        from elastic_train.checkpoint.load import load_newest  # Orbax takes half a second to import

        started = time.monotonic()
        self.refuse_other()
        with places.refuse_unreadable(self._root):
            found = load_newest(self._root, like, self._recipe.device, self._outside.set_aside)
        if found is None:
            self._outside.loaded(0, 0, "", time.monotonic() - started)
            return None
        self._metrics = found.manifest.position.metrics
        self._outside.loaded(found.state.step, found.state.samples, str(found.path), time.monotonic() - started)
        return found.state

    def begun(self, step: int) -> dict[str, float]:
        """All members begin with the state of `step`: a checkpoint's, or the seed's if it is 0. Returns the newest
        metrics, as far as this member knows them."""
        if self._saves is not None:
            self._saves.begin(step)
        return dict(self._metrics) if step else {}

    def wants(self) -> bool:
        """Whether this member, the first, asks for a save after the coming step."""
        return self._saves is not None and self._saves.wants()

    def committed(self, state: TrainState, asked: bool, metrics: dict[str, float]) -> None:
        """A step counts: it is saved if that is due, in the background."""
        if self._saves is None:
            return
        if self._group.is_first:
            self.warm_up(state)
        self._saves.committed(state, asked, self._group.is_first, lambda: self._position(state, metrics))

    def before_update(self) -> None:
        """Call it before the newest state is donated."""
        if self._saves is not None:
            self._saves.before_update()

    def last(self, state: TrainState, metrics: dict[str, float]) -> None:
        """Training has ended with `state`: returns when that is saved, by whoever does it."""
        if self._saves is not None:
            before_me = frozenset(self._group.view.nodes[: self._group.rank])
            self._saves.last(state, self._position(state, metrics), before_me)

    def close(self) -> None:
        """Ends what runs in the background."""
        if self._saves is not None:
            self._saves.close()

    def _position(self, state: TrainState, metrics: dict[str, float]) -> Position:
        return Position(
            step=state.step,
            samples=state.samples,
            pass_size=self._recipe.batches.sampler.num_samples,
            epoch=self._group.view.epoch,
            generation=self._outside.generation,
            workers=tuple(sorted(member.slot for member in self._group.view.members)),
            metrics=metrics,
            records=tuple(self._outside.pending_records()),
        )
