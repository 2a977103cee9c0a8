"""The process that writes checkpoints, and the end of it that a worker holds.

It is no part of JAX's distributed job, and so Orbax can run in it as it is meant to: see `store.py`. It also keeps
Orbax's Python and the digests off the interpreter lock of the worker that trains.
"""

import json
import mmap
import os
import sys

from elastic_train.launch.bond import die_with_parent

if __name__ == "__main__":
    # Before anything slow: a worker that dies while this process imports must not leave it behind.
    die_with_parent(int(sys.argv[1]))

import contextlib
import dataclasses
import select
import subprocess
import time
from typing import Any

from elastic_train.config import CheckpointConfig

NICENESS = 10
"""Training has precedence."""


class WriteFailed(Exception):
    """A checkpoint was not written. `not_finite`: because the state is not finite."""

    def __init__(self, reason: str, *, not_finite: bool = False) -> None:
        super().__init__(reason)
        self.not_finite = not_finite


class Writer:
    """A worker's end. Call it from one thread that lives as long as the worker: the kernel ends the process with it.

    Args:
      descriptor, num_bytes: a `snapshot.Snapshot`'s memory.
      limit_s: how long one save may take; then the process is ended, and the save has failed.
    """

    def __init__(self, descriptor: int, num_bytes: int, limit_s: float) -> None:
        self._memory = descriptor, num_bytes
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process if it does not run. It then imports what it needs, which takes seconds."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        descriptor, num_bytes = self._memory
        command = [sys.executable, "-m", "elastic_train.checkpoint.writing"]
        self._process = subprocess.Popen(
            [*command, str(os.getpid()), str(descriptor), str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor],
            # Ctrl-C at a terminal is meant for who trains, which then waits for the last save.
            process_group=0,
            # It computes nothing, and must not take an accelerator from the worker.
            env={**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        )

    def write(self, request: dict[str, Any]) -> dict[str, Any]:
        """Has a checkpoint written; blocks until it is there. What `_answer` returns.

        Raises WriteFailed.
        """
        self.start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = _read_line(process.stdout.fileno(), self._limit_s)
        except OSError as error:
            line, reason = b"", repr(error)
        else:
            reason = f"took longer than {self._limit_s:g} s (faults.save_timeout_s)" if line is None else "ended"
        if not line:
            process.kill()
            raise WriteFailed(f"the process that writes checkpoints {reason} (exit code {process.wait()})")
        answer = json.loads(line)
        if "error" in answer:
            raise WriteFailed(answer["error"], not_finite=answer["not_finite"])
        return answer

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def _read_line(descriptor: int, limit_s: float) -> bytes | None:
    """One line; what there is of it if the other side ends, and None if it takes too long."""
    line, deadline = b"", time.monotonic() + limit_s
    while not line.endswith(b"\n"):
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        part = os.read(descriptor, 1 << 16)
        if not part:
            return b""
        line += part
    return line


# The process itself ---------------------------------------------------------------------------------------


def main() -> None:
    """Answers requests, one JSON object a line, until the other side is gone. argv: parent, memory, its size."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        memory = mmap.mmap(int(sys.argv[2]), max(1, int(sys.argv[3])), prot=mmap.PROT_READ)
        from elastic_train.checkpoint import places, store

        store.warm_up()
        os.nice(NICENESS)  # not before: the first saves wait for the imports
        cleaned: set[str] = set()
        for line in sys.stdin.buffer:
            request = json.loads(line)
            try:
                answer = _answer(request, memory, cleaned)
            except store.NotFinite as error:
                answer = {"error": f"the state is not finite: {error}", "not_finite": True}
            except Exception as error:
                answer = {"error": places.in_words(error), "not_finite": False}
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()


def _answer(request: dict[str, Any], memory: mmap.mmap, cleaned: set[str]) -> dict[str, Any]:
    """Writes one checkpoint, and deletes those that are to go.

    Returns `path`, `num_bytes`, `seconds`, `deleted` (steps), and `trouble` (what went wrong besides, or empty).
    """
    from elastic_train.checkpoint import places, policy, snapshot, store
    from elastic_train.checkpoint.manifest import Position, Run

    started = time.monotonic()
    root = places.Path(request["root"])
    trouble = ""
    if request["root"] not in cleaned:
        with contextlib.suppress(OSError):
            store.clean(root)
        cleaned.add(request["root"])
    position = {**request["position"], "workers": tuple(request["position"]["workers"])}
    written = store.save(
        root,
        snapshot.arrays(memory, request["layout"]),
        Position(**{**position, "records": tuple(position["records"])}),
        Run(**request["run"]),
    )
    deleted = []
    try:
        for step in policy.to_delete(CheckpointConfig(**request["config"]), places.saved_steps(root)):
            places.delete(root, step)
            deleted.append(step)
    except OSError as error:
        trouble = f"an old checkpoint could not be deleted: {error}"
    return {
        "path": str(places.checkpoint(root, written.step)),
        "num_bytes": written.num_bytes,
        "seconds": time.monotonic() - started,
        "deleted": deleted,
        "trouble": trouble,
    }


def request_for(
    root: str, config: CheckpointConfig, layout: list[dict[str, Any]], position: Any, run: Any
) -> dict[str, Any]:
    """What `Writer.write` is given: the arguments of `store.save` as JSON values."""
    return {
        "root": root,
        "config": dataclasses.asdict(config),
        "layout": layout,
        "position": dataclasses.asdict(position),
        "run": dataclasses.asdict(run),
    }


if __name__ == "__main__":
    main()
