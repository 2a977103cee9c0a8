"""Cancelling gloo collectives on CPU, which XLA cannot do: by shutting down the sockets of a clique.

A gloo clique connects its members by TCP while its first collective runs. The sockets that appear in that
time are remembered together with the clique's node ids. When a node dies, the sockets of every clique that
contains it are shut down, so every survivor's collective fails at once. No other socket is touched: neither
those of cliques without the dead node, which may be used again, nor the user's.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Address = Sequence[Any]
"""(host, port, ...), as sockets give it."""


class GlooSockets:
    """The sockets of this process's gloo cliques, by the node ids of the clique's members.

    Args:
      keep: tells for a (local, remote) pair of addresses whether the socket is known to be something else
        (control plane, coordination service).
    """

    def __init__(self, keep: Callable[[Address, Address], bool]) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._cliques: dict[tuple[int, ...], set[str]] = {}
        self._forming: tuple[tuple[int, ...], set[str]] | None = None

    @contextmanager
    def forming(self, nodes: tuple[int, ...]) -> Iterator[None]:
        """Sockets that appear inside this block belong to the clique of `nodes`."""
        with self._lock:
            self._forming = (nodes, set(_open_sockets()))
        try:
            yield
        finally:
            with self._lock:
                self._cliques.setdefault(nodes, set()).update(self._appeared())
                self._forming = None

    @property
    def is_forming(self) -> bool:
        """Whether a clique is being formed now."""
        return self._forming is not None

    def abort(self, node: int) -> int:
        """Shuts down the sockets of every clique that contains `node`, one being formed included.

        Returns how many were shut down. Any thread may call it.
        """
        with self._lock:
            doomed: set[str] = set()
            for nodes in [nodes for nodes in self._cliques if node in nodes]:
                doomed |= self._cliques.pop(nodes)
            if self._forming is not None and node in self._forming[0]:
                doomed |= self._appeared()
            return sum(self._shut_down(fd, name) for name, fd in _open_sockets().items() if name in doomed)

    def _appeared(self) -> set[str]:
        assert self._forming is not None
        return set(_open_sockets()) - self._forming[1]

    def _shut_down(self, fd: int, name: str) -> bool:
        try:
            duplicate = os.dup(fd)
        except OSError:
            return False  # gloo closed it meanwhile
        with socket.socket(fileno=duplicate) as held:
            try:
                # The number may have been given to another socket since it was looked up; the duplicate cannot.
                if os.readlink(f"/proc/self/fd/{duplicate}") != name:
                    return False
                if held.family not in (socket.AF_INET, socket.AF_INET6):
                    return False
                if self._keep(held.getsockname(), held.getpeername()):
                    return False
                held.shutdown(socket.SHUT_RDWR)
            except OSError:
                return False  # not connected, or closed meanwhile
        return True


def _open_sockets() -> dict[str, int]:
    """This process's sockets: the kernel's name ("socket:[inode]") and the descriptor."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # closed while we looked
        if name.startswith("socket:"):
            found[name] = int(entry)
    return found
