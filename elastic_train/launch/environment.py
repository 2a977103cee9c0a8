"""What a worker process is told before Python has imported anything: both ends of that contract.

The agent builds a worker's environment with `worker_environment`; the worker reads it back with
`WorkerSettings.read`. Pure, but for the one event in the settings; imports nothing slow.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from elastic_train.membership.group import Identity

SECRET_VARIABLE = "ELASTIC_TRAIN_SECRET"
"""Carries a job's secret to hosts without a shared run directory, and to workers, which remove it at once."""

PREFIX = "ELASTIC_TRAIN_"

STATE_VARIABLE, RESTORE_VARIABLE, STARTED_VARIABLE = (
    PREFIX + name for name in ("STATE_DESCRIPTOR", "RESTORE", "STARTED")
)
"""What the agent adds for each start of a worker, besides what `worker_environment` says."""

CHANNEL_VARIABLE, SPARE_VARIABLE = PREFIX + "CHANNEL", PREFIX + "SPARE"
"""The descriptor of a worker's end of its channel to the agent (`launch.spares`); whether the process is to import
everything, and wait there to be told which worker it is."""

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Read when a process first touches a GPU, not when jax is imported."""

HOST_ID_VARIABLE = "NCCL_HOSTID"
"""By which NCCL tells hosts apart. It refuses two members of one host that have the same GPU; of two hosts it believes
that they cannot."""

MEMORY_VARIABLE, OLD_MEMORY_VARIABLE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Which part of its GPU's memory a process takes at its start. jax refuses to be given both."""

SHARED_MEMORY = 0.8
"""What all processes together take of a GPU that they share; the rest is for their contexts and NCCL."""

TRACE_VARIABLE = PREFIX + "TRACE_BLOCKS"
"""Set to 1 for an agent or a whole command: workers write what they do at barriers (`telemetry.blocks`)."""

GPU_XLA_FLAGS = {
    "--xla_gpu_nccl_async_execution": "true",
    "--xla_gpu_nccl_blocking_communicators": "false",
    "--xla_gpu_shard_autotuning": "false",
}
"""Without the first two XLA cannot abort a collective whose peer has died. With the third at its default, compiling
a program that crosses members would wait for all of them. XLA reads these when jax is imported."""

DETERMINISTIC_XLA_FLAGS = {"--xla_gpu_exclude_nondeterministic_ops": "true"}


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What all workers of one agent have in common.

    Attributes:
      coordinator: `HOST:PORT` of the control plane.
      secret: what the control plane expects from a client.
      run_dir: the run directory.
      recipe: as `load_recipe` takes it.
      config_file: the resolved config, TOML.
      platform: "cpu" or "cuda".
      keepalive_s: of the control connection.
      heartbeat_timeout_s: of JAX's coordination service.
      min_workers: members pause while there are fewer of them.
      deterministic: only kernels that give the same bits every time.
      chaos: where orders to inject faults come from; empty unless the job was started with `--chaos`.
      tls: this host's files for TLS, as `Tls.dump` gives them.
      last_step: the job stops after this step, whatever the config says; 0 for none.
    """

    coordinator: str
    secret: str
    run_dir: Path
    recipe: str
    config_file: Path
    platform: str
    keepalive_s: float
    heartbeat_timeout_s: float
    min_workers: int
    deterministic: bool
    tls: str
    chaos: str = ""
    last_step: int = 0


class JaxRuntime(NamedTuple):
    """Where a host's workers find JAX's coordination service, and how.

    Attributes:
      address: `HOST:PORT` of the agent's relay.
      num_nodes: size of the service, node 0 included.
      tls: whether it wants mutual TLS.
      generation: that of the service.
    """

    address: str
    num_nodes: int
    tls: bool
    generation: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What one worker process is told.

    Attributes:
      job: what it has in common with the agent's other workers.
      identity: its slot, incarnation and node id.
      jax: JAX's coordination service.
      host_address: where this host's workers listen for those of others.
      agent_pid: the process that must be its parent.
      state_descriptor: where it leaves its state when it loses the coordinator (`launch.carried`); -1 for nowhere.
      restore: whether it begins with the state that lies there.
      trace_blocks: whether it writes what it does at barriers.
      started: when the agent began to start it, on the host's monotonic clock.
      leave_requested: set by SIGTERM; the trainer then asks to leave after a commit.
    """

    job: JobSettings
    identity: Identity
    jax: JaxRuntime
    host_address: str
    agent_pid: int
    state_descriptor: int = -1
    restore: bool = False
    trace_blocks: bool = False
    started: float = 0.0
    leave_requested: threading.Event = field(default_factory=threading.Event, compare=False)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> WorkerSettings:
        """The settings in `environ`; raises KeyError if one is missing."""

        def get(name: str) -> str:
            return environ[PREFIX + name.upper()]

        job = {f.name: get(f.name) for f in fields(JobSettings)}
        return cls(
            job=JobSettings(
                **{
                    **job,
                    "run_dir": Path(job["run_dir"]),
                    "config_file": Path(job["config_file"]),
                    "keepalive_s": float(job["keepalive_s"]),
                    "heartbeat_timeout_s": float(job["heartbeat_timeout_s"]),
                    "min_workers": int(job["min_workers"]),
                    "deterministic": job["deterministic"] == "True",
                    "last_step": int(job["last_step"]),
                }
            ),
            identity=Identity(int(get("slot")), int(get("incarnation")), int(get("node"))),
            jax=JaxRuntime(get("jax_address"), int(get("num_nodes")), get("jax_tls") == "True", int(get("generation"))),
            host_address=get("host_address"),
            agent_pid=int(get("agent_pid")),
            state_descriptor=int(environ.get(STATE_VARIABLE, "-1")),
            restore=environ.get(RESTORE_VARIABLE) == "1",
            trace_blocks=environ.get(TRACE_VARIABLE) == "1",
            started=float(environ.get(STARTED_VARIABLE, "0")),
        )


def worker_environment(
    environ: Mapping[str, str],
    identity: Identity,
    job: JobSettings,
    *,
    device: str | None,
    jax: JaxRuntime,
    host_address: str,
    agent_pid: int,
    host_id: str = "",
) -> dict[str, str]:
    """The environment of one worker: `environ`, and on top what this start of this slot needs.

    Args:
      environ: the agent's own environment; NCCL's and XLA's settings in it are kept.
      identity: slot, incarnation and node id of the worker.
      job: what all workers of the agent share.
      device: what `CUDA_VISIBLE_DEVICES` is set to; None on CPU.
      jax: where the worker finds JAX's coordination service.
      host_address: where it shall listen for the other members.
      agent_pid: process id of the agent.
      host_id: the host that NCCL takes the worker to be on, if it shares its GPU.
    """
    told: dict[str, object] = {f.name: getattr(job, f.name) for f in fields(job)}
    told |= {**identity._asdict(), "host_address": host_address, "agent_pid": agent_pid}
    told |= {"jax_address": jax.address, "num_nodes": jax.num_nodes, "jax_tls": jax.tls}
    told["generation"] = jax.generation
    environment = _common(environ, job) | {PREFIX + name.upper(): str(value) for name, value in told.items()}
    if job.platform == "cpu":
        return environment
    if device is None:
        raise ValueError(f"slot {identity.slot} on platform {job.platform!r} needs a device")
    return environment | {DEVICES_VARIABLE: device} | ({HOST_ID_VARIABLE: host_id} if host_id else {})


def with_shared_memory(environ: Mapping[str, str], sharing: int) -> dict[str, str]:
    """`environ` for workers of which `sharing` have the same GPU; what the user has set for its memory holds."""
    if sharing < 2 or {MEMORY_VARIABLE, OLD_MEMORY_VARIABLE} & environ.keys():
        return dict(environ)
    return {**environ, MEMORY_VARIABLE: f"{SHARED_MEMORY / sharing:.3f}"}


def spare_environment(environ: Mapping[str, str], job: JobSettings, agent_pid: int) -> dict[str, str]:
    """The environment of a process that is held ready: that of every worker, less what it is told when it becomes one.

    It sees no GPU, and knows no secret, while it runs the recipe's own imports.
    """
    told = {PREFIX + "AGENT_PID": str(agent_pid), PREFIX + "RECIPE": job.recipe, SPARE_VARIABLE: "1"}
    return _common(environ, job) | told | ({} if job.platform == "cpu" else {DEVICES_VARIABLE: ""})


def told_later(environment: Mapping[str, str]) -> dict[str, str]:
    """What of a worker's environment a process that is held ready can be told when it becomes that worker: what nobody
    reads before."""
    return {name: value for name, value in environment.items() if _is_told_later(name)}


def fixed_differences(spare: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Names of the variables in which a process with the environment `spare` cannot become a worker with `wanted`."""
    names = {name for name in {**spare, **wanted} if not _is_told_later(name)}
    return sorted(name for name in names if spare.get(name) != wanted.get(name))


def _is_told_later(name: str) -> bool:
    return name.startswith(PREFIX) or name in (DEVICES_VARIABLE, HOST_ID_VARIABLE)


def _common(environ: Mapping[str, str], job: JobSettings) -> dict[str, str]:
    """What is the same for all workers of an agent and may be read when jax is imported: XLA_FLAGS, JAX_..., XLA_..."""
    environment = {
        **environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # XLA's warnings, one per unused node id at every change of members, would bury the worker's own output.
        "TF_CPP_MIN_LOG_LEVEL": environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
    if job.platform == "cpu":
        return environment | {"JAX_PLATFORMS": "cpu"}
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        environment["JAX_PLATFORMS"] = f"{platforms},cpu"  # what goes into the log is computed there
    flags = GPU_XLA_FLAGS | (DETERMINISTIC_XLA_FLAGS if job.deterministic else {})
    return environment | {
        "XLA_FLAGS": with_flags(environ.get("XLA_FLAGS", ""), flags),
        "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE": "1",
    }


def with_flags(flags: str, wanted: Mapping[str, str]) -> str:
    """`flags` with `wanted` appended: XLA takes the last value of a flag, so ours hold.

    >>> with_flags("--xla_dump_to=/d", {"--xla_gpu_nccl_async_execution": "true"})
    '--xla_dump_to=/d --xla_gpu_nccl_async_execution=true'
    """
    return " ".join([*flags.split(), *(f"{name}={value}" for name, value in wanted.items())])
