"""JAX's coordination service, held by a process that is no worker and never imports `jax`.

The private names it needs are in `jax_private.py`; the key names of XLA's topology exchange, which are no names of
JAX, are here and in `topology.py`. Tried with jaxlib 0.10.2, 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_train import jax_private
from elastic_train.coordinator import topology
from elastic_train.errors import UsageError

PLATFORMS: dict[str, Callable[[int, int, int], int]] = {
    "cpu": topology.cpu_device_id,
    "cuda": topology.gpu_device_id,
}
"""Platforms whose topology we publish, with their numbering of global devices."""

LEAVE_TOGETHER = 16
"""How many of our own clients leave JAX's service at the same time. One after the other each waits for an answer: a
thousand took four times as long. Many more would only wait for each other."""

REGISTER_TIMEOUT_S = 60
TOMBSTONE_TIMEOUT_S = 10
FIRST_POLL_S = 0.02
LATER_POLL_S = 0.25


class JaxService:
    """The service, our own client of it (node 0, without devices), and what is done in dead nodes' names.

    The service waits once for all node ids to register; afterwards ids come and go freely. So this registers
    all of them and disconnects them again: workers then start in any number, at any time.

    Attributes:
      address: "host:port" that workers (or the relay in front of them) connect to.

    Args:
      num_nodes: node ids, 0 included.
      heartbeat_timeout_s: JAX's own failure detection.
      host: where it listens.
      on_error: called if the topology cannot be published.
      tls: JAX's settings for mutual TLS, checked already: with wrong ones JAX's client ends the process.

    Raises UsageError if `host` is no address of this machine.
    """

    def __init__(
        self,
        num_nodes: int,
        heartbeat_timeout_s: float,
        host: str = "127.0.0.1",
        on_error: Callable[[BaseException], None] | None = None,
        tls: Mapping[str, str] | None = None,
    ) -> None:
        self.num_nodes = num_nodes
        self._heartbeat_timeout_s = math.ceil(heartbeat_timeout_s)
        self._on_error = on_error
        self._tls = dict(tls or {})
        self._service, self.address = self._start_service(host)
        self._own_address = self.address.replace("0.0.0.0", "127.0.0.1")
        self._client = self._register_all()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="jax-topology", daemon=True)
        self._watcher.start()

    def tombstone(self, node: int) -> None:
        """Marks `node` as gone: pending barriers stop waiting for it. Takes a few milliseconds.

        The process of that node must be dead already, or be fenced otherwise.
        """
        if not 0 < node < self.num_nodes:
            raise ValueError(f"node {node} is none of the workers' node ids 1 to {self.num_nodes - 1}")
        client = self._new_client(node, TOMBSTONE_TIMEOUT_S)
        client.connect()
        # `shutdown_on_destruction` stays at its default: with False this call would tell the service nothing.
        client.shutdown()

    def close(self) -> None:
        """Ends the service. Workers that are still connected abort, so end them first."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._watcher.join()
        self._client.shutdown()
        self._service.shutdown()

    def _start_service(self, host: str) -> tuple[Any, str]:
        with _held_port(host) as port:
            address = f"{host}:{port}"
            service = jax_private.coordination_service(address, self.num_nodes, self._heartbeat_timeout_s, self._tls)
        return service, address

    def _register_all(self) -> Any:
        """Returns the client of node 0, after all others have come and gone."""
        clients = [self._new_client(node, REGISTER_TIMEOUT_S) for node in range(self.num_nodes)]
        with ThreadPoolExecutor(self.num_nodes, thread_name_prefix="jax-register") as pool:
            # Each call returns only when all nodes have called: one thread per node.
            for future in [pool.submit(client.connect) for client in clients]:
                future.result()
        with ThreadPoolExecutor(LEAVE_TOGETHER, thread_name_prefix="jax-leave") as pool:
            for future in [pool.submit(client.shutdown) for client in clients[1:]]:
                future.result()
        return clients[0]

    def _new_client(self, node: int, timeout_s: int) -> Any:
        return jax_private.coordination_client(
            self._own_address,
            node,
            timeout_s=timeout_s,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            tls=self._tls,
        )

    def _watch(self) -> None:
        """Publishes each platform's global topology as soon as any worker has published its local one.

        Polls, because it cannot be known which worker will be the first, nor whether it lives long enough.
        """
        waiting = dict(PLATFORMS)
        try:
            while waiting and not self._closing.wait(FIRST_POLL_S if len(waiting) == len(PLATFORMS) else LATER_POLL_S):
                for platform in list(waiting):
                    found = self._client.key_value_dir_get_bytes(f"{platform}:local_topology/{platform}")
                    if found:
                        local = found[0][1]
                        message = topology.global_topology(local, self.num_nodes, waiting.pop(platform))
                        self._client.key_value_set_bytes(f"{platform}:global_topology/{platform}", message)
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)


@contextlib.contextmanager
def _held_port(host: str) -> Iterator[int]:
    """A free port that only JAX's service can take while this context lasts.

    If somebody else took it, JAX's service would not raise: it crashes the process. So we keep the port bound
    until the service listens. It listens with SO_REUSEPORT, which shares a port with those that set it too;
    we set it only after we have got the port for us alone.
    """
    with socket.socket() as holder:
        try:
            holder.bind((host, 0))
        except OSError as error:
            raise UsageError(
                f"JAX's coordination service cannot listen on {host!r}: {error}. Use an address of this machine."
            ) from error
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield holder.getsockname()[1]
