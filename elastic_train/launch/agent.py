"""The supervisor of one host: starts, watches and ends worker processes as the coordinator says.

It decides nothing, and imports no jax: a process that holds no accelerator can always be killed, and reaps.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from signal import SIGTERM, Signals
from typing import NamedTuple, Protocol
from uuid import uuid4

import grpc

from elastic_train.coordinator import control_pb2, control_pb2_grpc, wire
from elastic_train.coordinator.security import PLAIN, Tls, open_channel
from elastic_train.errors import as_utf8
from elastic_train.launch.environment import JaxRuntime
from elastic_train.launch.processes import Exit, WorkerProcesses
from elastic_train.launch.relay import Relay
from elastic_train.launch.spares import Spares
from elastic_train.launch.starts import EnvironmentOf, Starts
from elastic_train.membership.group import Identity, name_slots

SAY_S = 2.0
"""After this long without an answer an agent says whom it waits for."""

RETRY_S = 1.0
"""Pause between the loss of the coordinator and the next attempt to reach it."""

FAREWELL_LIMIT_S = 2.0
"""How long the coordinator may take to read the last exits after it has asked for a shutdown."""

CANNOT_START = 127
"""Exit code reported for a worker whose process could not be started, as a shell does."""


class _Stream(Protocol):
    """The open call, as gRPC gives it."""

    def __iter__(self) -> Iterator[control_pb2.ToAgent]: ...
    def cancel(self) -> bool: ...
    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str: ...


class _Lost(NamedTuple):
    """A connection that is over, though the job may not be."""

    evidence: str
    again: bool  # whether it could help to try again


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
      environment: (identity, JAX's coordination service) -> environment of that worker.
      log_dir: an existing directory for the workers' output.
      host: what the coordinator should call this host.
      keepalive_s: a coordinator that is silent for twice this long counts as lost.
      patience_s: how long to try to reach the coordinator at the start.
      rejoin: whether to try as long again when it is lost.
      handover_s: how long its workers may take then to leave their state here and end; those that have not are killed.
      spare: how many slots besides it could fill, if the job grows.
      warm: what holds processes ready for its workers; the agent starts it and closes it.
      tls: this host's files for TLS.
      on_note: shows a line to the person who watches.

    Attributes:
      first_failure: of a worker.
      num_joined: how often a coordinator has taken it.
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
        patience_s: float = 30.0,
        *,
        rejoin: bool = False,
        handover_s: float = 0.0,
        spare: int = 0,
        warm: Spares | None = None,
        tls: Tls = PLAIN,
        on_note: Callable[[str], None] = print,
    ) -> None:
        self._address = coordinator_address
        self._metadata = wire.secret_metadata(secret)
        self._open_channel = partial(open_channel, coordinator_address, keepalive_s, tls)
        self._hello = control_pb2.AgentHello(host=host, slots=list(slots), id=uuid4().hex, spare=spare)
        self._handover_s = handover_s
        self._patience_s = patience_s
        self._rejoin = rejoin
        self._on_note = on_note
        self._outgoing: queue.SimpleQueue[control_pb2.FromAgent | None] = queue.SimpleQueue()
        self._workers = WorkerProcesses(command, log_dir, self._report_start, self._report_exit)
        self._starts = Starts(self._workers, environment, warm)
        self._relay: Relay | None = None
        self._jax: JaxRuntime | None = None
        # Guards what follows.
        self._lock = threading.Lock()
        self._leaving = False
        self._num_living = 0
        self._closing = threading.Event()
        self._call: _Stream | None = None
        self._end: Future[AgentEnd] = Future()
        self._thread = threading.Thread(target=self._run, name="agent", daemon=True)
        self.first_failure: Failure | None = None
        self.num_joined = 0

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

    def signal(self, identity: Identity, number: Signals) -> bool:
        """Sends a signal to one worker. Returns whether it was there."""
        return self._workers.signal(identity, number)

    def leave(self, reason: str) -> None:
        """Has the workers leave after a commit and then ends, with exit code 130. None is started any more."""
        with self._lock:
            if self._leaving:
                return
            self._leaving = True
            leaving = control_pb2.AgentLeaving(reason=reason)
            self._outgoing.put(control_pb2.FromAgent(leaving=leaving))
            self._end_if_left()
        self._workers.forward(SIGTERM)
        if self._jax is None:  # no coordinator to tell
            self._closing.set()
            if self._call is not None:
                self._call.cancel()

    def close(self, timeout_s: float) -> AgentEnd:
        """Ends every worker at once, whatever the coordinator says, then the agent. See `wait`."""
        self._closing.set()
        if self._call is not None:
            self._call.cancel()
        return self.wait(timeout_s)

    def _run(self) -> None:
        try:
            try:
                self._starts.open()
                end = self._serve()
            finally:
                self._starts.close()
        except BaseException as error:
            self._end.set_exception(error)
        else:
            self._end.set_result(end)

    def _serve(self) -> AgentEnd:
        """One connection after the other, until the job is over or the coordinator is given up."""
        joined_before = False
        deadline = time.monotonic() + self._patience_s
        while True:
            self._jax = None
            end = self._serve_connection(max(0.0, deadline - time.monotonic()))
            if isinstance(end, AgentEnd):
                return end
            if self._closing.is_set():
                return AgentEnd(130, "closed")
            if self._leaving:
                return AgentEnd(130, "left the job on request")
            joined = self._jax is not None
            if joined:
                deadline = time.monotonic() + self._patience_s
            may_try = (self._rejoin or not (joined or joined_before)) and end.again and time.monotonic() < deadline
            lost = f"lost the coordinator at {self._address} ({end.evidence}). The workers of this host have ended."
            if joined and may_try:
                self._describe_states()
                kept = [(each.slot, each.step) for each in self._hello.carried]
                states = "".join(f" Kept: the state of slot {slot} after step {step}." for slot, step in kept)
                self._on_note(f"{lost}{states} Trying to reach it again, for up to {self._patience_s:g} s.")
            elif joined:
                return AgentEnd(4, f"{lost} Look for the reason in the coordinator's output.")
            elif not may_try:
                return AgentEnd(4, self._cannot_join(end.evidence, joined_before))
            joined_before = joined_before or joined
            if self._closing.wait(RETRY_S):
                return AgentEnd(130, "closed")

    def _serve_connection(self, patience_s: float) -> AgentEnd | _Lost:
        """Connects and does what the coordinator says. When it returns no worker is left."""
        with self._lock:
            self._outgoing = outgoing = queue.SimpleQueue()
        self._describe_states()
        outgoing.put(control_pb2.FromAgent(hello=self._hello))
        with self._open_channel() as channel:
            self._call = call = control_pb2_grpc.ControlStub(channel).Agent(
                iter(outgoing.get, None),
                metadata=self._metadata,
                wait_for_ready=True,
            )
            timers = [
                threading.Timer(patience_s, call.cancel),
                threading.Timer(SAY_S, self._say_whom_we_wait_for),
            ]
            for timer in timers:
                timer.daemon = True
                timer.start()
            try:
                if self._closing.is_set():
                    return AgentEnd(130, "closed before it began")
                for message in call:
                    for timer in timers:
                        timer.cancel()
                    if message.WhichOneof("message") == "shutdown":
                        self._workers.kill_all()
                        self._say_farewell(call)
                        return AgentEnd(message.shutdown.exit_code, message.shutdown.reason)
                    self._obey(message)
                return _Lost("it ended the connection", again=False)
            except grpc.RpcError:
                if call.code() is grpc.StatusCode.CANCELLED and self._jax is None:
                    return _Lost(f"no answer within {self._patience_s:g} s", again=False)
                evidence = f"{call.code().name}: {call.details()}"
                # The workers have lost it, too. Their connections to JAX's service must stay open until they have gone.
                self._workers.wait_all(self._handover_s, self._closing)
                return _Lost(evidence, again=call.code() is grpc.StatusCode.UNAVAILABLE)
            finally:
                for timer in timers:
                    timer.cancel()
                self._workers.kill_all()
                outgoing.put(None)  # lets the thread end that takes messages from the queue
                call.cancel()
                if self._relay is not None:
                    self._relay.close()

    def _say_whom_we_wait_for(self) -> None:
        self._on_note(f"waiting for the coordinator at {self._address}, for up to {self._patience_s:g} s")

    def _cannot_join(self, evidence: str, joined_before: bool) -> str:
        again = " again" if joined_before else ""
        return (
            f"cannot join the coordinator at {self._address}{again} ({evidence}). Check the address, that the "
            "coordinator runs and its ports are open to this host, and that its secret (and TLS files) fit those here."
        )

    def _obey(self, message: control_pb2.ToAgent) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                welcome = message.welcome
                # The service is on the coordinator's host, which this host may know by another address than that one.
                host, port = self._address.rpartition(":")[0], welcome.jax_address.rpartition(":")[2]
                self._relay = Relay(f"{host}:{port}")
                self._jax = JaxRuntime(self._relay.address, welcome.num_nodes, welcome.jax_tls, welcome.generation)
                self.num_joined += 1
            case "start":
                self._start(wire.identity_value(message.start.identity), message.start.restore)
            case "kill":
                end = self._workers.dump_and_kill if message.kill.dump_stacks else self._workers.kill
                end(wire.identity_value(message.kill.identity))
            case "refused":
                slots = name_slots(message.refused.slots)
                self._on_note(f"this host does not fill {slots}: {message.refused.reason}")
            case other:
                raise ValueError(f"the coordinator sent {other!r}, which this version of the agent does not know")

    def _start(self, identity: Identity, restore: bool) -> None:
        if self._jax is None:
            raise ValueError("the coordinator sent a start before its welcome")
        with self._lock:
            self._num_living += 1
            leaving = self._leaving
        if leaving:  # it did not know that yet
            self._report_exit(identity, Exit(0, "", time.time()))
            return
        if identity.slot not in self._hello.slots:  # it came with a job that has grown
            self._hello.slots.append(identity.slot)
            self._hello.spare -= 1
        try:
            self._starts.start(identity, self._jax, restore)
        except OSError:
            # The coordinator's budget of restarts decides what becomes of it, as of any other failed start.
            self._report_exit(identity, Exit(CANNOT_START, traceback.format_exc(), time.time()))

    def _describe_states(self) -> None:
        """Says in the next hello which states are here."""
        del self._hello.carried[:]
        for state in self._starts.states():
            self._hello.carried.add(**state._asdict())

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

    def _report_start(self, identity: Identity, pid: int, warm: bool) -> None:
        started = control_pb2.Started(identity=wire.identity_message(identity), pid=pid, warm=warm)
        self._outgoing.put(control_pb2.FromAgent(started=started))

    def _report_exit(self, identity: Identity, end: Exit) -> None:
        exited = control_pb2.Exited(
            identity=wire.identity_message(identity),
            exit_code=end.exit_code,
            traceback=as_utf8(end.traceback),
            time=end.ended,
            stuck_at=end.stuck_at,
        )
        with self._lock:
            self._outgoing.put(control_pb2.FromAgent(exited=exited))
            self._num_living -= 1
            self._end_if_left()
        if end.traceback and self.first_failure is None:
            self.first_failure = Failure(identity, end.exit_code, end.traceback)

    def _end_if_left(self) -> None:
        """Closes the stream after the last exit, which is what the coordinator waits for. Holds the lock."""
        if self._leaving and self._num_living == 0:
            self._outgoing.put(None)
