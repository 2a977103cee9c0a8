"""What an agent and a process that it has started say to each other on the private pair of sockets between them.

See `spares` for the agent's end and `spare` for the process's.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

IMPORTED, TAKEN, REFUSED, READY = "imported", "taken", "refused", "ready"
"""What a process says: a spare, that it can be used; what it answers when it is; a worker, that it could join."""

OUTPUT = "output"
"""The name under which a spare is given the log of the worker that it becomes."""

MAX_MESSAGE_BYTES = 1 << 17
"""The settings of one worker have some thousand."""


def channel() -> tuple[socket.socket, socket.socket]:
    """The agent's end, and the process's. Each message arrives as a whole."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends one message, with open files. Raises OSError if the other end is closed."""
    socket.send_fds(end, [json.dumps(message).encode()], list(descriptors))


def receive(end: socket.socket, max_descriptors: int = 0) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message, and the files that came with it; no message if the other end is closed."""
    data, descriptors, _, _ = socket.recv_fds(end, MAX_MESSAGE_BYTES, max_descriptors)
    return (json.loads(data) if data else None), descriptors
