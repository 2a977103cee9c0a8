"""The coordinator: runs the roster. What arrives by gRPC becomes events; actions are carried out in order.

One thread takes all decisions and makes all changes. The others only put work into its inbox.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial

import grpc

from elastic_train.config import FaultConfig, report_interval_s
from elastic_train.coordinator import control_pb2, security, wire
from elastic_train.coordinator.checkpoints import Checkpoints
from elastic_train.coordinator.commits import Commits, Records
from elastic_train.coordinator.jax_service import JaxService
from elastic_train.coordinator.loop import EventLoop
from elastic_train.coordinator.rejections import Rejections
from elastic_train.coordinator.reports import Reports, different_ends
from elastic_train.coordinator.streams import Server, Stream
from elastic_train.coordinator.watch import Paces, Watch
from elastic_train.errors import last_error
from elastic_train.membership import roster_events as r
from elastic_train.membership.group import MAX_JOINERS_PER_STEP, Identity
from elastic_train.membership.roster import Limits, Roster, beginning, refuse_drain
from elastic_train.membership.roster_generations import refuse_resize
from elastic_train.telemetry.continuing import Past

ROOM = 32
"""So many workers at least can connect, however few the job has at its start."""

LEAVE_TIMEOUT_S = 3.0
"""How long a worker that has closed its stream in order may take to exit before it counts as silent."""
CLOSE_GRACE_S = 1.0

EXIT_REPORT_S = 1.0
"""How long an agent may take to report the exit of a worker whose connection broke, before the worker is killed."""

ORDERLY_END_S = 3.0
"""How long workers that were told that all is done may take to exit by themselves, before their agent ends them."""

Apply = Callable[[Roster, r.Event], tuple[Roster, Iterable[r.Action]]]
OnEnd = Callable[[r.End, Mapping[int, control_pb2.Finished]], None]


class Coordinator:
    """Serves one job from construction until `close`.

    Args:
      limits: sizes and budgets, given on to the roster.
      records: gets each Note as `event` and each record of a committed step as `commit`; steps may come again
        and out of order.
      apply: the state machine, `elastic_train.membership.roster.apply`.
      faults: gives keepalive and JAX heartbeat.
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
        faults: FaultConfig,
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
        self.generation = generation
        self._on_next_generation, self._on_resized = on_next_generation, on_resized
        self._records = records
        self._decide = apply
        self._on_note = on_note
        self._on_end = on_end
        self._stall_note_s = stall_note_s
        self._loop = EventLoop("coordinator", self._loop_failed)
        self._workers: dict[int, Stream] = {}
        self._identities: dict[Stream, Identity] = {}
        self._agents: dict[str, Stream] = {}
        self._agent_names: dict[Stream, str] = {}
        self._agent_ids: dict[str, Stream] = {}
        self._rejections = Rejections()
        self._jax_tls = jax_tls
        self._deserted = threading.Event()
        self._deserted.set()
        self._exited: set[int] = set()
        self._keepalive_s = faults.keepalive_s
        self._ending: set[int] = set()
        self._reports = Reports()
        self._watch = Watch(faults, self._reports, self._apply, self._note)
        self._paces = Paces(faults, self._reports, limits.min_workers, self._apply, self._note)
        self._commits = Commits(self._loop, records, self._acknowledge, self._show_lost_records)
        self._checkpoints = Checkpoints(
            lambda message: self._tell(self._workers, message),
            lambda name, /, **fields: records.event(name, **fields),
            lambda text: None if on_note is None else on_note(text),
            has_checkpoints,
            past.saved_step if past else 0,
        )
        self._finished: dict[int, control_pb2.Finished] = {}
        self._noted_by: dict[tuple[str, str], Identity] = {}
        self._digests_differ = False
        self._stop_calls = 0
        self._end: r.End | None = None
        self._ended = threading.Event()
        self._failed = False
        self._closing = False
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
        self._ended.wait(timeout)
        return self._end if self._ended.is_set() else None

    def wait_left(self, timeout: float) -> bool:
        """Waits until no agent and no worker is connected, as is the case soon after the end."""
        return self._deserted.wait(timeout)

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
        for stream in (*self._identities, *self._agents.values()):
            stream.close()

    def _apply(self, event: r.Event, **source: object) -> None:
        """One transition. `source` is added to the notes it causes."""
        if self._failed:
            return
        self.roster, actions = self._decide(self.roster, event)
        for action in actions:
            self._perform(action, source)

    def _perform(self, action: r.Action, source: Mapping[str, object]) -> None:
        match action:
            case r.Tombstone(identity):
                self._bury(identity)
            case r.Abort(dead, tell):
                self._tell(tell, control_pb2.ToWorker(abort=control_pb2.Abort(node=dead.node)))
                self._records.event("abort_sent", **dead._asdict(), told=list(tell))
            case r.Announce(tell, joiners):
                candidates = control_pb2.Candidates(joiners=wire.identity_messages(joiners))
                self._tell(tell, control_pb2.ToWorker(candidates=candidates))
                view = wire.view_message(self.roster.view.next((), joiners[:MAX_JOINERS_PER_STEP]))
                expect = control_pb2.ToWorker(expect=control_pb2.Expect(view=view))
                self._tell((joiner.node for joiner in joiners[:MAX_JOINERS_PER_STEP]), expect)
            case r.Form(view, tell):
                self._tell(tell, control_pb2.ToWorker(form=control_pb2.Form(view=wire.view_message(view))))
            case r.AskLeave(identity):
                self._tell((identity.node,), control_pb2.ToWorker(leave=control_pb2.Leave()))
            case r.Evict(identity, reason) | r.RefuseWorker(identity, reason):
                # Not by its node: another worker may have that one.
                for stream in [stream for stream, who in self._identities.items() if who == identity]:
                    stream.send(control_pb2.ToWorker(evict=control_pb2.Evict(reason=reason)))
            case r.AskStop(tell, now, reason):
                self._tell(tell, control_pb2.ToWorker(stop=control_pb2.Stop(now=now, reason=reason)))
            case r.Start(agent, identity, restore):
                start = control_pb2.StartWorker(identity=wire.identity_message(identity), restore=restore)
                self._tell_agent(agent, control_pb2.ToAgent(start=start))
            case r.Kill(agent, identity, reason, dump_stacks):
                kill = control_pb2.KillWorker(
                    identity=wire.identity_message(identity), reason=reason, dump_stacks=dump_stacks
                )
                self._tell_agent(agent, control_pb2.ToAgent(kill=kill))
            case r.Refuse(agent, slots, reason):
                refused = control_pb2.SlotsRefused(slots=slots, reason=reason)
                self._tell_agent(agent, control_pb2.ToAgent(refused=refused))
            case r.SetTimer(name, delay_s):
                self._loop.after(f"roster {name}", delay_s, partial(self._apply, r.TimerOver(name)))
            case r.Note(event, fields, show):
                self._note(event, show, **{**source, **fields})
            case r.End():
                self._finish_job(action)
            case r.NextGeneration(reason):
                self._leave_for_the_next(reason)
            case _:
                raise TypeError(f"the roster asked for something unknown: {action!r}")

    def _leave_for_the_next(self, reason: str) -> None:
        self._records.event("generation_ended", generation=self.generation, reason=reason)
        if self._on_next_generation is not None:
            self._on_next_generation(reason)

    def _tell(self, nodes: Iterable[int], message: control_pb2.ToWorker) -> None:
        for node in nodes:
            # A node without a stream has just been lost; the roster hears of it as an event of its own.
            if stream := self._workers.get(node):
                stream.send(message)

    def _tell_agent(self, agent: str, message: control_pb2.ToAgent) -> None:
        if stream := self._agents.get(agent):
            stream.send(message)

    def _bury(self, identity: Identity) -> None:
        try:
            self._jax.tombstone(identity.node)
        except RuntimeError as error:
            # Members still learn of the death from the Abort, and the barrier from JAX's heartbeat.
            self._note(
                "tombstone_failed",
                f"JAX's service would not let go of slot {identity.slot}'s dead worker, node"
                f" {identity.node}: {error}. The others wait until its heartbeat times out.",
                **identity._asdict(),
                error=str(error),
            )

    def _note(self, event: str, show: str, /, **fields: object) -> None:
        self._records.event(event, **fields)
        if show and self._on_note is not None:
            self._on_note(show)

    def _finish_job(self, end: r.End) -> None:
        """Writes the end and lets the agents go. A second End changes nothing.

        If all have finished, workers exit by themselves now. In any other case their agents end them.
        """
        if self._end is not None:
            return
        self._end = end
        if not self._failed and self.roster.finishing and all(member.finished for member in self.roster.members):
            self._ending = {worker.identity.node for worker in self.roster.living} - self._exited
        try:
            self._records.event("end", status=end.status, exit_code=end.exit_code, message=end.message)
            if self._on_end is not None:
                self._on_end(end, dict(self._finished))
        except Exception as error:
            self._end = r.End(
                end.exit_code or 1,
                "failed",
                f"{end.message}; the end could not be written down: {error!r}",
                traceback.format_exc(),
            )
        finally:
            if self._ending:
                self._loop.after("shutdown", ORDERLY_END_S, partial(self._shut_down, self._end))
            else:
                self._shut_down(self._end)
            self._checkpoints.close()
            self._ended.set()

    def _shut_down(self, end: r.End) -> None:
        self._loop.cancel("shutdown")
        for stream in self._agents.values():
            self._send_shutdown(stream, end)

    def _send_shutdown(self, stream: Stream, end: r.End) -> None:
        shutdown = control_pb2.Shutdown(exit_code=end.exit_code, reason=end.message)
        stream.send(control_pb2.ToAgent(shutdown=shutdown))

    def _see_who_is_left(self) -> None:
        if not self._identities and not self._agents:
            self._deserted.set()

    # Workers --------------------------------------------------------------------------------------

    def _from_worker(self, stream: Stream, message: control_pb2.FromWorker) -> None:
        kind = message.WhichOneof("message")
        if kind == "hello":
            self._hello(stream, message.hello)
            return
        identity = self._identities.get(stream)
        if identity is None:
            stream.reject(grpc.StatusCode.FAILED_PRECONDITION, f"a worker says hello first, not {kind!r}")
            return
        match kind:
            case "progress" if not self.roster.is_living(identity):
                # A zombie: its steps may be those of a group that is no more. The roster tells it to exit.
                self._apply(r.Stepped(identity, message.progress.step))
            case "ready":
                self._apply(r.Ready(identity, dict(message.ready.schema)))
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
        if identity in self._identities.values() or stream in self._identities:
            stream.reject(grpc.StatusCode.ALREADY_EXISTS, f"{identity} is connected already")
            return
        if hello.generation != self.generation:  # its node id may be that of a worker of this generation
            reason = f"it belongs to generation {hello.generation}, and this is generation {self.generation}"
            stream.send(control_pb2.ToWorker(evict=control_pb2.Evict(reason=reason)))
            return
        self._identities[stream] = identity
        self._deserted.clear()
        stream.send(control_pb2.ToWorker(welcome=self._checkpoints.welcome()))
        self._apply(r.Hello(identity, hello.pid, hello.host), versions=hello.versions)
        # One that was told to exit gets no place here: nothing that is meant for its node, or needs it, concerns it.
        if self.roster.is_living(identity):
            self._workers[identity.node] = stream

    def _lost_worker(self, stream: Stream, broken: bool) -> None:
        identity = self._identities.pop(stream, None)
        if identity is None or self._closing:
            return
        self._see_who_is_left()
        if self._workers.get(identity.node) is not stream:
            return  # a stray; whoever has its node's place is not silent because of it
        del self._workers[identity.node]
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
        if identity.node not in self._exited:
            self._apply(r.Silent(identity, reason))

    def _progress(self, stream: Stream, identity: Identity, progress: control_pb2.Progress) -> None:
        if self._reports.add(identity, progress):
            self._apply(r.Stepped(identity, progress.step))
        # The summary is written at the end of the job; what comes later would not agree with it.
        if progress.records and self._end is None:
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

    def _acknowledge(self, step: int) -> None:
        self._tell(self._workers, control_pb2.ToWorker(ack=control_pb2.Ack(step=step)))

    def _show_lost_records(self, first_step: int, last_step: int) -> None:
        """The event is written by whoever keeps the records."""
        if self._on_note is not None:
            self._on_note(
                f"The records of steps {first_step} to {last_step} are lost: all members that had them died"
                " before they were sent. The steps themselves count."
            )

    def _worker_finished(self, identity: Identity, finished: control_pb2.Finished) -> None:
        if self.roster.is_living(identity):
            self._finished[identity.slot] = finished
            self._compare_digests()
        self._apply(r.Finished(identity, finished.status, finished.message, finished.step))

    def _compare_digests(self) -> None:
        different = different_ends(self._finished)
        if different and not self._digests_differ:
            self._digests_differ = True
            lines = [
                f"  slot {slot}: step {step}, params {params}, state {state}"
                for slot, (step, params, state) in different.items()
            ]
            self._note(
                "digests_differ",
                "ERROR: the members have finished with DIFFERENT states, which must never happen:\n"
                + "\n".join(lines)
                + "\nDo not use the result; please report this with the run directory.",
                slots={str(slot): list(end) for slot, end in different.items()},
            )

    def _step(self) -> int:
        return self._reports.step(self.roster.view, default=self._records.flushed_step)

    def _note_stall(self) -> None:
        """Says who is where if no step has committed for long, and looks again later."""
        quiet_s = self._reports.quiet_s
        view = self.roster.view
        if view.members and self._end is None and quiet_s >= self._stall_note_s:
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
        if self._end is None:
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
                self._apply(r.Started(wire.identity_value(started.identity), started.pid))
            case "leaving":
                if name := self._agent_names.get(stream):
                    self._apply(r.AgentLeaving(name, message.leaving.reason))
            case "exited":
                exited = message.exited
                identity = wire.identity_value(exited.identity)
                self._exited.add(identity.node)
                self._loop.cancel(f"leave {identity.node}")
                if self._end is not None:
                    # The roster is at rest. That a worker is gone is still worth a line.
                    about = {"exit_code": exited.exit_code, "reported_time": exited.time}
                    self._records.event("worker_exited", **identity._asdict(), **about)
                    if identity.node in self._ending:
                        self._ending.remove(identity.node)
                        if not self._ending:
                            self._shut_down(self._end)
                    return
                event = r.Exited(identity, exited.exit_code, exited.traceback, exited.stuck_at)
                self._apply(event, reported_time=exited.time)

    def _agent_hello(self, stream: Stream, hello: control_pb2.AgentHello) -> None:
        if stream in self._agent_names:
            stream.reject(grpc.StatusCode.ALREADY_EXISTS, "an agent says hello once")
            return
        if hello.id and (before := self._agent_ids.get(hello.id)):
            # It has connected again, so it has ended the workers it had, and the old connection is of no use.
            self._lost_agent(before)
            before.close()
        name = hello.host
        number = 2
        while name in self._agents:
            name = f"{hello.host}#{number}"
            number += 1
        self._agents[name] = stream
        self._agent_names[stream] = name
        if hello.id:
            self._agent_ids[hello.id] = stream
        self._deserted.clear()
        welcome = control_pb2.AgentWelcome(
            jax_address=self.jax_address,
            num_nodes=self._jax.num_nodes,
            jax_tls=self._jax_tls,
            generation=self.generation,
        )
        stream.send(control_pb2.ToAgent(welcome=welcome))
        if self._end is not None:  # the job was stopped before this agent came
            self._send_shutdown(stream, self._end)
        # One that is older than the newest checkpoint is of no use.
        carried = {each.slot: each.step for each in hello.carried if each.step >= self._checkpoints.saved_step}
        epoch = max((each.epoch for each in hello.carried), default=0)
        self._apply(r.AgentJoined(name, tuple(hello.slots), carried, epoch, hello.spare))

    def _lost_agent(self, stream: Stream) -> None:
        name = self._agent_names.pop(stream, None)
        if name is None or self._closing:
            return
        del self._agents[name]
        self._agent_ids = {key: held for key, held in self._agent_ids.items() if held is not stream}
        self._see_who_is_left()
        self._apply(r.AgentLost(name))

    def _peer_rejected(self, peer: str, now: float) -> None:
        if self._end is None and (found := self._rejections.add(peer, now)):
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
        if self._end is None:
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
