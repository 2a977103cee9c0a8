"""The state out of the newest good checkpoint, for a model that must be the one that was saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from elastic_train.checkpoint import places, store
from elastic_train.checkpoint.choose import set_aside
from elastic_train.checkpoint.manifest import Manifest, ManifestError, refuse_others
from elastic_train.checkpoint.places import Path
from elastic_train.checkpoint.snapshot import leaf_kinds, with_values
from elastic_train.checkpoint.verify import of_manifest, prove
from elastic_train.state import Device, TrainState


class Loaded(NamedTuple):
    """A state, and what its checkpoint says besides."""

    state: TrainState
    manifest: Manifest
    path: Path


def load_newest(root: Path, like: TrainState, device: Device, note: Callable[[str], None]) -> Loaded | None:
    """Loads the newest good checkpoint in `root`; None if there is none. Damaged ones are set aside.

    Args:
      root: the checkpoint directory; it need not exist.
      like: a state with the shapes and dtypes that are wanted.
      device: where to.
      note: told in words what was set aside, and why.

    Raises:
      UsageError: the checkpoint is that of another model.
      OSError: a checkpoint cannot be read. It may be good: nothing older is used in its place.
    """
    for step in reversed(places.saved_steps(root)):
        path = places.checkpoint(root, step)
        try:
            manifest = places.read_manifest(path)
            refuse_others(path, manifest, leaf_kinds(like.arrays))
            found = store.load(path, manifest)
        except ManifestError as error:
            set_aside(path, prove(path, [of_manifest(error)]), note)
        except store.DamagedError as error:
            set_aside(path, error.damages, note)
        else:
            with jax.default_device(device):
                # Copies: on the CPU an array may otherwise share NumPy's memory, which would be donated with it.
                arrays = with_values(
                    like.arrays, found, lambda array: jax.device_put(jnp.array(array, copy=True), device)
                )
            state = TrainState(manifest.step, manifest.position.samples, **arrays)
            return Loaded(state, manifest, path)
    return None
