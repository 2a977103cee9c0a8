"""The memory in which a worker that lost the coordinator leaves its state for the next worker of its slot.

The agent makes it, so that it outlives the worker and ends with the agent; it has no name that could be left behind. A
header says where a JSON object lies that describes the rest; it is written last. Imports nothing slow: the agent reads
the description, and must not import jax.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

HEADER_BYTES = 64
"""Where the state begins. In front: offset and length of the description, or zeros."""

_HEADER = struct.Struct("<QQ")


def create(slot: int) -> int:
    """Empty memory, as a file descriptor."""
    return os.memfd_create(f"state-of-slot-{slot}")


def discard(descriptor: int) -> None:
    """Gives the memory back to the system; the descriptor stays."""
    os.ftruncate(descriptor, 0)


def describe(descriptor: int, offset: int, description: dict[str, Any]) -> None:
    """Makes what lies before `offset` count."""
    text = json.dumps(description).encode()
    _write(descriptor, text, offset)
    _write(descriptor, _HEADER.pack(offset, len(text)), 0)


def description(descriptor: int) -> dict[str, Any] | None:
    """What `describe` was given; None if no state is there."""
    header = os.pread(descriptor, _HEADER.size, 0)
    if len(header) < _HEADER.size:
        return None
    offset, length = _HEADER.unpack(header)
    return json.loads(os.pread(descriptor, length, offset)) if length else None


def _write(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
