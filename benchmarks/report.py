"""Options that benchmarks share, and what every result says of itself: command, hardware, versions, load."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

PACKAGES = ("elastic-train", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grpcio")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows `--out`, as all benchmarks do, and shows `description` as it is written."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--out", type=Path, help="where the result goes, as JSON")
    return made


def parser_for_recipe(description: str | None, workers: int) -> argparse.ArgumentParser:
    """The same for a benchmark that trains a recipe.

    Args:
      workers: how many there are by default.
    """
    made = parser(description)
    add_recipe(made)
    made.add_argument("--workers", type=int, default=workers)
    return made


def add_recipe(to: argparse.ArgumentParser) -> None:
    """Adds the options that say what is trained."""
    to.add_argument("recipe")
    to.add_argument("--config", type=Path)
    to.add_argument("--set", action="extend", nargs="*", default=[], help="settings of the recipe")


def recipe_options(arguments: argparse.Namespace, *settings: str) -> list[str]:
    """The options of `add_recipe` as they were given, and `settings` after them, for the command line of a process that
    knows them, too."""
    given = [*arguments.set, *settings]
    config = ["--config", str(arguments.config)] if arguments.config else []
    return [*config, *(["--set", *given] if given else [])]


def about() -> dict[str, Any]:
    """Command, date, hardware and versions. Names no host, no user and no directory outside the repository.

    Call it at the beginning: `load_average` says how busy the machine was before.
    """
    return {
        "command": _command(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "versions": versions(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def hardware() -> dict[str, Any]:
    """Processor, usable cores, memory in GiB, and the accelerators by name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "accelerators": accelerators(),
    }


def accelerators() -> list[str]:
    """Names of the NVIDIA GPUs; empty if there are none, or if `JAX_PLATFORMS` says cpu."""
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.split("\n")[:-1] if found.returncode == 0 else []


def versions() -> dict[str, str]:
    """Of Python and the packages that make the figures."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "from source"
    return found


def spread(values: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Median, the quartiles around it, and how many values there were."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    found = {"median": median(values), "quartile_1": low, "quartile_3": high}
    return {**{name: round(value, digits) for name, value in found.items()}, "num": len(values)}


def write(result: dict[str, Any], out: Path | None) -> None:
    """Prints the result as JSON, and writes it to `out`."""
    text = json.dumps(result, indent=1)
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


def _command(argv: Sequence[str]) -> str:
    """The command line, without the directories of this machine."""
    shown = [Path(word).name if os.path.isabs(word) else word for word in argv[1:]]
    return " ".join(["python", f"benchmarks/{Path(argv[0]).name}", *shown])
