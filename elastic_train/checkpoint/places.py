"""Names in a checkpoint directory, local or remote.

`STEP` is a checkpoint. `STEP.partial-…` is one that is being written, `STEP.deleted-…` one that is being deleted, and
`STEP.damaged-N` one that was found damaged and is kept for people to look at.

Locally a checkpoint appears by a rename. Where directories cannot be renamed in one moment (object stores), it is
written in its place, and exists from the moment when its manifest does.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

from etils import epath

from elastic_train.checkpoint import manifest
from elastic_train.checkpoint.manifest import Manifest, ManifestError

Path = epath.Path
"""A path on a local disk, or `gs://BUCKET/…`."""

_STEP = re.compile(r"\d+")
_LEFT_OVER = re.compile(r"\d+\.(partial|deleted)-.*")


def is_remote(path: Path) -> bool:
    """Whether a directory there cannot be renamed in one moment."""
    return "://" in str(path)


def saved_steps(root: Path) -> list[int]:
    """Steps of all checkpoints in `root`, in ascending order, whatever state they are in."""
    return sorted(int(path.name) for path in _entries(root) if _STEP.fullmatch(path.name))


def left_overs(root: Path) -> list[Path]:
    """What saves and deletions that were broken off have left."""
    return [path for path in _entries(root) if _LEFT_OVER.fullmatch(path.name)]


def damaged(root: Path) -> list[Path]:
    """Checkpoints that were set aside."""
    return sorted(path for path in _entries(root) if re.fullmatch(r"\d+\.damaged-\d+", path.name))


def _entries(root: Path) -> Iterator[Path]:
    if root.exists():
        yield from root.iterdir()


def checkpoint(root: Path, step: int) -> Path:
    """Where the checkpoint of this step is."""
    return root / str(step)


def staging(root: Path, step: int) -> Path:
    """Where a checkpoint of this step is written."""
    final = checkpoint(root, step)
    return final if is_remote(root) else root / f"{step}.partial-{uuid.uuid4().hex[:8]}"


def publish(written: Path, final: Path) -> None:
    """Makes a checkpoint whose manifest is there already appear in its place."""
    if written != final:
        written.rename(final)


def delete(root: Path, step: int) -> None:
    """Deletes a checkpoint. One that is broken off in between is none any more."""
    path = checkpoint(root, step)
    if is_remote(root):
        (path / manifest.NAME).unlink()
    else:
        path = path.rename(root / f"{step}.deleted-{uuid.uuid4().hex[:8]}")
    path.rmtree()


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint; returns its new place."""
    number = 1
    while (aside := path.parent / f"{path.name}.damaged-{number}").exists():
        number += 1
    path.rename(aside)
    return aside


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises ManifestError if there is no good one."""
    try:
        # As bytes: reading as text would turn some bytes into others.
        return manifest.parse((path / manifest.NAME).read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise ManifestError("it is missing: the save was not finished, or the file was deleted") from None
    except UnicodeDecodeError as error:
        raise ManifestError(f"it is not text: {error}") from error
