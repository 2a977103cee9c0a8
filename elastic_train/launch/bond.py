"""Ties a worker's life to its agent's. The first thing a worker imports: nothing here is slow."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_ORPHAN = 77
"""Exit code of a worker whose agent was gone before it began."""


def die_with_parent(agent_pid: int) -> None:
    """Has the kernel send SIGKILL to this process when the agent's thread that started it ends.

    Ends the process if the agent is already gone: then no signal will come. The order matters, as the agent
    may go between the two.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != agent_pid:
        print(f"the agent (process {agent_pid}) is gone; this worker ends", file=sys.stderr, flush=True)
        os._exit(EXIT_ORPHAN)
