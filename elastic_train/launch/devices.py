"""Which accelerators this host offers, found out without importing jax.

The agent must not touch a GPU: it would hold memory there, and a CUDA context does not survive a fork.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic_train.errors import UsageError

CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
NVIDIA_PROC = Path("/proc/driver/nvidia/gpus")
NVIDIA_SMI_LIMIT_S = 60.0
"""The driver may take half a minute to wake GPUs that nobody uses."""

MAX_SPARE = 1 << 16
"""How many workers more a host could have on its CPU: what ends that is its memory, not a number."""


def pick_platform(environ: Mapping[str, str]) -> str:
    """ "cuda" if workers should run on GPUs, otherwise "cpu". `JAX_PLATFORMS`, if set, decides.

    Raises:
      UsageError: `JAX_PLATFORMS` names a platform this package cannot train on.
    """
    wanted = [name.strip() for name in environ.get("JAX_PLATFORMS", "").split(",") if name.strip()]
    if not wanted:
        return "cuda" if has_cuda_plugin() and visible_gpus(environ) else "cpu"
    if wanted[0] in ("cuda", "gpu"):
        return "cuda"
    if wanted[0] == "cpu":
        return "cpu"
    raise UsageError(
        f"JAX_PLATFORMS={environ['JAX_PLATFORMS']}: workers run on cpu or cuda only. Set JAX_PLATFORMS to one of them."
    )


def has_cuda_plugin() -> bool:
    """Whether jax's CUDA plugin is installed; without it jax cannot use a GPU that is there."""
    return any(importlib.util.find_spec(name) is not None for name in CUDA_PLUGINS)


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs a worker may be given, each as a value for `CUDA_VISIBLE_DEVICES`.

    An existing `CUDA_VISIBLE_DEVICES` restricts and orders them, read as CUDA reads it: an entry that names
    no GPU of this machine, such as -1, ends the list. Other than there, a GPU may be named several times: as many
    workers share it.
    """
    present = [str(number) for number in range(_count_gpus())]
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return present
    visible = []
    for entry in (part.strip() for part in environ["CUDA_VISIBLE_DEVICES"].split(",")):
        if entry not in present and not entry.startswith(("GPU-", "MIG-")):
            break
        visible.append(entry)
    return visible if present else []


def assign_devices(platform: str, slots: Sequence[int], environ: Mapping[str, str]) -> dict[int, str | None]:
    """The device of each of this host's slots: one GPU each, or a share of one, or None on CPU.

    Raises:
      UsageError: there are more slots than GPUs.
    """
    if platform == "cpu":
        return dict.fromkeys(slots)
    gpus = visible_gpus(environ)
    if len(slots) > len(gpus):
        limit = (
            f" (CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']})" if "CUDA_VISIBLE_DEVICES" in environ else ""
        )
        raise UsageError(
            f"{len(slots)} workers need {len(slots)} GPUs, one each; {len(gpus)} found here{limit}. "
            "Ask for fewer workers, make more GPUs visible, name one several times to have workers share it, as in "
            "CUDA_VISIBLE_DEVICES=0,0, or set JAX_PLATFORMS=cpu to train on the CPU."
        )
    return dict(zip(slots, gpus, strict=False))


class Devices:
    """Which device each slot of this host has, also those that come when the job grows.

    Args and errors: as for `assign_devices`.

    Attributes:
      num_spare: how many slots more could be given one.
      sharing: how many workers share a GPU, of the one that is named most often; 1 on CPU.
    """

    def __init__(self, platform: str, slots: Sequence[int], environ: Mapping[str, str]) -> None:
        self._devices = assign_devices(platform, slots, environ)
        gpus = visible_gpus(environ) if platform == "cuda" else []
        self._free = gpus[len(slots) :] if platform == "cuda" else None
        self.num_spare = MAX_SPARE if self._free is None else len(self._free)
        self.sharing = max(Counter(gpus).values(), default=1)

    def of(self, slot: int) -> str | None:
        """What the slot's `CUDA_VISIBLE_DEVICES` is; None on CPU. Raises OSError if there is none left."""
        if slot not in self._devices:
            if self._free == []:
                raise OSError(f"slot {slot}: all GPUs of this host are taken")
            self._devices[slot] = self._free.pop(0) if self._free is not None else None
        return self._devices[slot]


def _count_gpus() -> int:
    # nvidia-smi first: in a container it sees what the container may use, /proc shows the whole machine.
    if program := shutil.which("nvidia-smi"):
        listing = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_LIMIT_S, check=False
        )
        if listing.returncode == 0:
            return len(re.findall(r"^GPU \d+:", listing.stdout, re.MULTILINE))
    return sum(1 for _ in NVIDIA_PROC.iterdir()) if NVIDIA_PROC.is_dir() else 0
