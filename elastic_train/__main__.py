"""`elastic-train`, and `python -m elastic_train`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

STOPPED = 130


def main() -> int:
    """Runs the command line.

    SIGTERM and SIGINT that come before a job has begun, and so before they have a meaning of their own, end the command
    with 130. This is arranged first of all: importing the rest takes a while.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    from elastic_train.cli import main

    return main()


def _end(number: int, frame: FrameType | None) -> None:
    # Not an exception: some places swallow those, and after a KeyboardInterrupt in an `exec`, as in the making of a
    # dataclass, Python ends by SIGINT. What was started until here ends with this process.
    os._exit(STOPPED)


if __name__ == "__main__":
    sys.exit(main())
