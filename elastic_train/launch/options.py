"""What the command line says about a job, checked as far as that takes no recipe."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from elastic_train.checkpoint.resume import Mode
from elastic_train.coordinator.security import PLAIN, Tls
from elastic_train.errors import UsageError
from elastic_train.launch.check import CheckRequest

MAX_WORKERS = 65_536
"""More is a slip of the finger, which must not fill the memory with slots."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What the command line said about a job.

    Attributes:
      recipe, config, overrides: what is trained, and with which settings.
      workers: slots of the whole job; None takes one per GPU here, or a single one on CPU.
      slots: those of this host; None takes all.
      steps, seed: settings with an option of their own; None leaves them as they are.
      bind: where the coordinator listens.
      chaos: a file that says which faults are injected; None for none.
      address: where this host's workers listen for those of other hosts; "" finds it out.
      tls: this host's files.
      resume: whether a run in `run_dir` is gone on with.
      last_step: the job stops after this step, whatever `steps` says, which the recipe may compute with; 0 for none.
    """

    recipe: str
    config: Path | None
    overrides: tuple[str, ...]
    workers: int | None
    min_workers: int
    slots: tuple[int, ...] | None
    steps: int | None
    seed: int | None
    run_dir: Path
    bind: str
    chaos: Path | None = None
    address: str = ""
    tls: Tls = PLAIN
    resume: Mode = "auto"
    last_step: int = 0

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers {self.workers}: train with at least one worker")
        if self.workers is not None and self.workers > MAX_WORKERS:
            raise UsageError(f"--workers {self.workers}: a job has at most {MAX_WORKERS} workers")
        if self.min_workers < 1:
            raise UsageError(f"--min-workers {self.min_workers}: use at least 1")
        if self.workers is not None and self.min_workers > self.workers:
            raise UsageError(f"--min-workers {self.min_workers} exceeds --workers {self.workers}: it would never begin")
        if self.chaos is not None and self.slots is not None:
            raise UsageError("--chaos injects faults into the workers of one host; leave --slots away")
        if self.slots is not None and self.workers is not None and max(self.slots) >= self.workers:
            raise UsageError(
                f"--slots names slot {max(self.slots)}, but a job of {self.workers} workers has slots 0 to "
                f"{self.workers - 1}. --workers is the number of workers on all hosts together."
            )

    @property
    def coordinator_host(self) -> str:
        """What workers and other hosts know the coordinator's host by.

        Raises UsageError if it listens on all addresses and none is named.
        """
        host = self.bind.rpartition(":")[0]
        if host not in ("0.0.0.0", "[::]", "::", ""):
            return host
        if not self.address:
            raise UsageError(
                f"--bind {self.bind} is every address of this host: give --address, the one that other hosts reach, too"
            )
        return self.address

    def check_request(self, workers: int) -> CheckRequest:
        flags = {"steps": self.steps, "seed": self.seed}
        return CheckRequest(
            recipe=self.recipe,
            workers=workers,
            config=str(self.config) if self.config is not None else None,
            overrides=self.overrides,
            flags={name: value for name, value in flags.items() if value is not None},
        )


def check_free(bind: str) -> None:
    """Raises UsageError unless `bind`, HOST:PORT, can be listened on. Port 0 means any that is free."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--bind {bind}: write HOST:PORT, for example 127.0.0.1:9000; port 0 takes a free one")
    try:
        with socket.create_server((host, int(port))):
            pass
    except OSError as error:
        raise UsageError(
            f"--bind {bind}: cannot listen there ({error.strerror}). Choose another port, or port 0 for a free one."
        ) from error


def address_towards(coordinator: str) -> str:
    """The address that this host has on its way to `coordinator`, HOST:PORT. Nothing is sent.

    Raises OSError: the name is unknown, or there is no way there.
    """
    host, _, port = coordinator.rpartition(":")
    family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]
