"""Which versions a process runs with, found out without importing the packages."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("elastic-train", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grpcio")


def versions() -> dict[str, str]:
    """Version by name: Python's, and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # used from its source tree
            continue
    return found
