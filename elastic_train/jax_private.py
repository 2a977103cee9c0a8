"""Every private name of jax and jaxlib that is used. Tried on 0.10.2, 0.11.2 and 0.12.0.1.

Nothing is imported before it is used: the command and the coordinator need `knows_mtls`, `coordination_service` and
`coordination_client`, and must not import `jax`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

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


def knows_mtls() -> bool:
    """Whether the coordination service can use TLS, as it can since 0.11.2: nanobind tells only in the docstring."""
    return "mtls_cert_file" in (_jaxlib().get_distributed_runtime_service.__doc__ or "")


def coordination_service(address: str, num_nodes: int, heartbeat_timeout_s: int, tls: Mapping[str, str]) -> Any:
    """Starts JAX's coordination service in this process. `shutdown()` ends it; connected clients then abort.

    `tls` holds JAX's `mtls_` arguments; empty, nothing is encrypted.
    """
    return _jaxlib().get_distributed_runtime_service(
        address, num_nodes, heartbeat_timeout=heartbeat_timeout_s, shutdown_timeout=5, recoverable=True, **tls
    )


def coordination_client(
    address: str, node: int, *, timeout_s: int, heartbeat_timeout_s: int, tls: Mapping[str, str]
) -> Any:
    """A client of the service at `address` under the id `node`, not yet connected.

    One that cannot agree with the service on TLS ends the process.
    """
    return _jaxlib().get_distributed_runtime_client(
        address, node, init_timeout=timeout_s, heartbeat_timeout=heartbeat_timeout_s, **tls
    )


def backends_initialized() -> bool:
    """Whether this process has already created a JAX backend."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def connect_worker(
    *, address: str, node: int, num_nodes: int, heartbeat_timeout_s: float, tls: Mapping[str, str], own_address: str
) -> None:
    """Makes this process node `node` of the coordination service at `address`; `create_backend` follows.

    On CPU, collectives listen at `own_address`, and tell it to the other members: left to itself gloo takes what the
    machine's own name resolves to, which other hosts often cannot reach. NCCL finds its interfaces itself.

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
    client = coordination_client(address, node, timeout_s=CONNECT_TIMEOUT_S, heartbeat_timeout_s=heartbeat_s, tls=tls)
    client.connect()
    state.client = client
    _listen_at(own_address, client)


def create_backend() -> None:
    """Creates the backend, which takes its place in the coordination service."""
    import jax

    jax.local_devices()


def _listen_at(host: str, client: Any) -> None:
    """Has the CPU backend, when it is created, make its gloo collectives with `host` instead of the machine's name."""
    from jax._src import xla_bridge

    def make_cpu_client() -> Any:
        return xla_bridge.make_cpu_client(_jaxlib().make_gloo_tcp_collectives(client, hostname=host))

    xla_bridge.register_backend_factory("cpu", make_cpu_client, priority=0, fail_quietly=False)


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


def share_compiled_across_cpu_devices() -> None:
    """Makes the keys of JAX's compilation cache the same for all CPU devices of one kind, as they are on GPU.

    On CPU they hold the ids of devices and processes, which are new at every start of a worker, so that nothing would
    ever be found. What is compiled does not depend on them: a program that is loaded takes the devices of whoever loads
    it. It does depend on the instructions that the CPU has, which take their place.
    """
    from jax._src import cache_key

    hash_options = cache_key._hash_serialized_compile_options
    kind = _kind_of_cpu()

    def hash_without_devices(hash_obj: Any, options: Any, strip_device_assignment: bool = False) -> Any:
        return hash_options(hash_obj, options, strip_device_assignment=True)

    def hash_kind(hash_obj: Any, accelerators: Any) -> None:
        hash_obj.update(f"{accelerators.size} of {kind}".encode())

    cache_key._hash_serialized_compile_options = hash_without_devices
    cache_key._hash_accelerator_config = hash_kind


def _kind_of_cpu() -> str:
    """What the first processor says it is and can do."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))


def fail_gloo_meeting(device_ids: Sequence[int], absent: int, own: int) -> bool:
    """Makes a gloo clique that is being formed fail at once on this process, since one of its members has died.

    Members put their addresses into the coordination service's store (`cpu:gloo/DEVICE_IDS/RANK`), wait 30 s for those
    of the others, and then, pair by pair, one calls and the other waits 30 s to be called. So an entry is made for
    the dead one if it left none: our own with a port on which nobody listens, the lowest, since the member with the
    higher address calls. And our own waiting ends are called, and hung up on: the others' calls may never come.

    Args:
      device_ids: of the clique's members, in its order.
      absent: rank of the dead member.
      own: rank of this process.

    Returns:
      False if it is too early, because this process has not put its own entry there yet.
    """
    import jax
    from jax._src import distributed

    client: Any = distributed.global_state.client
    prefix = "cpu:gloo/" + ",".join(map(str, device_ids))
    try:
        entry = client.key_value_try_get_bytes(f"{prefix}/{own}")
    except jax.errors.JaxRuntimeError:
        return False
    # int64 n; host name of n bytes; int64 size; sockaddr_storage, int64; then one int64 per member: its pair with us.
    start = 16 + int.from_bytes(entry[:8], "little")
    size = int.from_bytes(entry[start - 8 : start], "little")
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is one already
        client.key_value_set_bytes(
            f"{prefix}/{absent}", entry[: start + 2] + (1).to_bytes(2, "big") + entry[start + 4 :]
        )
    family = socket.AddressFamily(int.from_bytes(entry[start : start + 2], "little"))
    address = entry[start + 4 : start + 8] if family == socket.AF_INET else entry[start + 8 : start + 24]
    listener = socket.inet_ntop(family, address), int.from_bytes(entry[start + 2 : start + 4], "big")
    for rank in range(len(device_ids)):
        pair = entry[start + size + 8 * rank :][:8]
        with contextlib.suppress(OSError), socket.create_connection(listener, timeout=1) as call:
            call.sendall(pair)
    return True


class BarrierTrace(Protocol):
    """Told of each barrier: just before the request is sent, and just after the reply (None: it was refused)."""

    def enter(self) -> None: ...
    def exit(self, nodes: Collection[int] | None) -> None: ...


class BarrierRefused(Exception):
    """A barrier gave no answer. It refuses a worker that was declared dead; `__cause__` says what it said."""


class LiveDevices:
    """JAX's `live_devices`, one fresh instance per epoch.

    The public object is one per process and keeps the last answer; asked about another list it would yield the
    old one. So each epoch, whose list of members differs, needs an instance of its own.

    `incarnations` maps node ids to JAX incarnations as the latest barrier gave them.
    """

    def __init__(self, devices: Sequence[Any], trace: BarrierTrace) -> None:
        from jax.experimental import multihost_utils

        self._devices = list(devices)
        self._trace = trace
        self._live = multihost_utils._LiveDevices()

    @property
    def incarnations(self) -> dict[int, int]:
        return {device.process_index: number for device, number in (self._live.devices or {}).items()}

    def run(self, body: Callable[[dict[int, int]], Any]) -> Any:
        """Runs `body(incarnations at entry)` inside the block. Raises what `live_devices` does, and BarrierRefused."""
        answer = self._live.devices
        if answer is None:  # only the first entry is a barrier; later ones take the answer of the exit before
            self._trace.enter()
        try:
            with self._live(self._devices):
                if answer is None:
                    answer = self._live.devices
                    self._trace.exit(self.incarnations)
                try:
                    return body(self.incarnations)
                finally:
                    self._trace.enter()
        except Exception as error:
            if self._live.devices is answer:
                raise BarrierRefused from error
            raise
        finally:
            # Without a reply there is no new answer.
            self._trace.exit(None if self._live.devices is answer else self.incarnations)
