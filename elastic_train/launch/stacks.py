"""Stacks of a process that no longer answers: how it is made to write them, and where in them the user's code is."""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import re
import signal
import sysconfig
from pathlib import Path

DUMP_SIGNAL = signal.SIGUSR2
"""Has a worker write the stacks of all Python threads to its log, and ends it. So its end tells that they are there."""

_THREAD = re.compile(r"^(?:Current t|T)hread 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')

DEPENDENCIES = ("jax", "jaxlib", "flax", "optax", "orbax", "grpc", "numpy")
"""Packages that may lie elsewhere than what is installed with this Python: on PYTHONPATH."""


@functools.cache
def libraries() -> tuple[str, ...]:
    """Where code lies that is not the user's: this package, the standard library, what is installed."""
    specs = [importlib.util.find_spec(name) for name in DEPENDENCIES]  # imports nothing
    lie = [path for spec in specs if spec for path in spec.submodule_search_locations or ()]
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    return tuple({str(Path(__file__).resolve().parents[1]), *installed, *lie})


def install_dumps() -> None:
    """Prepares this process for `DUMP_SIGNAL`, and for SIGUSR1, which only writes.

    Both work while a thread keeps the interpreter's lock: no Python code runs for them.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Chained to the signal's default action, which is to end the process, as soon as all is written.
    faulthandler.register(DUMP_SIGNAL, all_threads=True, chain=True)


def user_frame(dump: str) -> str:
    """The innermost frame outside of `libraries()`: of the main thread, which comes last, or of another; "" if none is.

    >>> dump = 'Thread 0x00000001 (most recent call first):\\n  File "/my/code.py", line 7 in load'
    >>> user_frame(dump)
    '/my/code.py:7 in load'
    """
    threads: list[list[re.Match[str]]] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(frame)
    for frames in reversed(threads):
        for frame in frames:
            if not frame["file"].startswith((*libraries(), "<frozen ")):
                return f"{frame['file']}:{frame['line']} in {frame['function']}"
    return ""
