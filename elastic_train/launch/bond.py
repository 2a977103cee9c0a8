"""Ties a process's life to its parent's. The first thing a worker imports: nothing here is slow."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

BEGAN = time.monotonic()
"""When this process began to run our code."""

PR_SET_PDEATHSIG = 1
EXIT_ORPHAN = 77
"""Exit code of a process whose parent was gone before it began."""


def die_with_parent(parent: int) -> None:
    """Has the kernel send SIGKILL to this process when the parent's thread that started it ends.

    Ends the process if `parent` is already gone: then no signal will come. The order matters, as the parent
    may go between the two.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:
        print(f"the parent (process {parent}) is gone; this process ends", file=sys.stderr, flush=True)
        os._exit(EXIT_ORPHAN)
