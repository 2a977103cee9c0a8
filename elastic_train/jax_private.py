"""Every private name of jax and jaxlib that is used. Tried on 0.10.2, 0.11.2 and 0.12.0.1.

Nothing is imported before it is used: the coordinator needs the first two functions, and must not import `jax`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from elastic_train.errors import UsageError

CONNECT_TIMEOUT_S = 60


@functools.cache
def _jaxlib() -> Any:
    # XLA reads its log level once, while it is imported. Below errors it reports every tombstone and every start.
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = level or "2"
    from jaxlib import _jax

    # Worker processes inherit our environment, and decide for themselves.
    if level is None:
        del os.environ["TF_CPP_MIN_LOG_LEVEL"]
    return _jax


def coordination_service(address: str, num_nodes: int, heartbeat_timeout_s: int) -> Any:
    """Starts JAX's coordination service in this process. `shutdown()` ends it; connected clients then abort."""
    return _jaxlib().get_distributed_runtime_service(
        address, num_nodes, heartbeat_timeout=heartbeat_timeout_s, shutdown_timeout=5, recoverable=True
    )


def coordination_client(address: str, node: int, *, timeout_s: int, heartbeat_timeout_s: int) -> Any:
    """A client of the service at `address` under the id `node`, not yet connected."""
    return _jaxlib().get_distributed_runtime_client(
        address, node, init_timeout=timeout_s, heartbeat_timeout=heartbeat_timeout_s
    )


def backends_initialized() -> bool:
    """Whether this process has already created a JAX backend."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def connect_worker(*, address: str, node: int, num_nodes: int, heartbeat_timeout_s: float) -> None:
    """Makes this process node `node` of the coordination service at `address`, and creates the backend.

    `jax.distributed.initialize` is not used because it starts the service inside process 0; here every worker
    is only a client.

    Raises:
      UsageError: a JAX backend exists already, so it is too late to join.
    """
    import jax
    from jax._src import distributed

    if backends_initialized():
        raise UsageError(
            "JAX was already initialised before elastic_train could connect this worker: "
            f"{jax.device_count()} device(s) of {jax.default_backend()!r} exist. Remove calls such as jax.devices() or "
            "jnp.zeros() that run while the recipe is imported; put them into the Trainer's methods."
        )
    jax.config.update("jax_enable_recoverability", True)
    # Its C++ handler would swallow SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    state = distributed.global_state
    state.coordinator_address = address
    state.process_id = node
    state.num_processes = num_nodes
    heartbeat_s = max(1, round(heartbeat_timeout_s))
    client = coordination_client(address, node, timeout_s=CONNECT_TIMEOUT_S, heartbeat_timeout_s=heartbeat_s)
    client.connect()
    state.client = client
    jax.local_devices()


def disconnect_worker() -> None:
    """Leaves the coordination service in good order: no other member sees a failure of ours."""
    from jax._src import distributed

    client = distributed.global_state.client
    if client is not None:
        client.shutdown()


def write_compilation_cache() -> None:
    """Makes this process write JAX's persistent compilation cache.

    JAX writes it only where `process_id` is 0, and no worker is node 0. The field is not read again for anything
    else once the backend exists; `jax.process_index()` does not change.
    """
    from jax._src import distributed

    distributed.global_state.process_id = 0


class LiveDevices:
    """JAX's `live_devices`, one fresh instance per epoch.

    The public object is one per process and keeps the last answer; asked about another list it would yield the
    old one. So each epoch, whose list of members differs, needs an instance of its own.

    `incarnations` maps node ids to JAX incarnations as the latest barrier gave them.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        from jax.experimental import multihost_utils

        self._devices = list(devices)
        self._live = multihost_utils._LiveDevices()

    @property
    def incarnations(self) -> dict[int, int]:
        return {device.process_index: number for device, number in (self._live.devices or {}).items()}

    def run(self, body: Callable[[dict[int, int]], Any]) -> Any:
        """Runs `body(incarnations at entry)` inside the block. Raises what `live_devices` raises."""
        with self._live(self._devices):
            return body(self.incarnations)
