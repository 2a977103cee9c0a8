"""The worker's end of the control plane. Imports neither jax nor numpy: it must be able to report early."""

from __future__ import annotations

import dataclasses
import json
import threading
import traceback as traceback_module
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import grpc

from elastic_train.coordinator import control_pb2, control_pb2_grpc, security, wire
from elastic_train.coordinator.outbox import Outbox
from elastic_train.errors import ElasticTrainError, as_utf8
from elastic_train.membership.group import Identity, View
from elastic_train.telemetry.phase_times import PhaseTimes

if TYPE_CHECKING:
    from elastic_train.checkpoint.saves import Save

HELLO_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 2.0


class _Call(Protocol):
    """The open stream, as gRPC gives it."""

    def __iter__(self) -> Iterator[control_pb2.ToWorker]: ...
    def cancel(self) -> bool: ...


def _ignore(_: object) -> None:
    """Until the worker's main installs its callbacks. What they would tell is kept as state as well."""


class Link:
    """One worker's connection. All methods may be called from any thread.

    Only `hello`, `close` and the `wait_` methods wait.

    Attributes:
      generation: that of the coordinator.
      candidates: joiners that are ready now.
      dead: nodes that the coordinator has named dead so far.
      stop_requested: why all should agree on a stop after a commit; None while nobody asks.
      drained: this worker is to leave after a commit, since its slot is to be empty.
      stopped_now: set when the coordinator says that all is over.
      saved_step: the newest step that any member has saved.
      times: how long this worker was in which phase.
      has_checkpoints: whether whoever begins without a state shall load one.
      on_expect: called with the view that this worker will be in if it is admitted next. Must not block.
      on_abort: called with a dead node id, at once, in the reading thread. Must not block.
      on_stopped_now: called when `stopped_now` is set. Must not block.
      on_evict: called with the reason when this worker is to exit: what it holds is out of date.
      on_lost: called with the reason when the connection broke before `close` and before `stopped_now`.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        identity: Identity,
        keepalive_s: float,
        tls: security.Tls = security.PLAIN,
        generation: int = 0,
    ) -> None:
        self.identity = identity
        self.generation = generation
        self.candidates: tuple[Identity, ...] = ()
        self.dead: frozenset[int] = frozenset()
        self.stop_requested: str | None = None
        self.drained = False
        self.stopped_now = threading.Event()
        self.saved_step = 0
        self.has_checkpoints = False
        self.times = PhaseTimes()
        self._ended_step = self._save_asked = self._save_answered = 0
        self.on_abort: Callable[[int], None] = _ignore
        self.on_expect: Callable[[View], None] = _ignore
        self.on_stopped_now: Callable[[str], None] = _ignore
        self.on_evict: Callable[[str], None] = _ignore
        self.on_lost: Callable[[str], None] = _ignore
        self._address = address
        self._metadata = wire.secret_metadata(secret)
        self._channel = security.open_channel(address, keepalive_s, tls)
        # Guards all below, and tells of changes in both directions.
        self._changed = threading.Condition()
        self._outbox = Outbox(self._changed)
        self._formed: View | None = None
        self._lost: str | None = None
        self._call: _Call | None = None
        self._reader: threading.Thread | None = None

    # What this worker tells -----------------------------------------------------------------------

    def hello(self, pid: int, host: str, versions: str) -> None:
        """Connects. Raises ElasticTrainError if the coordinator refuses, or does not answer within 30 s."""
        hello = control_pb2.Hello(
            identity=wire.identity_message(self.identity),
            pid=pid,
            host=host,
            versions=versions,
            generation=self.generation,
        )
        self._outbox.put_first(control_pb2.FromWorker(hello=hello))
        stub = control_pb2_grpc.ControlStub(self._channel)
        call = stub.Worker(self._outbox.outgoing(), metadata=self._metadata, wait_for_ready=True)
        self._call = call
        self._reader = threading.Thread(target=self._read, args=(call,), name="control-read", daemon=True)
        self._reader.start()
        with self._changed:
            self._changed.wait_for(lambda: self._outbox.is_open or self._lost is not None, HELLO_TIMEOUT_S)
            if self._outbox.is_open:
                return
            reason = self._lost or f"no answer within {HELLO_TIMEOUT_S:g} s"
        self.close()
        raise ElasticTrainError(
            f"slot {self.identity.slot}'s worker cannot join the coordinator at {self._address}: {reason}"
        )

    def ready(self, schema: Mapping[str, str], start_s: Mapping[str, float] | None = None) -> None:
        """Everything slow is done: this worker could join at once. `schema` says what it runs; see
        `membership.schema`. `start_s`: what its start took, by part."""
        self._outbox.put(control_pb2.FromWorker(ready=control_pb2.Ready(schema=schema, start_s=start_s)))

    def noted(self, event: str, show: str, **fields: object) -> None:
        """A line for the events, and one for the display. `fields` hold JSON."""
        noted = control_pb2.Noted(event=event, fields=json.dumps(fields), show=show)
        self._outbox.put(control_pb2.FromWorker(noted=noted))

    def viewed(
        self,
        view: View,
        reason: str,
        gone: Sequence[Identity],
        came: Sequence[Identity],
        step: int,
        time: float,
    ) -> None:
        """This member is in `view` now. `time` is in seconds since the Unix epoch."""
        changed = control_pb2.ViewChanged(
            view=wire.view_message(view),
            reason=reason,
            gone=wire.identity_messages(gone),
            came=wire.identity_messages(came),
            step=step,
            time=time,
        )
        self._outbox.put(control_pb2.FromWorker(view=changed))

    def record(self, record: Mapping[str, object], flush: bool = False, send: bool = True) -> None:
        """Keeps the record of a committed step until the coordinator has it on disk.

        Args:
          record: JSON values; needs an integer `step`.
          flush: send it now instead of with others within 50 ms.
          send: whether it is sent at all. The first member sends its records, the others keep theirs, in case it dies.
        """
        self._outbox.record(record, flush, send)

    def pending_records(self) -> list[str]:
        """Records, as JSON, that the coordinator may not have on disk, oldest first."""
        return self._outbox.pending_records()

    def restore(self, records: Sequence[str]) -> None:
        """Keeps the records of the worker whose state this one has; see `pending_records`."""
        self._outbox.restore(records)

    def resend(self) -> None:
        """Sends all unacknowledged records (again): this member is the first now, or may be alone in having them."""
        self._outbox.resend()

    def saved(self, save: Save) -> None:
        """A save has ended."""
        message = control_pb2.Saved(step=save.step, json=json.dumps(dataclasses.asdict(save)))
        self._outbox.put(control_pb2.FromWorker(saved=message))

    def loaded(self, step: int, samples: int, path: str, seconds: float) -> None:
        """This member has the state out of a checkpoint."""
        loaded = control_pb2.Loaded(step=step, samples=samples, path=path, seconds=seconds)
        self._outbox.put(control_pb2.FromWorker(loaded=loaded))

    def set_aside(self, text: str) -> None:
        """A checkpoint was found damaged."""
        self._outbox.put(control_pb2.FromWorker(set_aside=control_pb2.SetAside(text=as_utf8(text))))

    @property
    def save_requested(self) -> int:
        """The number of the newest request for a save that was not answered; 0 if there is none."""
        return self._save_asked if self._save_asked > self._save_answered else 0

    def phase(self, name: str, step: int) -> None:
        """Notes what this worker does now and how many steps it has committed; -1 says nothing of them. Costs next
        to nothing. Whoever does one thing for long says so again with each part that is done."""
        self.times.enter(name)
        self._outbox.phase(name, step)

    def worked(self, seconds: float, num_shards: int) -> None:
        """Notes that this worker's own part of a step, so many shards, has taken so long. Costs next to nothing."""
        self._outbox.worked(seconds, num_shards)

    def failed(self, step: int, fatal: bool, startup: bool, traceback: str) -> None:
        """User code raised. `fatal`: this worker leaves because of it."""
        failed = control_pb2.Failed(step=step, fatal=fatal, startup=startup, traceback=as_utf8(traceback))
        self._outbox.put(control_pb2.FromWorker(failed=failed))

    def finished(
        self,
        status: str,
        step: int,
        samples: int,
        params_sha256: str,
        state_sha256: str,
        result: Mapping[str, object],
        message: str = "",
    ) -> None:
        """This worker trains no more. `status` is "done", "stopped", "failed" or "gave_up"; `result` holds JSON;
        `message` says why, where there is no traceback to tell it."""
        finished = control_pb2.Finished(
            status=status,
            step=step,
            samples=samples,
            params_sha256=params_sha256,
            state_sha256=state_sha256,
            result=json.dumps(result),
            message=as_utf8(message),
        )
        self._outbox.put(control_pb2.FromWorker(finished=finished))

    def close(self) -> None:
        """Sends what is queued, then ends the connection; gives up after 2 s."""
        self._outbox.close()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(CLOSE_TIMEOUT_S)
        self._channel.close()

    # What this worker waits for -------------------------------------------------------------------

    def wait_formed(self, timeout: float) -> View | None:
        """The newest view the coordinator has put this worker into, once.

        None if there is none within `timeout` seconds; at once when the connection is lost or all is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._formed or self.stopped_now.is_set() or self._lost is not None, timeout)
            view, self._formed = self._formed, None
            return view

    def wait_dead(self, nodes: frozenset[int], timeout: float) -> bool:
        """Whether the coordinator has named any of `nodes` dead, or does so within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(nodes & self.dead), timeout)

    def wait_last_save(self, step: int, nodes: frozenset[int], timeout: float) -> bool | None:
        """True if the save of this step, at the end of training, has ended; False if all of `nodes` are dead; None if
        neither is so within `timeout` seconds."""

        def news() -> bool | None:
            if self.saved_step >= step or self._ended_step >= step:
                return True
            return False if nodes <= self.dead else None

        with self._changed:
            self._changed.wait_for(lambda: news() is not None, timeout)
            return news()

    # The reading thread ---------------------------------------------------------------------------

    def _read(self, call: _Call) -> None:
        try:
            for message in call:
                self._receive(message)
            reason = "the coordinator closed the connection"
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except Exception:
            # A callback has failed. Without this thread the worker would be deaf: as good as lost.
            call.cancel()
            reason = f"handling a message of the coordinator failed:\n{traceback_module.format_exc()}"
        with self._changed:
            self._lost = reason
            expected = self._outbox.is_closing or self.stopped_now.is_set() or not self._outbox.is_open
            self._outbox.drop()
        if not expected:
            self.on_lost(reason)

    def _receive(self, message: control_pb2.ToWorker) -> None:
        kind = message.WhichOneof("message")
        with self._changed:
            match kind:
                case "welcome":
                    self._outbox.open(message.welcome.report_interval_s)
                    self._save_state(message.welcome.save_state)
                    self._save_asked = message.welcome.save_asked.number
                case "save_state":
                    self._save_state(message.save_state)
                case "save_asked":
                    self._save_asked = message.save_asked.number
                case "candidates":
                    self.candidates = tuple(map(wire.identity_value, message.candidates.joiners))
                case "form":
                    self._formed = wire.view_value(message.form.view)
                case "abort":
                    self.dead |= frozenset(message.abort.nodes)
                case "stop":
                    self.stop_requested = message.stop.reason
                    if message.stop.now:
                        self.stopped_now.set()
                case "leave":
                    self.drained = True
                case "ack":
                    self._outbox.acknowledged(message.ack.step)
            self._changed.notify_all()
        if kind == "abort":
            for node in message.abort.nodes:
                self.on_abort(node)
        elif kind == "stop" and message.stop.now:
            self.on_stopped_now(message.stop.reason)
        elif kind == "expect":
            self.on_expect(wire.view_value(message.expect.view))
        elif kind == "evict":
            self.on_evict(message.evict.reason)

    def _save_state(self, state: control_pb2.SaveState) -> None:
        self.saved_step, self._ended_step, self._save_answered = state.saved_step, state.ended_step, state.answered
        self.has_checkpoints = state.has_checkpoints
