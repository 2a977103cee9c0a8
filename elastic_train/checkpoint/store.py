"""Saving and loading one checkpoint with Orbax. Everything here runs in one process, on host arrays.

In a worker `save` would not work: Orbax writes host arrays only in JAX's process 0, which no worker is, and wants to
meet all of JAX's processes, most of which do not exist. So saves run in a process of their own (`writing.py`). Loading
needs nobody else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from elastic_train.checkpoint import manifest, places
from elastic_train.checkpoint.manifest import Leaf, Manifest, Position, Run
from elastic_train.checkpoint.places import Path
from elastic_train.checkpoint.snapshot import PARTS, NamedArray
from elastic_train.checkpoint.verify import Damage, describe, files_of, prove
from elastic_train.digests import sha256_of_leaf

_CHUNK = 1 << 22
_FILE_BYTES = 32 << 20
"""Larger leaves are spread over files of about this size, so that threads share their writing, reading and digests."""

_NUM_THREADS = 8

_MAX_TOLD = 5


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax warns of things that hold for every save, one line each; its errors are raised."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class NotFinite(Exception):
    """The state is not finite where the one saved before was."""


class DamagedError(Exception):
    """A checkpoint cannot be what was written. `damages` says why."""

    def __init__(self, damages: list[Damage]) -> None:
        more = f"; and {len(damages) - _MAX_TOLD} more" if len(damages) > _MAX_TOLD else ""
        super().__init__("; ".join(map(str, damages[:_MAX_TOLD])) + more)
        self.damages = damages


def save(root: Path, leaves: Sequence[NamedArray], position: Position, run: Run) -> Manifest:
    """Writes the checkpoint of one step into `root`. It is there as a whole, or not at all.

    A checkpoint of that step that is there already stays as it is.

    Raises:
      NotFinite: a leaf holds NaN, or a parameter an infinity, and was finite in the newest checkpoint.
      OSError, and what Orbax raises: it could not be written. What was written of it is gone, if that was possible.
    """
    final = places.checkpoint(root, position.step)
    with places.access(final):
        is_there = final.exists()
    if is_there:
        try:
            return places.read_manifest(final)
        except manifest.ManifestError:
            places.set_aside(final)
    owners = {_orbax_directory(leaf.keys): leaf.path for leaf in leaves}
    if len(owners) < len(leaves) or len({leaf.path for leaf in leaves}) < len(leaves):
        raise ValueError("two leaves whose names differ only in '.' and '/' would share one name on disk; rename one")
    root.mkdir(parents=True, exist_ok=True)
    before, staging = _newest_leaves(root), places.staging(root, position.step)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        describing = {leaf.path: pool.submit(_describe, leaf) for leaf in leaves}
        try:
            _write(staging, leaves)
            described = {path: future.result() for path, future in describing.items()}
            if bad := manifest.newly_broken(described, before):
                raise NotFinite(", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else ""))
            names = list(files_of(staging))
            files = pool.map(lambda name: describe(staging / name, _owner(name, owners)), names)
            about = {"leaves": described, "files": dict(zip(names, files, strict=True)), "time": time.time()}
            written = Manifest(position=position, run=run, **about)
            _write_manifest(staging, written)
            places.publish(staging, final)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            with contextlib.suppress(OSError):
                _remove_unfinished(root, staging)
            raise
    return written


def load(path: Path, told: Manifest, parts: Sequence[str] = PARTS) -> dict[str, np.ndarray]:
    """Leaves by key path, each compared with its digest. Random keys come as their key data.

    Args:
      path: of the checkpoint.
      told: its manifest.
      parts: which of `PARTS` to read.

    Raises:
      DamagedError: the checkpoint is not what was written.
      OSError: it cannot be read, and may be good.
    """
    try:
        return _load(path, told, parts)
    except DamagedError as error:
        raise DamagedError(prove(path, error.damages)) from error


def _load(path: Path, told: Manifest, parts: Sequence[str]) -> dict[str, np.ndarray]:
    wanted = {name: leaf for name, leaf in told.leaves.items() if name.partition("/")[0] in parts}
    found: dict[str, np.ndarray] = {}
    for part in parts:
        stored = {n: leaf for n, leaf in wanted.items() if n.partition("/")[0] == part and 0 not in leaf.shape}
        if stored:
            found |= _read_part(path, part, stored)
    found |= {n: np.zeros(leaf.shape, leaf.dtype) for n, leaf in wanted.items() if 0 in leaf.shape}
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        damages = [d for d in pool.map(lambda n: _compare(n, wanted[n], found.get(n)), wanted) if d is not None]
    if damages:
        raise DamagedError(damages)
    return found


def nested(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """A tree of dicts out of key paths and values."""
    tree: dict[str, Any] = {}
    for keys, value in leaves.items():
        place = tree
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
    return tree


def warm_up() -> None:
    """Does what the first save would have to do besides: imports, and starting JAX's CPU backend."""
    jax.process_index()
    ocp.PyTreeCheckpointHandler  # noqa: B018  # Orbax imports what is asked for


def clean(root: Path) -> None:
    """Removes what saves and deletions that were broken off have left. Raises OSError."""
    for path in places.left_overs(root):
        with places.access(path):
            path.rmtree()


def _remove_unfinished(root: Path, staging: Path) -> None:
    with places.access(root):
        for path in (staging, *root.glob(f"{staging.name}.orbax-checkpoint-tmp*")):
            if path.exists():
                path.rmtree()


def _describe(leaf: NamedArray) -> Leaf:
    array = leaf.array
    broken = _is_broken(array, or_infinite=leaf.keys[0] == "params")
    return Leaf(array.dtype.name, array.shape, sha256_of_leaf(leaf.path, array), broken, leaf.random_key)


def _is_broken(array: np.ndarray, or_infinite: bool) -> bool:
    # Optimizers hold infinities for good reasons (the best loss so far), parameters do not.
    if not jax.numpy.issubdtype(array.dtype, np.inexact):
        return False
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if not np.isfinite(chunk).all() if or_infinite else np.isnan(chunk).any():
            return True
    return False


def _newest_leaves(root: Path) -> dict[str, Leaf]:
    for step in reversed(places.saved_steps(root)):
        with contextlib.suppress(manifest.ManifestError):
            return places.read_manifest(places.checkpoint(root, step)).leaves
    return {}


class _Still(np.ndarray):
    """An array that nobody changes. Orbax copies all others before it writes them."""

    def __deepcopy__(self, memo: object) -> np.ndarray:
        return self


def _handler() -> ocp.PyTreeCheckpointHandler:
    # A directory for each leaf, not one database for all: so a damaged file names its leaf. Not compressed: trained
    # numbers shrink by less than a tenth, and compressing them takes longer than everything else.
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_zarr3=True, use_compression=False, multiprocessing_options=_alone()
    )


def _alone() -> ocp.options.MultiprocessingOptions:
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me}, barrier_sync_key_prefix="alone")


@_quiet()
def _write(staging: Path, leaves: Sequence[NamedArray]) -> None:
    # Orbax refuses arrays without elements; their shape and dtype, which the manifest has, say everything.
    tree = nested({leaf.keys: leaf.array.view(_Still) for leaf in leaves if leaf.array.size})
    pieces = ocp.SaveArgs(chunk_byte_size=_FILE_BYTES)
    items = {
        part: ocp.args.PyTreeSave(tree[part], jax.tree.map(lambda _: pieces, tree[part]))
        for part in PARTS
        if tree.get(part)
    }
    handlers: dict[str, Any] = {part: _handler() for part in items}
    handler = ocp.CompositeCheckpointHandler(**handlers)
    with ocp.Checkpointer(handler, multiprocessing_options=_alone()) as checkpointer:
        checkpointer.save(staging, args=ocp.args.Composite(**items))


@_quiet()
def _read_part(path: Path, part: str, stored: Mapping[str, Leaf]) -> dict[str, np.ndarray]:
    try:
        with ocp.Checkpointer(_handler(), multiprocessing_options=_alone()) as checkpointer:
            tree = checkpointer.restore(path / part)
    except Exception as error:
        if isinstance(error, OSError | MemoryError) and not isinstance(error, FileNotFoundError):
            raise  # that says nothing about what was written; errors of other kinds may not either, see `prove`
        cause: BaseException = error
        while cause.__cause__ is not None:  # Orbax hides what happened behind what it did about it
            cause = cause.__cause__
        reason = str(cause).strip().splitlines()[0][:300]
        raise DamagedError([Damage(part, "", "an Orbax checkpoint", f"{type(cause).__name__}: {reason}")]) from error
    named = {"/".join((part, *keys)): np.asarray(leaf) for keys, leaf in _flat(tree)}
    return {name: array for name, array in named.items() if name in stored}


def _flat(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict):
        for key, below in tree.items():
            yield from (((key, *keys), leaf) for keys, leaf in _flat(below))
    else:
        yield (), tree


def _compare(name: str, told: Leaf, found: np.ndarray | None) -> Damage | None:
    expected = f"{told.kind} with sha256 {told.sha256}"
    if found is None:
        return Damage("its Orbax directory", name, expected, "no such leaf")
    # Numbers come back from Orbax as Python's own or with another byte order, but never with other bits.
    digest = sha256_of_leaf(name, found.astype(told.dtype, copy=False))
    if (digest, found.shape) == (told.sha256, told.shape):
        return None
    return Damage("its Orbax directory", name, expected, f"{found.dtype.name}{list(found.shape)} with sha256 {digest}")


def _orbax_directory(keys: tuple[str, ...]) -> str:
    return f"{keys[0]}/{'.'.join(keys[1:])}"


def _owner(name: str, owners: Mapping[str, str]) -> str:
    """The leaf whose directory holds the file `name`; empty if none does."""
    directory = name
    while directory:
        directory = directory.rpartition("/")[0]
        if directory in owners:
            return owners[directory]
    return ""


def _write_manifest(staging: Path, written: Manifest) -> None:
    with (staging / manifest.NAME).open("wb") as file:
        file.write(manifest.dump(written).encode("utf-8"))
        file.flush()
        if not places.is_remote(staging):
            os.fsync(file.fileno())
