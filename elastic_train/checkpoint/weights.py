"""A model's weights out of a checkpoint, for a script that trains nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from elastic_train.checkpoint import places, store
from elastic_train.checkpoint.manifest import Manifest, ManifestError
from elastic_train.checkpoint.show import path_of
from elastic_train.errors import UsageError

if TYPE_CHECKING:
    from flax import nnx

ModelType = TypeVar("ModelType", bound="nnx.Module")


def load_params(run_dir: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """The parameters that a run has saved: a nested dict of NumPy arrays, by the names along the model's attributes.

    Optimizer state is not read. Every array is compared with its digest.

    Args:
      run_dir: the run directory.
      step: of which checkpoint; by default the newest.

    Raises:
      UsageError: there is no such checkpoint, it is damaged, or it cannot be read.

    Example:
      >>> params = et.load_params("runs/digits")  # doctest: +SKIP
      >>> params["hidden"]["kernel"].shape  # doctest: +SKIP
      (64, 128)
    """
    _, leaves = _read(run_dir, step, ("params",))
    return store.nested({tuple(path.split("/")[1:]): leaf for path, leaf in leaves.items()})


def load_model(run_dir: str | os.PathLike[str], model: ModelType, step: int | None = None) -> ModelType:
    """Fills a Flax model with saved parameters and statistics, and puts it into evaluation mode.

    Args:
      run_dir: the run directory.
      model: one of the class and sizes that were trained; it is changed, and returned.
      step: of which checkpoint; by default the newest.

    Raises:
      UsageError: there is no such checkpoint, it is damaged or cannot be read, or it is one of another model.

    Example:
      >>> model = et.load_model("runs/digits", MLP(64, 128, 10, rngs=nnx.Rngs(0)))  # doctest: +SKIP
      >>> model(images)  # doctest: +SKIP
    """
    import jax
    from flax import nnx

    from elastic_train.checkpoint.manifest import other_leaves
    from elastic_train.checkpoint.snapshot import leaf_kinds, with_values

    parts = ("params", "model_state")
    manifest, leaves = _read(run_dir, step, parts)
    _, params, streams, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)
    wanted = {"params": nnx.to_pure_dict(params), "model_state": nnx.to_pure_dict(rest)}
    saved = {path: leaf for path, leaf in manifest.leaves.items() if path in leaves}
    if lines := other_leaves(saved, leaf_kinds(wanted)):
        shown = "\n".join(f"  {line}" for line in lines[:20])
        raise UsageError(f"the checkpoint of step {manifest.step} in {run_dir} is one of another model:\n{shown}")

    filled = with_values(wanted, leaves, jax.numpy.asarray)
    nnx.replace_by_pure_dict(params, filled["params"])
    nnx.replace_by_pure_dict(rest, filled["model_state"])
    nnx.update(model, params, streams, rest)
    model.eval()
    return model


def export_safetensors(run_dir: Path, file: Path, step: int | None = None) -> int:
    """Writes the parameters to a safetensors file, under their key paths joined by dots. Returns the step.

    Raises UsageError as `load_params`, or if the package safetensors is missing.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise UsageError("this needs the package safetensors: pip install 'elastic-train[safetensors]'") from None
    manifest, leaves = _read(run_dir, step, ("params",))
    tensors = {".".join(path.split("/")[1:]): np.ascontiguousarray(leaf) for path, leaf in leaves.items()}
    about = {"step": str(manifest.step), "trainer": manifest.run.trainer, "config_digest": manifest.run.config_digest}
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save_file(tensors, temporary, metadata=about)
        temporary.rename(file)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return manifest.step


def _read(
    run_dir: str | os.PathLike[str], step: int | None, parts: tuple[str, ...]
) -> tuple[Manifest, dict[str, np.ndarray]]:
    path = path_of(Path(run_dir), step)
    try:
        with places.refuse_unreadable(path.parent):
            manifest = places.read_manifest(path)
            return manifest, store.load(path, manifest, parts)
    except (ManifestError, store.DamagedError) as error:
        raise UsageError(
            f"the checkpoint {path} is damaged: {error}. `elastic-train checkpoint ls` shows the others"
        ) from error
