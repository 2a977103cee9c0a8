"""The digest of one array, as runs are compared by it. Pure."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import numpy as np


class Hash(Protocol):
    """An object of `hashlib`."""

    def update(self, data: Any, /) -> None: ...


def add_leaf(digest: Hash, path: str, array: np.ndarray) -> None:
    """Adds key path, zero byte, dtype, zero byte, shape, zero byte, little-endian C-order bytes."""
    shape = ",".join(str(size) for size in array.shape)
    digest.update(f"{path}\0{array.dtype.name}\0{shape}\0".encode())
    flat = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1)
    digest.update(flat.view(np.uint8))  # not `tobytes`: a copy, made while the interpreter's lock is held


def sha256_of_leaf(path: str, array: np.ndarray) -> str:
    """SHA-256, in hexadecimal, of a single leaf."""
    digest = hashlib.sha256()
    add_leaf(digest, path, array)
    return digest.hexdigest()
