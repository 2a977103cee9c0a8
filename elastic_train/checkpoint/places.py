"""Names in a checkpoint directory, local or remote.

`STEP` is a checkpoint. `STEP.partial-…` is one that is being written, `STEP.deleted-…` one that is being deleted, and
`STEP.damaged-N` one that was found damaged and is kept for people to look at.

Locally a checkpoint appears by a rename. Where directories cannot be renamed in one moment (object stores), it is
written in its place, and exists from the moment when its manifest does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import uuid
from collections.abc import Iterator

from etils import epath

from elastic_train.checkpoint import manifest
from elastic_train.checkpoint.manifest import Manifest, ManifestError
from elastic_train.errors import UsageError

Path = epath.Path
"""A path on a local disk, or `gs://BUCKET/…`."""

_STEP = re.compile(r"\d+")
_LEFT_OVER = re.compile(r"\d+\.(partial|deleted)-.*")


class PlaceError(OSError):
    """What the client of an object store raised, in words. It says nothing about what was written there."""


class ClientMissing(PlaceError):
    """The package that is the client of an object store is not installed."""


def is_remote(path: Path) -> bool:
    """Whether a directory there cannot be renamed in one moment."""
    return "://" in str(path)


@contextlib.contextmanager
def access(path: Path) -> Iterator[None]:
    """To be put around all that touches `path` and does nothing else: what fails in it raises OSError.

    On a disk it does so by itself, and whatever else is raised is a mistake in this program. Clients of object stores
    have errors of their own, which have no base in common (gcsfs, aiohttp and google.auth derive theirs from Exception,
    TensorStore raises ValueError): these come as PlaceError.
    """
    if is_remote(path):
        _keep_quiet()
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if not is_remote(path):
            raise
        if isinstance(error, ImportError):
            fix = "pip install 'elastic-train[gcs]'"
            raise ClientMissing(f"{path} needs a package that is missing: {error}. {fix}") from error
        raise PlaceError(f"{type(error).__name__}: {error}") from error


@functools.cache
def _keep_quiet() -> None:
    """gcsfs logs every error that it raises, with its traceback; where nobody has set up logging, Python prints it."""
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())


@contextlib.contextmanager
def refuse_unreadable(root: Path) -> Iterator[None]:
    """Around whatever cannot go on if the checkpoints in `root` cannot be read: raises UsageError then, not OSError."""
    try:
        yield
    except ClientMissing as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(
            f"the checkpoints in {root} cannot be read: {in_words(error)}. "
            "Nothing was changed; see to it, and try again"
        ) from error


def require_client(root: Path) -> None:
    """Raises UsageError if `root` is in an object store whose client is not installed here. Asks no store."""
    with refuse_unreadable(root), access(root):
        if is_remote(root):
            import fsspec  # late, as below

            fsspec.get_filesystem_class(str(root).partition("://")[0])


def in_words(error: Exception) -> str:
    """An error as it is told to a person."""
    return str(error) if isinstance(error, PlaceError) else f"{type(error).__name__}: {error}"


def saved_steps(root: Path) -> list[int]:
    """Steps of all checkpoints in `root`, in ascending order, whatever state they are in. Raises OSError."""
    return sorted(int(path.name) for path in _entries(root) if _STEP.fullmatch(path.name))


def left_overs(root: Path) -> list[Path]:
    """What saves and deletions that were broken off have left. Raises OSError."""
    return [path for path in _entries(root) if _LEFT_OVER.fullmatch(path.name)]


def damaged(root: Path) -> list[Path]:
    """Checkpoints that were set aside. Raises OSError."""
    return sorted(path for path in _entries(root) if re.fullmatch(r"\d+\.damaged-\d+", path.name))


def _entries(root: Path) -> list[Path]:
    with access(root):
        if not is_remote(root):
            return list(root.iterdir()) if root.exists() else []
        import fsspec  # late: nothing else needs it

        store, name = fsspec.url_to_fs(str(root))
        try:
            # Anew: the client keeps what it has listed for ever, and other processes write here, too.
            names = store.ls(name, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return [root / name.rstrip("/").rpartition("/")[2] for name in names]


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
    """Deletes a checkpoint. One that is broken off in between is none any more. Raises OSError."""
    path = checkpoint(root, step)
    with access(path):
        if is_remote(root):
            (path / manifest.NAME).unlink(missing_ok=True)  # a deletion that was broken off is gone on with
        else:
            path = path.rename(root / f"{step}.deleted-{uuid.uuid4().hex[:8]}")
        path.rmtree()


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint; returns its new place. Raises OSError."""
    number = 1
    with access(path):
        while (aside := path.parent / f"{path.name}.damaged-{number}").exists():
            number += 1
        path.rename(aside)
    return aside


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises ManifestError if there is no good one, OSError if it cannot be
    read."""
    try:
        with access(path):
            content = (path / manifest.NAME).read_bytes()
        # As bytes: reading as text would turn some bytes into others.
        return manifest.parse(content.decode("utf-8"))
    except FileNotFoundError:
        raise ManifestError("it is missing: the save was not finished, or the file was deleted") from None
    except UnicodeDecodeError as error:
        raise ManifestError(f"it is not text: {error}") from error
