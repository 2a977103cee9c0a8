"""A worker process, from its first line to the end of `Trainer.fit`."""

import os

from elastic_train.launch.bond import die_with_parent

if __name__ == "__main__":
    # Before anything slow: an agent that dies while this process imports must not leave it behind.
    die_with_parent(int(os.environ["ELASTIC_TRAIN_AGENT_PID"]))

import faulthandler
import signal
import socket
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn

from elastic_train.coordinator.client import Link
from elastic_train.errors import ElasticTrainError
from elastic_train.launch.environment import WorkerSettings
from elastic_train.launch.versions import versions

if TYPE_CHECKING:
    from elastic_train.trainer import Trainer

EXIT_STARTUP = 13
"""Exit code of a worker whose recipe raised before the worker was ready."""

EXIT_EVICTED = 75
"""Exit code of a worker that was told that what it holds is out of date."""

EXIT_LOST = 76
"""Exit code of a worker that lost the coordinator."""


class MemberLink(Link):
    """A link that knows whether its worker has said that it is ready."""

    is_ready = False

    def ready(self) -> None:
        self.is_ready = True
        super().ready()


def main() -> NoReturn:
    """Runs this process's worker to its end."""
    settings = WorkerSettings.read(os.environ)
    _install_signal_handlers(settings.leave_requested)
    job = settings.job
    link = MemberLink(job.coordinator, job.secret, settings.identity, job.keepalive_s)
    link.on_evict = lambda reason: _leave(EXIT_EVICTED, f"evicted: {reason}")
    link.on_lost = lambda reason: _leave(EXIT_LOST, f"lost the coordinator: {reason}")
    try:
        _run(link, settings)
        exit_code = 0
    except SystemExit as leave:
        exit_code = leave.code if isinstance(leave.code, int) else 1
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        startup = not link.is_ready
        link.failed(step=0, fatal=True, startup=startup, traceback=traceback.format_exc())
        exit_code = EXIT_STARTUP if startup else getattr(error, "exit_code", ElasticTrainError.exit_code)
    link.close()
    # Not sys.exit: when jax takes its clients and communicators down it waits for peers that may be gone.
    _leave(exit_code, f"ends with code {exit_code}")


def _run(link: MemberLink, settings: WorkerSettings) -> None:
    job = settings.job
    with ThreadPoolExecutor(1, thread_name_prefix="hello") as background:
        # Importing jax takes longer than anything else here. Meanwhile the coordinator learns of this worker.
        hello = background.submit(
            link.hello,
            pid=os.getpid(),
            host=socket.gethostname(),
            config_digest=job.config_digest,
            versions=" ".join(f"{name} {version}" for name, version in versions().items()),
        )
        from elastic_train import jax_private

        hello.result()
    jax_private.connect_worker(
        address=settings.jax_address,
        node=settings.identity.node,
        num_nodes=settings.num_nodes,
        platform=job.platform,
        heartbeat_timeout_s=job.heartbeat_timeout_s,
    )
    trainer = _build_trainer(settings)
    trainer._fit_member(link, settings)


def _build_trainer(settings: WorkerSettings) -> "Trainer":
    from elastic_train.config_files import resolve
    from elastic_train.launch.recipe import config_class_of, load_recipe

    trainer = load_recipe(settings.job.recipe)
    return trainer(resolve(config_class_of(trainer), settings.job.config_file))


def _install_signal_handlers(leave_requested: threading.Event) -> None:
    # Ctrl-C reaches the agent, which knows what it means; this process has a session of its own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: leave_requested.set())
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _leave(exit_code: int, reason: str) -> NoReturn:
    """Ends the process now, from any thread, with its reason in the log."""
    print(f"worker {os.getpid()} {reason}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
