"""A process that imports what a worker needs, and waits to be told which worker it is: the other end of `spares`."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from elastic_train import jax_private
from elastic_train.launch.channel import IMPORTED, OUTPUT, REFUSED, TAKEN, receive, send
from elastic_train.launch.code import code_digests
from elastic_train.launch.environment import CHANNEL_VARIABLE, PREFIX, SPARE_VARIABLE
from elastic_train.launch.versions import versions

if TYPE_CHECKING:
    from elastic_train.trainer import Trainer

MAX_DESCRIPTORS = 8


class Loaded(NamedTuple):
    """What a worker runs: the trainer's class, and digests of the code that was loaded."""

    trainer: type[Trainer]
    code: dict[str, str]


def load(recipe: str) -> Loaded:
    """Imports everything. Raises what the recipe's own code raises."""
    from elastic_train import member  # noqa: F401  # imports jax
    from elastic_train.launch.recipe import load_recipe

    trainer = load_recipe(recipe)
    return Loaded(trainer, code_digests(trainer.__module__))


def open_channel() -> socket.socket | None:
    """This process's end of the channel to its agent; None if it has none."""
    if (descriptor := os.environ.pop(CHANNEL_VARIABLE, None)) is None:
        return None
    os.set_inheritable(int(descriptor), False)  # what the recipe starts has no need of it
    return socket.socket(fileno=int(descriptor))


def wait_to_be_used(channel: socket.socket) -> Loaded:
    """Imports everything, and waits for as long as the agent lives. On return this process is a worker like any other:
    its environment and its output are that worker's.

    Ends the process if it cannot be the worker that it is told to be; the agent then starts another one.
    """
    # As in a worker: Ctrl-C reaches the agent. SIGTERM ends a process that nobody needs yet.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    found = versions()
    loaded = load(os.environ[PREFIX + "RECIPE"])
    _import_what_comes_late()
    if jax_private.backends_initialized():
        raise RuntimeError(
            "importing the recipe has created arrays or asked for devices. A worker must join its group before jax does"
            " that: move such code from the top level of the module into the trainer's methods."
        )
    send(channel, {"say": IMPORTED})
    told, descriptors = receive(channel, MAX_DESCRIPTORS)
    if told is None:  # the agent needs it no more
        os._exit(0)
    files = dict(zip(told["descriptors"], descriptors, strict=True))
    if reason := _why_not(loaded, found):
        send(channel, {"say": REFUSED, "reason": reason})
        os._exit(0)
    become(told["environment"], files)
    try:
        send(channel, {"say": TAKEN})
    except OSError:  # too late: another process is that worker
        os._exit(0)
    return loaded


def _import_what_comes_late() -> None:
    """What a worker imports only when it needs it, and always does."""
    import jax.experimental.multihost_utils  # noqa: F401


def _why_not(loaded: Loaded, found: Mapping[str, str]) -> str:
    """Why a worker that is started now would not run what this process has imported; "" if it would."""
    try:
        code = code_digests(loaded.trainer.__module__)
    except (OSError, SyntaxError) as error:
        return f"the recipe's code cannot be read any more ({error})"
    if changed := sorted(path for path in {**code, **loaded.code} if code.get(path) != loaded.code.get(path)):
        return f"the recipe's code has changed since it was imported: {', '.join(changed)}"
    if changed := sorted(name for name, version in versions().items() if found.get(name) != version):
        return f"other versions are installed since it was imported: {', '.join(changed)}"
    return ""


def become(environment: Mapping[str, str], files: Mapping[str, int]) -> None:
    """Puts a worker's settings into the environment, and its log in place of this process's own output."""
    os.environ.pop(SPARE_VARIABLE)
    os.environ.update(environment)
    log = files[OUTPUT]
    for name, descriptor in files.items():
        if name != OUTPUT:
            os.environ[name] = str(descriptor)
    written = os.pread(1, os.fstat(1).st_size, 0)
    while written:
        written = written[os.write(log, written) :]
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
