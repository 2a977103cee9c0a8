"""The coordinator of one job, put together, with what its process and gRPC's threads call.

One thread takes all decisions and makes all changes. The others only put work into its inbox. What arrives becomes
events of the roster in `worker_streams`, `agent_streams` and `orders`; `decisions` holds the roster, and what it asks
for is carried out in order in `actions`.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from elastic_train.config import report_interval_s
from elastic_train.coordinator import control_pb2, security
from elastic_train.coordinator.actions import Actions
from elastic_train.coordinator.agent_streams import AgentStreams
from elastic_train.coordinator.checkpoints import Checkpoints
from elastic_train.coordinator.commits import Commits, Records
from elastic_train.coordinator.connections import Connections
from elastic_train.coordinator.decisions import Apply, Decisions
from elastic_train.coordinator.departures import Departures
from elastic_train.coordinator.ending import Ending, OnEnd
from elastic_train.coordinator.jax_service import JaxService
from elastic_train.coordinator.loop import EventLoop
from elastic_train.coordinator.orders import Orders
from elastic_train.coordinator.rejections import Rejections
from elastic_train.coordinator.reports import Reports
from elastic_train.coordinator.standstill import Standstill
from elastic_train.coordinator.streams import Server, Stream
from elastic_train.coordinator.watch import Paces, Watch
from elastic_train.coordinator.worker_streams import WorkerStreams
from elastic_train.errors import last_error
from elastic_train.membership import roster_events as r
from elastic_train.membership.roster import Limits, Roster, beginning
from elastic_train.telemetry.continuing import Past

ROOM = 32
"""So many workers at least can connect, however few the job has at its start."""

CLOSE_GRACE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a coordinator is reached, and by whom.

    Attributes:
      secret: what every caller must know.
      bind: "host:port"; port 0 takes a free one. JAX's service listens on the same host, another port.
      host: what callers know this host by; by default the host of `bind`.
      tls: this host's files for TLS, checked already.
      jax_tls: whether JAX's service uses them, too.
    """

    secret: str
    bind: str = "127.0.0.1:0"
    host: str = ""
    tls: security.Tls = security.PLAIN
    jax_tls: bool = False

    @property
    def bind_host(self) -> str:
        return self.bind.rpartition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Before:
    """What a coordinator goes on with; by default nothing.

    Attributes:
      past: what earlier parts of the run say, whose generations, epochs and incarnations go on.
      has_checkpoints: the run goes on from a checkpoint.
      returning, stop_wanted: see `roster.beginning`.
    """

    past: Past = field(default_factory=Past)
    has_checkpoints: bool = False
    returning: bool = False
    stop_wanted: str = ""


NEW_RUN = Before()


class Coordinator:
    """Serves one job from construction until `close`.

    Args:
      limits: sizes, budgets and time limits; also the roster's.
      records: gets each Note as `event` and each record of a committed step as `commit`; steps may come again
        and out of order.
      endpoint, before: see there.
      apply: the state machine, `elastic_train.membership.roster.apply`.
      on_note: shows a line to the person who watches.
      on_end: called once, with the End and the last report of each slot that finished.
      on_next_generation: called with the reason when this coordinator shall end, and the next one begin.
      on_resized: called with the new number of slots.
      stall_note_s: say who is where when no step has committed for this long.

    Attributes:
      address, jax_address: "host:port" of the control plane and of JAX's service.
      generation: this coordinator's number; a job gets another one when its JAX service is replaced.
      roster: the newest state; may be read from any thread.

    Raises UsageError if it cannot listen at `endpoint`. If the event loop fails, the job ends with exit code 1.
    """

    def __init__(
        self,
        limits: Limits,
        records: Records,
        endpoint: Endpoint,
        *,
        apply: Apply,
        before: Before = NEW_RUN,
        on_note: Callable[[str], None] | None = None,
        on_end: OnEnd | None = None,
        on_next_generation: Callable[[str], None] | None = None,
        on_resized: Callable[[int], None] | None = None,
        stall_note_s: float = 30.0,
    ) -> None:
        faults = limits.faults
        self.generation = before.past.generation + 1
        self._on_next_generation = on_next_generation
        self._records = records
        self._show = on_note or (lambda text: None)
        self._look_interval_s = report_interval_s(faults.step_timeout_s)
        self._loop = EventLoop("coordinator", self._loop_failed)
        self._decisions = Decisions(
            _first_roster(limits, before),
            apply,
            lambda actions, source: self._actions.carry_out(actions, source),
        )
        self._connections = Connections()
        self._ending = Ending(self._connections, records, self._loop, self._note, on_end)
        self._rejections = Rejections()
        self._reports = Reports()
        self._watch = Watch(faults, self._reports, self._decisions.apply, self._note)
        self._paces = Paces(faults, self._reports, limits.min_workers, self._decisions.apply, self._note)
        self._standstill = Standstill(self._reports, self._note, stall_note_s)
        self._checkpoints = Checkpoints(
            self._connections.tell_all,
            lambda name, /, **fields: records.event(name, **fields),
            self._show,
            before.has_checkpoints,
            before.past.saved_step,
        )
        self._orders = Orders(self._decisions, self._ending, self._checkpoints, on_resized)
        self._workers = WorkerStreams(
            self._decisions,
            self._connections,
            self._ending,
            self._reports,
            self._watch,
            self._checkpoints,
            Commits(self._loop, self._connections, records, self._show),
            self._note,
            self.generation,
        )
        self._departures = Departures(self._decisions, self._loop, self._connections, self._ending)

        # The port first: a port in use is the likeliest error, and cheap to find.
        max_streams = 2 * max(limits.num_slots, ROOM) + 16
        self._server = Server(self, endpoint.bind, endpoint.secret, faults.keepalive_s, max_streams, endpoint.tls)
        self.address = f"{endpoint.host or endpoint.bind_host}:{self._server.port}"
        self._jax = JaxService(
            limits.num_nodes,
            faults.jax_heartbeat_timeout_s,
            host=endpoint.bind_host,
            on_error=lambda error: self._loop.post(partial(self._raise, error)),
            tls=endpoint.tls.jax_arguments() if endpoint.jax_tls else None,
        )
        self.jax_address = self._jax.address
        self._agents = AgentStreams(
            self._decisions,
            self._connections,
            self._ending,
            self._checkpoints,
            self._departures,
            control_pb2.AgentWelcome(
                jax_address=self.jax_address,
                num_nodes=self._jax.num_nodes,
                jax_tls=endpoint.jax_tls,
                generation=self.generation,
            ),
            before.returning,
        )
        self._actions = Actions(
            self._connections,
            records,
            self._jax,
            self._loop,
            view=lambda: self.roster.view,
            note=self._note,
            timer_over=lambda name: self._decisions.apply(r.TimerOver(name)),
            end=self._finish_job,
            next_generation=self._leave_for_the_next,
        )
        self._loop.after("standstill", stall_note_s, self._look_for_standstill)
        self._loop.after("watch", self._look_interval_s, self._look)
        self._loop.start()
        if (told := before.past.end) is not None:  # the last coordinator could not tell everybody any more
            end = r.End(told["exit_code"], told["status"], told["message"])
            self._loop.post(partial(self._finish_job, end, is_written=True))
        self._server.start()

    # For the process that holds the coordinator ---------------------------------------------------

    @property
    def roster(self) -> Roster:
        return self._decisions.roster

    def status(self) -> dict[str, object]:
        """What `elastic-train status --json` prints."""
        roster = self.roster
        return {
            "generation": self.generation,
            "epoch": roster.view.epoch,
            "step": self.step,
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
        """The newest step that a member has reported; may be asked for in any thread."""
        return self._reports.step(self.roster.view, default=self._records.flushed_step)

    def wait(self, timeout: float | None) -> r.End | None:
        """The job's end, or None if it goes on after `timeout` seconds."""
        return self._ending.end if self._ending.is_over.wait(timeout) else None

    def wait_left(self, timeout: float) -> bool:
        """Waits until no agent and no worker is connected, as is the case soon after the end."""
        return self._connections.none.wait(timeout)

    def ask_stop(self, now: bool, reason: str) -> None:
        """Asks the members to stop after a commit, or everybody to stop at once. Returns immediately."""
        self._loop.post(partial(self._decisions.apply, r.StopAsked(now, reason)))

    def close(self) -> None:
        """Ends all connections, then JAX's service. Worker processes must be gone before: JAX aborts them."""
        if self._connections.closed:
            return
        self._loop.post(self._connections.close)
        self._loop.stop()
        self._server.stop(CLOSE_GRACE_S)
        self._jax.close()

    # Called by gRPC's threads ---------------------------------------------------------------------

    def worker_message(self, stream: Stream, message: control_pb2.FromWorker) -> None:
        self._loop.post(partial(self._workers.message, stream, message))

    def worker_ended(self, stream: Stream, broken: bool) -> None:
        self._loop.post(partial(self._departures.stream_ended, stream, broken))

    def agent_message(self, stream: Stream, message: control_pb2.FromAgent) -> None:
        self._loop.post(partial(self._agents.message, stream, message))

    def agent_ended(self, stream: Stream, broken: bool) -> None:
        self._loop.post(partial(self._agents.ended, stream))

    def status_json(self) -> str:
        return json.dumps(self.status())

    def stop_called(self, reason: str) -> None:
        self._loop.post(partial(self._orders.stop, reason))

    def peer_rejected(self, peer: str) -> None:
        self._loop.post(partial(self._peer_rejected, peer, time.monotonic()))

    def save_called(self) -> Future[control_pb2.SaveReply]:
        reply: Future[control_pb2.SaveReply] = Future()
        self._loop.post(partial(self._orders.save, reply))
        return reply

    def drain_called(self, slot: int, reason: str) -> Future[str]:
        refusal: Future[str] = Future()
        self._loop.post(partial(self._orders.drain, slot, reason, refusal))
        return refusal

    def resize_called(self, workers: int, reason: str) -> Future[str]:
        refusal: Future[str] = Future()
        self._loop.post(partial(self._orders.resize, workers, reason, refusal))
        return refusal

    # The event loop: all below runs in its thread -------------------------------------------------

    def _loop_failed(self, error: Exception) -> None:
        """A mistake in here or a full disk: the roster may be wrong, so the job ends."""
        self._decisions.failed = True
        trace = "".join(traceback.format_exception(error))
        self._show(trace)
        self._finish_job(r.End(1, "failed", f"the coordinator failed: {last_error(trace)}", trace))

    def _raise(self, error: BaseException) -> None:
        raise error

    def _leave_for_the_next(self, reason: str) -> None:
        self._records.event("generation_ended", generation=self.generation, reason=reason)
        if self._on_next_generation is not None:
            self._on_next_generation(reason)

    def _note(self, event: str, show: str, /, **fields: object) -> None:
        self._records.event(event, **fields)
        if show:
            self._show(show)

    def _finish_job(self, end: r.End, is_written: bool = False) -> None:
        self._ending.finish(end, None if self._decisions.failed else self.roster, is_written)
        self._checkpoints.close()
        self._ending.is_over.set()

    def _look_for_standstill(self) -> None:
        if self._ending.end is None:
            again_s = self._standstill.look(self.roster.view, self.step)
            self._loop.after("standstill", again_s, self._look_for_standstill)

    def _look(self) -> None:
        if not any(map(self.roster.is_living, self.roster.view.members)):
            self._reports.rest()  # nobody could commit a step: there is no group yet, or it has died
        if self._ending.end is None:
            self._watch.look(self.roster)
            self._paces.look(self.roster)
            self._loop.after("watch", self._look_interval_s, self._look)

    def _peer_rejected(self, peer: str, now: float) -> None:
        if self._ending.end is None and (found := self._rejections.add(peer, now)):
            address, num_calls = found
            self._note(
                "peer_rejected",
                f"rejected a caller at {address}: it does not know this job's secret",
                peer=address,
                calls=num_calls,
            )


def _first_roster(limits: Limits, before: Before) -> Roster:
    past = before.past
    return beginning(
        limits,
        past.epoch,
        past.starts,
        past.drained,
        past.given_up,
        past.failures,
        past.stop_asked or before.stop_wanted,
        before.returning,
        past.end is not None,
    )
