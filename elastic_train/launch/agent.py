"""The supervisor of one host: starts, watches and ends worker processes as the coordinator says.

It decides nothing, and imports no jax: a process that holds no accelerator can always be killed, and reaps.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from signal import Signals
from typing import NamedTuple, Protocol

import grpc

from elastic_train.coordinator import control_pb2, control_pb2_grpc, wire
from elastic_train.launch.processes import Exit, WorkerProcesses
from elastic_train.launch.relay import Relay
from elastic_train.membership.group import Identity

CONNECT_LIMIT_S = 30.0
"""How long the coordinator may take to answer an agent's hello."""

FAREWELL_LIMIT_S = 2.0
"""How long the coordinator may take to read the last exits after it has asked for a shutdown."""

CANNOT_START = 127
"""Exit code reported for a worker whose process could not be started, as a shell does."""

EnvironmentOf = Callable[[Identity, int, str], Mapping[str, str]]


class _Stream(Protocol):
    """The open call, as gRPC gives it."""

    def __iter__(self) -> Iterator[control_pb2.ToAgent]: ...
    def cancel(self) -> bool: ...
    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str: ...


class AgentEnd(NamedTuple):
    """Why an agent ended, and the exit code its command should end with."""

    exit_code: int
    reason: str


class Failure(NamedTuple):
    """A worker that ended with a Python traceback."""

    identity: Identity
    exit_code: int
    traceback: str


class Agent:
    """A client of `Control.Agent`. One thread, which lives as long as the workers, does all there is to do.

    Args:
      coordinator_address: `HOST:PORT`.
      secret: what the coordinator expects from its clients.
      slots: the slots this host fills.
      command: what a worker is started with.
      environment: (identity, number of JAX nodes, address of the relay) -> environment of that worker.
      log_dir: an existing directory for the workers' output.
      host: what the coordinator should call this host.
      keepalive_s: a coordinator that is silent for twice this long counts as lost.
    """

    def __init__(
        self,
        coordinator_address: str,
        secret: str,
        slots: Sequence[int],
        command: Sequence[str],
        environment: EnvironmentOf,
        log_dir: Path,
        host: str,
        keepalive_s: float,
    ) -> None:
        self._address = coordinator_address
        self._metadata = wire.secret_metadata(secret)
        self._options = wire.channel_options(keepalive_s)
        self._hello = control_pb2.AgentHello(host=host, slots=list(slots))
        self._environment = environment
        self._outgoing: queue.SimpleQueue[control_pb2.FromAgent | None] = queue.SimpleQueue()
        self._workers = WorkerProcesses(command, log_dir, self._report_start, self._report_exit)
        self._relay: Relay | None = None
        self._num_nodes = 0
        self._closing = threading.Event()
        self._call: _Stream | None = None
        self._end: Future[AgentEnd] = Future()
        self._thread = threading.Thread(target=self._run, name="agent", daemon=True)
        self.first_failure: Failure | None = None

    def start(self) -> None:
        """Connects to the coordinator and begins to take orders."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether `wait` would return at once."""
        return self._end.done()

    def wait(self, timeout_s: float) -> AgentEnd:
        """The end of this agent; then no worker of it is left.

        Raises:
          TimeoutError: it has not ended yet.
          Exception: whatever ended it that is not an end an agent should have.
        """
        return self._end.result(timeout_s)

    def forward(self, number: Signals) -> None:
        """Sends a signal to every worker."""
        self._workers.forward(number)

    def close(self, timeout_s: float) -> AgentEnd:
        """Ends every worker at once, whatever the coordinator says, then the agent. See `wait`."""
        self._closing.set()
        if self._call is not None:
            self._call.cancel()
        return self.wait(timeout_s)

    def _run(self) -> None:
        try:
            end = self._serve()
        except BaseException as error:
            self._end.set_exception(error)
        else:
            self._end.set_result(end)

    def _serve(self) -> AgentEnd:
        with grpc.insecure_channel(self._address, options=self._options) as channel:
            self._outgoing.put(control_pb2.FromAgent(hello=self._hello))
            self._call = call = control_pb2_grpc.ControlStub(channel).Agent(
                iter(self._outgoing.get, None),
                metadata=self._metadata,
                wait_for_ready=True,
            )
            unanswered = threading.Timer(CONNECT_LIMIT_S, call.cancel)
            unanswered.daemon = True
            unanswered.start()
            try:
                if self._closing.is_set():
                    return AgentEnd(130, "closed before it began")
                for message in call:
                    unanswered.cancel()
                    if message.WhichOneof("message") == "shutdown":
                        self._workers.kill_all()
                        self._say_farewell(call)
                        return AgentEnd(message.shutdown.exit_code, message.shutdown.reason)
                    self._obey(message)
                return self._lost("it ended the connection")
            except grpc.RpcError:
                return self._lost(f"{call.code().name}: {call.details()}")
            finally:
                unanswered.cancel()
                self._workers.kill_all()
                self._outgoing.put(None)  # lets the thread end that takes messages from the queue
                call.cancel()
                if self._relay is not None:
                    self._relay.close()

    def _lost(self, evidence: str) -> AgentEnd:
        if self._closing.is_set():
            return AgentEnd(130, "closed")
        if self._relay is None:
            return AgentEnd(
                4,
                f"cannot join the coordinator at {self._address} ({evidence}). "
                "Check the address, that the coordinator runs, and that its secret is the one given here.",
            )
        return AgentEnd(
            4,
            f"lost the coordinator at {self._address} ({evidence}). The workers of this host were ended. "
            "Look for the reason in the coordinator's output.",
        )

    def _obey(self, message: control_pb2.ToAgent) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                self._num_nodes = message.welcome.num_nodes
                self._relay = Relay(message.welcome.jax_address)
            case "start":
                self._start(wire.identity_value(message.start.identity))
            case "kill":
                end = self._workers.dump_and_kill if message.kill.dump_stacks else self._workers.kill
                end(wire.identity_value(message.kill.identity))
            case other:
                raise ValueError(f"the coordinator sent {other!r}, which this version of the agent does not know")

    def _start(self, identity: Identity) -> None:
        if self._relay is None:
            raise ValueError("the coordinator sent a start before its welcome")
        environment = self._environment(identity, self._num_nodes, self._relay.address)
        try:
            self._workers.start(identity, environment)
        except OSError:
            # The coordinator's budget of restarts decides what becomes of it, as of any other failed start.
            self._report_exit(identity, Exit(CANNOT_START, traceback.format_exc(), time.time()))

    def _say_farewell(self, call: _Stream) -> None:
        """Lets the coordinator read the exits that were just reported."""
        self._outgoing.put(None)
        limit = threading.Timer(FAREWELL_LIMIT_S, call.cancel)
        limit.start()
        try:
            for _ in call:  # nothing that arrives now matters any more
                pass
        except grpc.RpcError:
            if call.code() not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE):
                raise
        finally:
            limit.cancel()

    def _report_start(self, identity: Identity, pid: int) -> None:
        started = control_pb2.Started(identity=wire.identity_message(identity), pid=pid)
        self._outgoing.put(control_pb2.FromAgent(started=started))

    def _report_exit(self, identity: Identity, end: Exit) -> None:
        exited = control_pb2.Exited(
            identity=wire.identity_message(identity),
            exit_code=end.exit_code,
            traceback=end.traceback,
            time=end.ended,
            stuck_at=end.stuck_at,
        )
        self._outgoing.put(control_pb2.FromAgent(exited=exited))
        if end.traceback and self.first_failure is None:
            self.first_failure = Failure(identity, end.exit_code, end.traceback)
