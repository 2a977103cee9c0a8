"""`elastic-train`, and `python -m elastic_train`."""

from __future__ import annotations

import signal
from types import FrameType


def main() -> int:
    """Runs the command line.

    A SIGTERM that comes before a job has begun, and so before it has a meaning of its own, ends the command as Ctrl-C
    does. This is arranged first of all: importing the rest takes a while.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        from elastic_train.cli import main

        return main()
    except KeyboardInterrupt:
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
