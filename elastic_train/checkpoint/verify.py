"""Whether a checkpoint is, byte for byte, what was written. Needs neither JAX nor Orbax."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from elastic_train.checkpoint import manifest, places
from elastic_train.checkpoint.manifest import File, Manifest, ManifestError
from elastic_train.checkpoint.places import Path

_CHUNK_BYTES = 4 << 20
_NUM_THREADS = 8


class Damage(NamedTuple):
    """One thing that is not as it was written. `leaf` is empty if the file belongs to no single one."""

    file: str
    leaf: str
    expected: str
    found: str

    def __str__(self) -> str:
        leaf = f" (leaf {self.leaf})" if self.leaf else ""
        return f"{self.file}{leaf}: expected {self.expected}, found {self.found}"


def find_damage(path: Path) -> tuple[Manifest | None, list[Damage]]:
    """Reads every file of the checkpoint at `path`; its manifest, if that is good, and what is wrong.

    Raises OSError if a file is there and cannot be read: that says nothing about its content.
    """
    try:
        told = places.read_manifest(path)
    except ManifestError as error:
        return None, [of_manifest(error)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = pool.map(lambda item: _compare(path, *item), told.files.items())
        return told, [damage for damage in found if damage is not None]


def of_manifest(error: ManifestError) -> Damage:
    """What is wrong with a manifest that could not be read."""
    return Damage(manifest.NAME, "", "a whole manifest", str(error))


def prove(path: Path, signs: list[Damage]) -> list[Damage]:
    """What is wrong with the checkpoint at `path`, in which somebody has found `signs` of damage: its files that are
    not as they were written, or else `signs`.

    Raises:
      OSError: a file cannot be read. Also if in an object store all files are good: then the signs are those of a
        store that did not answer for a while, which raises what damage raises.
    """
    if damages := find_damage(path)[1]:
        return damages
    if places.is_remote(path):
        raise places.PlaceError(f"{path} was read with errors, but all its files are as they were written: {signs[0]}")
    return signs


def _compare(path: Path, name: str, told: File) -> Damage | None:
    expected = f"{told.num_bytes} bytes with sha256 {told.sha256}"
    try:
        found = describe(path / name)
    except (FileNotFoundError, NotADirectoryError):
        return Damage(name, told.leaf, expected, "no such file")
    if (found.num_bytes, found.sha256) == (told.num_bytes, told.sha256):
        return None
    return Damage(name, told.leaf, expected, f"{found.num_bytes} bytes with sha256 {found.sha256}")


def describe(path: Path, leaf: str = "") -> File:
    """Size and digest of a file. Raises OSError."""
    digest, num_bytes = hashlib.sha256(), 0
    with places.access(path), path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return File(num_bytes, digest.hexdigest(), leaf)


def files_of(path: Path) -> Iterator[str]:
    """All files below `path`, relative to it, without the manifest; in ascending order."""
    for entry in sorted(path.iterdir()):
        if entry.is_dir():
            yield from (f"{entry.name}/{name}" for name in files_of(entry))
        elif entry.name != manifest.NAME:
            yield entry.name
