"""What workers say on their streams. From the event loop's thread only."""

from __future__ import annotations

import json

import grpc

from elastic_train.config import report_interval_s
from elastic_train.coordinator import control_pb2, wire
from elastic_train.coordinator.checkpoints import Checkpoints
from elastic_train.coordinator.commits import Commits
from elastic_train.coordinator.connections import Connections
from elastic_train.coordinator.decisions import Decisions
from elastic_train.coordinator.ending import Ending
from elastic_train.coordinator.reports import Reports
from elastic_train.coordinator.streams import Stream
from elastic_train.coordinator.watch import Note, Watch
from elastic_train.membership import roster_events as r
from elastic_train.membership.group import Identity
from elastic_train.membership.schema import Schema


class WorkerStreams:
    """Makes events of the roster of what workers say, and hands on what concerns others.

    Args:
      decisions, connections, ending, reports, watch, checkpoints, commits: as in `service.Coordinator`.
      note: an event, and a line for the display.
      generation: the coordinator's.
    """

    def __init__(
        self,
        decisions: Decisions,
        connections: Connections,
        ending: Ending,
        reports: Reports,
        watch: Watch,
        checkpoints: Checkpoints,
        commits: Commits,
        note: Note,
        generation: int,
    ) -> None:
        self._decisions, self._connections, self._ending = decisions, connections, ending
        self._reports, self._watch, self._checkpoints, self._commits = reports, watch, checkpoints, commits
        self._note, self._generation = note, generation
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
        limits = self._decisions.roster.limits
        welcome.report_interval_s = report_interval_s(limits.faults.step_timeout_s, limits.num_slots)
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
