"""What workers say on their streams, and what it means that a stream has ended. From the event loop's thread only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

import grpc

from elastic_train.config import FaultConfig, report_interval_s
from elastic_train.coordinator import control_pb2, wire
from elastic_train.coordinator.checkpoints import Checkpoints
from elastic_train.coordinator.commits import Commits, Records
from elastic_train.coordinator.connections import Connections
from elastic_train.coordinator.decisions import Decisions
from elastic_train.coordinator.ending import Ending
from elastic_train.coordinator.loop import EventLoop
from elastic_train.coordinator.reports import Reports
from elastic_train.coordinator.streams import Stream
from elastic_train.coordinator.watch import Note, Watch
from elastic_train.membership import roster_events as r
from elastic_train.membership.group import Identity
from elastic_train.membership.schema import Schema

LEAVE_TIMEOUT_S = 3.0
"""How long a worker that has closed its stream in order may take to exit before it counts as silent."""

EXIT_REPORT_S = 1.0
"""How long an agent may take to report the exit of a worker whose connection broke, before the worker is killed."""


class WorkerStreams:
    """Makes events of the roster of what workers say, and hands on what concerns others.

    Args:
      decisions, loop, connections, ending, reports, watch, checkpoints, records: as in `service.Coordinator`.
      note: an event, and a line for the display.
      show: a line for the display.
      faults: time limits.
      generation: the coordinator's.
    """

    def __init__(
        self,
        decisions: Decisions,
        loop: EventLoop,
        connections: Connections,
        ending: Ending,
        reports: Reports,
        watch: Watch,
        checkpoints: Checkpoints,
        records: Records,
        note: Note,
        show: Callable[[str], None],
        faults: FaultConfig,
        generation: int,
    ) -> None:
        self._decisions, self._loop, self._connections, self._ending = decisions, loop, connections, ending
        self._reports, self._watch, self._checkpoints = reports, watch, checkpoints
        self._note, self._show = note, show
        self._faults, self._generation = faults, generation
        self._commits = Commits(loop, records, self._acknowledge, self._show_lost_records)
        self._schema: Schema = {}
        self._noted_by: dict[tuple[str, str], Identity] = {}

    def message(self, stream: Stream, message: control_pb2.FromWorker) -> None:
        """Something has arrived."""
        kind = message.WhichOneof("message")
        if kind == "hello":
            self._hello(stream, message.hello)
            return
        identity = self._connections.identity_of(stream)
        if identity is None:
            stream.reject(grpc.StatusCode.FAILED_PRECONDITION, f"a worker says hello first, not {kind!r}")
            return
        apply = self._decisions.apply
        match kind:
            case "progress" if not self._decisions.roster.is_living(identity):
                # A zombie: its steps may be those of a group that is no more. The roster tells it to exit.
                apply(r.Stepped(identity, message.progress.step))
            case "ready":
                schema, start_s = self._shared(dict(message.ready.schema)), dict(message.ready.start_s)
                apply(r.Ready(identity, schema, start_s))
            case "view":
                changed = message.view
                view = wire.view_value(changed.view)
                self._watch.viewed(view.epoch, changed.step)
                apply(r.Viewed(identity, view, changed.step), reported_time=changed.time, reason=changed.reason)
            case "progress":
                self._progress(stream, identity, message.progress)
            case "failed":
                failed = message.failed
                apply(r.Failed(identity, failed.step, failed.fatal, failed.startup, failed.traceback))
            case "noted":
                self._noted(stream, identity, message.noted)
            case "finished":
                self._finished(identity, message.finished)
            case "saved":
                self._checkpoints.saved(identity, message.saved)
            case "loaded":
                self._checkpoints.loaded(identity, message.loaded)
            case "set_aside":
                self._checkpoints.set_aside(message.set_aside)

    def ended(self, stream: Stream, broken: bool) -> None:
        """A stream is over; `broken` if it was not closed in order."""
        identity, had_place = self._connections.remove_worker(stream)
        if identity is None or self._connections.closed or not had_place:
            return  # of a stray; whoever has its node's place is not silent because of it
        # A process that ends loses its connection just before its agent reports the exit, which says more.
        limit_s = EXIT_REPORT_S if broken else LEAVE_TIMEOUT_S
        reason = self._how_lost(stream, broken) + f", and no exit was reported within {limit_s:g} s"
        self._loop.after(f"leave {identity.node}", limit_s, partial(self._silent, identity, reason))

    def exited(self, identity: Identity) -> None:
        """The exit that was waited for after the end of a stream has been reported."""
        self._loop.cancel(f"leave {identity.node}")

    def _how_lost(self, stream: Stream, broken: bool) -> str:
        """gRPC does not say why a connection broke, but keepalive takes this long, and other causes rarely do."""
        if not broken:
            return "its control connection was closed"
        quiet_s = time.monotonic() - stream.heard
        if quiet_s > 1.9 * self._faults.keepalive_s:
            return f"no answer for {quiet_s:.0f} s (faults.keepalive_s = {self._faults.keepalive_s:g})"
        return "its control connection broke"

    def _silent(self, identity: Identity, reason: str) -> None:
        if identity.node not in self._ending.exited:
            self._decisions.apply(r.Silent(identity, reason))

    def _hello(self, stream: Stream, hello: control_pb2.Hello) -> None:
        identity = wire.identity_value(hello.identity)
        if hello.generation != self._generation:  # its node id may be that of a worker of this generation
            reason = f"it belongs to generation {hello.generation}, and this is generation {self._generation}"
            stream.send(control_pb2.ToWorker(evict=control_pb2.Evict(reason=reason)))
            return
        if not self._connections.add_worker(stream, identity):
            stream.reject(grpc.StatusCode.ALREADY_EXISTS, f"{identity} is connected already")
            return
        welcome = self._checkpoints.welcome()
        num_slots = self._decisions.roster.limits.num_slots
        welcome.report_interval_s = report_interval_s(self._faults.step_timeout_s, num_slots)
        stream.send(control_pb2.ToWorker(welcome=welcome))
        self._decisions.apply(r.Hello(identity, hello.pid, hello.host), versions=hello.versions)
        # One that was told to exit gets no place here: nothing that is meant for its node, or needs it, concerns it.
        if self._decisions.roster.is_living(identity):
            self._connections.workers[identity.node] = stream

    def _shared(self, schema: Schema) -> Schema:
        """All workers run the same, and say so at length: it is kept once."""
        if schema != self._schema:
            self._schema = schema
        return self._schema

    def _progress(self, stream: Stream, identity: Identity, progress: control_pb2.Progress) -> None:
        if self._reports.add(identity, progress):
            self._decisions.apply(r.Stepped(identity, progress.step))
        # The summary is written at the end of the job; what comes later would not agree with it.
        if progress.records and self._ending.end is None:
            try:
                self._commits.add([json.loads(record) for record in progress.records])
            except (ValueError, KeyError, TypeError) as error:
                stream.reject(grpc.StatusCode.INVALID_ARGUMENT, f"{identity} sent a record that is none: {error!r}")

    def _acknowledge(self, step: int) -> int:
        return self._connections.tell_all(control_pb2.ToWorker(ack=control_pb2.Ack(step=step)))

    def _show_lost_records(self, first_step: int, last_step: int) -> None:
        """The event is written by whoever keeps the records."""
        self._show(
            f"The records of steps {first_step} to {last_step} are lost: all members that had them died"
            " before they were sent. The steps themselves count."
        )

    def _noted(self, stream: Stream, identity: Identity, noted: control_pb2.Noted) -> None:
        # The first member speaks for all, but the last note of a job comes from all, each before its own end.
        if self._noted_by.setdefault((noted.event, noted.fields), identity) != identity:
            return
        try:
            self._note(noted.event, noted.show, **json.loads(noted.fields))
        except (ValueError, TypeError) as error:
            stream.reject(grpc.StatusCode.INVALID_ARGUMENT, f"{identity} sent a note that is none: {error!r}")

    def _finished(self, identity: Identity, finished: control_pb2.Finished) -> None:
        if self._decisions.roster.is_living(identity):
            self._ending.worker_finished(identity.slot, finished)
        self._decisions.apply(r.Finished(identity, finished.status, finished.message, finished.step))
