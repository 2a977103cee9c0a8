"""The coordinator: runs the roster. What arrives by gRPC becomes events; actions are carried out in order.

One thread takes all decisions and makes all changes. The others only put work into its inbox.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

import grpc

from elastic_train.config import report_interval_s
from elastic_train.coordinator import control_pb2, security, wire
from elastic_train.coordinator.actions import Actions
from elastic_train.coordinator.checkpoints import Checkpoints
from elastic_train.coordinator.commits import Commits, Records
from elastic_train.coordinator.connections import Connections
from elastic_train.coordinator.ending import Ending, OnEnd, shutdown_message
from elastic_train.coordinator.jax_service import JaxService
from elastic_train.coordinator.loop import EventLoop
from elastic_train.coordinator.rejections import Rejections
from elastic_train.coordinator.reports import Reports
from elastic_train.coordinator.streams import Server, Stream
from elastic_train.coordinator.watch import Paces, Watch
from elastic_train.errors import last_error
from elastic_train.membership import roster_events as r
from elastic_train.membership.group import Identity
from elastic_train.membership.roster import Limits, Roster, beginning, refuse_drain
from elastic_train.membership.roster_generations import refuse_resize
from elastic_train.membership.schema import Schema
from elastic_train.telemetry.continuing import Past

ROOM = 32
"""So many workers at least can connect, however few the job has at its start."""

LEAVE_TIMEOUT_S = 3.0
"""How long a worker that has closed its stream in order may take to exit before it counts as silent."""
CLOSE_GRACE_S = 1.0

EXIT_REPORT_S = 1.0
"""How long an agent may take to report the exit of a worker whose connection broke, before the worker is killed."""

Apply = Callable[[Roster, r.Event], tuple[Roster, Iterable[r.Action]]]


class Coordinator:
    """Serves one job from construction until `close`.

    Args:
      limits: sizes, budgets and time limits; also the roster's.
      records: gets each Note as `event` and each record of a committed step as `commit`; steps may come again
        and out of order.
      apply: the state machine, `elastic_train.membership.roster.apply`.
      past: what earlier parts of the run say, whose epochs and incarnations go on.
      has_checkpoints: the run goes on from a checkpoint.
      generation: this coordinator's number; a job gets another one when its JAX service is replaced.
      returning, stop_wanted: see `roster.beginning`.
      bind: "host:port"; port 0 takes a free one. JAX's service listens on the same host, another port.
      host: what callers know this host by; by default the host of `bind`.
      secret: what every caller must know.
      tls: this host's files for TLS, checked already.
      jax_tls: whether JAX's service uses them, too.
      on_note: shows a line to the person who watches.
      on_end: called once, with the End and the last report of each slot that finished.
      on_next_generation: called with the reason when this coordinator shall end, and the next one begin.
      on_resized: called with the new number of slots.
      stall_note_s: say who is where when no step has committed for this long.

    Attributes:
      address, jax_address: "host:port" of the control plane and of JAX's service.
      roster: the newest state; may be read from any thread.

    Raises UsageError if `bind` is taken. If the event loop fails, the job ends with exit code 1.
    """

    def __init__(
        self,
        limits: Limits,
        records: Records,
        *,
        apply: Apply,
        past: Past | None = None,
        has_checkpoints: bool = False,
        generation: int = 0,
        returning: bool = False,
        stop_wanted: str = "",
        bind: str = "127.0.0.1:0",
        host: str = "",
        secret: str,
        tls: security.Tls = security.PLAIN,
        jax_tls: bool = False,
        on_note: Callable[[str], None] | None = None,
        on_end: OnEnd | None = None,
        on_next_generation: Callable[[str], None] | None = None,
        on_resized: Callable[[int], None] | None = None,
        stall_note_s: float = 30.0,
    ) -> None:
        self.roster = _first_roster(limits, past, stop_wanted, returning)
        faults = limits.faults
        self.generation = generation
        self._on_next_generation, self._on_resized = on_next_generation, on_resized
        self._records = records
        self._decide = apply
        self._on_note = on_note
        self._stall_note_s = stall_note_s
        self._loop = EventLoop("coordinator", self._loop_failed)
        self._connections = Connections()
        self._ending = Ending(self._connections, records, self._loop, self._note, on_end)
        self._rejections = Rejections()
        self._jax_tls = jax_tls
        self._keepalive_s = faults.keepalive_s
        self._reports = Reports()
        self._watch = Watch(faults, self._reports, self._apply, self._note)
        self._paces = Paces(faults, self._reports, limits.min_workers, self._apply, self._note)
        self._commits = Commits(self._loop, records, self._acknowledge, self._show_lost_records)
        self._checkpoints = Checkpoints(
            self._connections.tell_all,
            lambda name, /, **fields: records.event(name, **fields),
            lambda text: None if on_note is None else on_note(text),
            has_checkpoints,
            past.saved_step if past else 0,
        )
        self._schema: Schema = {}
        self._noted_by: dict[tuple[str, str], Identity] = {}
        self._stop_calls = 0
        self._failed = False
        self._closing = False
        self._step_timeout_s = faults.step_timeout_s
        self._look_interval_s = report_interval_s(faults.step_timeout_s)

        # The port first: a port in use is the likeliest error, and cheap to find.
        self._server = Server(self, bind, secret, faults.keepalive_s, 2 * max(limits.num_slots, ROOM) + 16, tls)
        self.address = f"{host or bind.rpartition(':')[0]}:{self._server.port}"
        self._jax = JaxService(
            limits.num_nodes,
            faults.jax_heartbeat_timeout_s,
            host=bind.rpartition(":")[0],
            on_error=lambda error: self._loop.post(partial(self._raise, error)),
            tls=tls.jax_arguments() if jax_tls else None,
        )
        self.jax_address = self._jax.address
        self._actions = Actions(
            self._connections,
            records,
            self._jax,
            self._loop,
            view=lambda: self.roster.view,
            note=self._note,
            timer_over=lambda name: self._apply(r.TimerOver(name)),
            end=self._finish_job,
            next_generation=self._leave_for_the_next,
        )
        self._loop.after("stall", stall_note_s, self._note_stall)
        self._loop.after("watch", self._look_interval_s, self._look)
        self._loop.start()
        self._server.start()

    # For the process that holds the coordinator ---------------------------------------------------

    def status(self) -> dict[str, object]:
        """What `elastic-train status --json` prints."""
        roster = self.roster
        return {
            "generation": self.generation,
            "epoch": roster.view.epoch,
            "step": self._step(),
            "workers": [
                {
                    "slot": slot,
                    "pid": worker.pid,
                    "host": worker.host,
                    "incarnation": worker.identity.incarnation,
                    "state": str(worker.state),
                    "step": worker.step,
                    "shard_time_s": self._paces.shard_time_s(worker.identity),
                }
                for slot, worker in sorted(roster.workers.items())
            ],
        }

    @property
    def step(self) -> int:
        """The newest step that a member has reported."""
        return self._step()

    def wait(self, timeout: float | None) -> r.End | None:
        """The job's end, or None if it goes on after `timeout` seconds."""
        return self._ending.end if self._ending.is_over.wait(timeout) else None

    def wait_left(self, timeout: float) -> bool:
        """Waits until no agent and no worker is connected, as is the case soon after the end."""
        return self._connections.none.wait(timeout)

    def ask_stop(self, now: bool, reason: str) -> None:
        """Asks the members to stop after a commit, or everybody to stop at once. Returns immediately."""
        self._loop.post(partial(self._apply, r.StopAsked(now, reason)))

    def close(self) -> None:
        """Ends all connections, then JAX's service. Worker processes must be gone before: JAX aborts them."""
        if self._closing:
            return
        self._loop.post(self._close_streams)
        self._loop.stop()
        self._server.stop(CLOSE_GRACE_S)
        self._jax.close()

    # Called by gRPC's threads ---------------------------------------------------------------------

    def worker_message(self, stream: Stream, message: control_pb2.FromWorker) -> None:
        self._loop.post(partial(self._from_worker, stream, message))

    def worker_ended(self, stream: Stream, broken: bool) -> None:
        self._loop.post(partial(self._lost_worker, stream, broken))

    def agent_message(self, stream: Stream, message: control_pb2.FromAgent) -> None:
        self._loop.post(partial(self._from_agent, stream, message))

    def agent_ended(self, stream: Stream, broken: bool) -> None:
        self._loop.post(partial(self._lost_agent, stream))

    def status_json(self) -> str:
        return json.dumps(self.status())

    def stop_called(self, reason: str) -> None:
        self._loop.post(partial(self._stop_called, reason))

    def peer_rejected(self, peer: str) -> None:
        self._loop.post(partial(self._peer_rejected, peer, time.monotonic()))

    def save_called(self) -> Future[control_pb2.SaveReply]:
        reply: Future[control_pb2.SaveReply] = Future()
        self._loop.post(partial(self._save_called, reply))
        return reply

    def drain_called(self, slot: int, reason: str) -> Future[str]:
        refusal: Future[str] = Future()
        self._loop.post(partial(self._drain_called, slot, reason, refusal))
        return refusal

    def resize_called(self, workers: int, reason: str) -> Future[str]:
        refusal: Future[str] = Future()
        self._loop.post(partial(self._resize_called, workers, reason, refusal))
        return refusal

    # The event loop: all below runs in its thread -------------------------------------------------

    def _loop_failed(self, error: Exception) -> None:
        """A mistake in here or a full disk: the roster may be wrong, so the job ends."""
        self._failed = True
        trace = "".join(traceback.format_exception(error))
        if self._on_note is not None:
            self._on_note(trace)
        self._finish_job(r.End(1, "failed", f"the coordinator failed: {last_error(trace)}", trace))

    def _raise(self, error: BaseException) -> None:
        raise error

    def _close_streams(self) -> None:
        self._closing = True
        self._connections.close()

    def _apply(self, event: r.Event, **source: object) -> None:
        """One transition. `source` is added to the notes it causes."""
        if self._failed:
            return
        self.roster, actions = self._decide(self.roster, event)
        self._actions.carry_out(actions, source)

    def _leave_for_the_next(self, reason: str) -> None:
        self._records.event("generation_ended", generation=self.generation, reason=reason)
        if self._on_next_generation is not None:
            self._on_next_generation(reason)

    def _note(self, event: str, show: str, /, **fields: object) -> None:
        self._records.event(event, **fields)
        if show and self._on_note is not None:
            self._on_note(show)

    def _finish_job(self, end: r.End) -> None:
        self._ending.finish(end, None if self._failed else self.roster)
        self._checkpoints.close()
        self._ending.is_over.set()

    # Workers --------------------------------------------------------------------------------------

    def _from_worker(self, stream: Stream, message: control_pb2.FromWorker) -> None:
        kind = message.WhichOneof("message")
        if kind == "hello":
            self._hello(stream, message.hello)
            return
        identity = self._connections.identity_of(stream)
        if identity is None:
            stream.reject(grpc.StatusCode.FAILED_PRECONDITION, f"a worker says hello first, not {kind!r}")
            return
        match kind:
            case "progress" if not self.roster.is_living(identity):
                # A zombie: its steps may be those of a group that is no more. The roster tells it to exit.
                self._apply(r.Stepped(identity, message.progress.step))
            case "ready":
                schema, start_s = self._shared(dict(message.ready.schema)), dict(message.ready.start_s)
                self._apply(r.Ready(identity, schema, start_s))
            case "view":
                changed = message.view
                view = wire.view_value(changed.view)
                self._watch.viewed(view.epoch, changed.step)
                self._apply(r.Viewed(identity, view, changed.step), reported_time=changed.time, reason=changed.reason)
            case "progress":
                self._progress(stream, identity, message.progress)
            case "failed":
                failed = message.failed
                self._apply(r.Failed(identity, failed.step, failed.fatal, failed.startup, failed.traceback))
            case "noted":
                self._noted(stream, identity, message.noted)
            case "finished":
                self._worker_finished(identity, message.finished)
            case "saved":
                self._checkpoints.saved(identity, message.saved)
            case "loaded":
                self._checkpoints.loaded(identity, message.loaded)
            case "set_aside":
                self._checkpoints.set_aside(message.set_aside)

    def _hello(self, stream: Stream, hello: control_pb2.Hello) -> None:
        identity = wire.identity_value(hello.identity)
        if hello.generation != self.generation:  # its node id may be that of a worker of this generation
            reason = f"it belongs to generation {hello.generation}, and this is generation {self.generation}"
            stream.send(control_pb2.ToWorker(evict=control_pb2.Evict(reason=reason)))
            return
        if not self._connections.add_worker(stream, identity):
            stream.reject(grpc.StatusCode.ALREADY_EXISTS, f"{identity} is connected already")
            return
        welcome = self._checkpoints.welcome()
        welcome.report_interval_s = report_interval_s(self._step_timeout_s, self.roster.limits.num_slots)
        stream.send(control_pb2.ToWorker(welcome=welcome))
        self._apply(r.Hello(identity, hello.pid, hello.host), versions=hello.versions)
        # One that was told to exit gets no place here: nothing that is meant for its node, or needs it, concerns it.
        if self.roster.is_living(identity):
            self._connections.workers[identity.node] = stream

    def _shared(self, schema: Schema) -> Schema:
        """All workers run the same, and say so at length: it is kept once."""
        if schema != self._schema:
            self._schema = schema
        return self._schema

    def _lost_worker(self, stream: Stream, broken: bool) -> None:
        identity, had_place = self._connections.remove_worker(stream)
        if identity is None or self._closing or not had_place:
            return  # of a stray; whoever has its node's place is not silent because of it
        # A process that ends loses its connection just before its agent reports the exit, which says more.
        limit_s = EXIT_REPORT_S if broken else LEAVE_TIMEOUT_S
        reason = self._how_lost(stream, broken) + f", and no exit was reported within {limit_s:g} s"
        self._loop.after(f"leave {identity.node}", limit_s, partial(self._silent, identity, reason))

    def _how_lost(self, stream: Stream, broken: bool) -> str:
        """gRPC does not say why a connection broke, but keepalive takes this long, and other causes rarely do."""
        if not broken:
            return "its control connection was closed"
        quiet_s = time.monotonic() - stream.heard
        if quiet_s > 1.9 * self._keepalive_s:
            return f"no answer for {quiet_s:.0f} s (faults.keepalive_s = {self._keepalive_s:g})"
        return "its control connection broke"

    def _silent(self, identity: Identity, reason: str) -> None:
        if identity.node not in self._ending.exited:
            self._apply(r.Silent(identity, reason))

    def _progress(self, stream: Stream, identity: Identity, progress: control_pb2.Progress) -> None:
        if self._reports.add(identity, progress):
            self._apply(r.Stepped(identity, progress.step))
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

    def _acknowledge(self, step: int) -> int:
        return self._connections.tell_all(control_pb2.ToWorker(ack=control_pb2.Ack(step=step)))

    def _show_lost_records(self, first_step: int, last_step: int) -> None:
        """The event is written by whoever keeps the records."""
        if self._on_note is not None:
            self._on_note(
                f"The records of steps {first_step} to {last_step} are lost: all members that had them died"
                " before they were sent. The steps themselves count."
            )

    def _worker_finished(self, identity: Identity, finished: control_pb2.Finished) -> None:
        if self.roster.is_living(identity):
            self._ending.worker_finished(identity.slot, finished)
        self._apply(r.Finished(identity, finished.status, finished.message, finished.step))

    def _step(self) -> int:
        return self._reports.step(self.roster.view, default=self._records.flushed_step)

    def _note_stall(self) -> None:
        """Says who is where if no step has committed for long, and looks again later."""
        if self._ending.end is not None:
            return
        quiet_s = self._reports.quiet_s
        view = self.roster.view
        if view.members and quiet_s >= self._stall_note_s:
            phases = self._reports.phases(view)
            where = ", ".join(f"slot {slot} in {phase or 'no phase yet'}" for slot, phase in phases.items())
            self._note(
                "no_progress",
                f"No step has committed for {quiet_s:.0f} s; the last is {self._step()}. Now: {where}.",
                step=self._step(),
                waited_s=round(quiet_s, 1),
                phases={str(slot): phase for slot, phase in phases.items()},
            )
            quiet_s = 0.0
        self._loop.after("stall", max(0.0, self._stall_note_s - quiet_s), self._note_stall)

    def _look(self) -> None:
        if not self.roster.view.members:
            self._reports.rest()  # nobody could commit a step
        if self._ending.end is None:
            self._watch.look(self.roster)
            self._paces.look(self.roster)
            self._loop.after("watch", self._look_interval_s, self._look)

    # Agents, and the people behind them -----------------------------------------------------------

    def _from_agent(self, stream: Stream, message: control_pb2.FromAgent) -> None:
        match message.WhichOneof("message"):
            case "hello":
                self._agent_hello(stream, message.hello)
            case "started":
                started = message.started
                self._apply(r.Started(wire.identity_value(started.identity), started.pid, started.warm))
            case "leaving":
                if name := self._connections.agent_name(stream):
                    self._apply(r.AgentLeaving(name, message.leaving.reason))
            case "exited":
                exited = message.exited
                identity = wire.identity_value(exited.identity)
                self._loop.cancel(f"leave {identity.node}")
                if not self._ending.worker_exited(identity, exited.exit_code, exited.time):
                    event = r.Exited(identity, exited.exit_code, exited.traceback, exited.stuck_at)
                    self._apply(event, reported_time=exited.time)

    def _agent_hello(self, stream: Stream, hello: control_pb2.AgentHello) -> None:
        if self._connections.agent_name(stream) is not None:
            stream.reject(grpc.StatusCode.ALREADY_EXISTS, "an agent says hello once")
            return
        if before := self._connections.agent_of_id(hello.id):
            # It has connected again, so it has ended the workers it had, and the old connection is of no use.
            self._lost_agent(before)
            before.close()
        name = self._connections.add_agent(stream, hello.host, hello.id)
        welcome = control_pb2.AgentWelcome(
            jax_address=self.jax_address,
            num_nodes=self._jax.num_nodes,
            jax_tls=self._jax_tls,
            generation=self.generation,
        )
        stream.send(control_pb2.ToAgent(welcome=welcome))
        if self._ending.end is not None:  # the job was stopped before this agent came
            stream.send(shutdown_message(self._ending.end))
        # One that is older than the newest checkpoint is of no use.
        carried = {each.slot: each.step for each in hello.carried if each.step >= self._checkpoints.saved_step}
        epoch = max((each.epoch for each in hello.carried), default=0)
        self._apply(r.AgentJoined(name, tuple(hello.slots), carried, epoch, hello.spare))

    def _lost_agent(self, stream: Stream) -> None:
        name = self._connections.remove_agent(stream)
        if name is not None and not self._closing:
            self._apply(r.AgentLost(name))

    def _peer_rejected(self, peer: str, now: float) -> None:
        if self._ending.end is None and (found := self._rejections.add(peer, now)):
            address, num_calls = found
            self._note(
                "peer_rejected",
                f"rejected a caller at {address}: it does not know this job's secret",
                peer=address,
                calls=num_calls,
            )

    def _stop_called(self, reason: str) -> None:
        self._stop_calls += 1
        self._apply(r.StopAsked(now=self._stop_calls > 1, reason=reason))

    def _save_called(self, reply: Future[control_pb2.SaveReply]) -> None:
        if self._ending.end is None:
            self._checkpoints.ask(reply)
        else:
            reply.set_result(control_pb2.SaveReply(error="the job has ended"))

    def _drain_called(self, slot: int, reason: str, refusal: Future[str]) -> None:
        why_not = refuse_drain(self.roster, slot)
        if not why_not:
            self._apply(r.DrainAsked(slot, reason))
        refusal.set_result(why_not)

    def _resize_called(self, workers: int, reason: str, refusal: Future[str]) -> None:
        why_not = refuse_resize(self.roster, workers)
        if not why_not:
            if self._on_resized is not None:
                self._on_resized(workers)
            self._apply(r.ResizeAsked(workers, reason))
        refusal.set_result(why_not)


def _first_roster(limits: Limits, past: Past | None, stop_wanted: str, returning: bool) -> Roster:
    if past is None:
        return Roster(limits)
    return beginning(
        limits,
        past.epoch,
        past.starts,
        past.drained,
        past.given_up,
        past.failures,
        past.stop_asked or stop_wanted,
        returning,
    )
