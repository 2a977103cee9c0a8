"""What agents say on their streams, and that one is lost. From the event loop's thread only."""

from __future__ import annotations

import grpc

from elastic_train.coordinator import control_pb2, wire
from elastic_train.coordinator.checkpoints import Checkpoints
from elastic_train.coordinator.connections import Connections
from elastic_train.coordinator.decisions import Decisions
from elastic_train.coordinator.departures import Departures
from elastic_train.coordinator.ending import Ending, shutdown_message
from elastic_train.coordinator.streams import Stream
from elastic_train.membership import roster_events as r


class AgentStreams:
    """Makes events of the roster of what agents say.

    Args:
      decisions, connections, ending, checkpoints, departures: as in `service.Coordinator`.
      welcome: what every agent is told first.
      returning: the job goes on after the loss of its last coordinator, so states that agents hold are its own. When a
        run is gone on with otherwise, they come from a part that is over, and the checkpoint counts.
    """

    def __init__(
        self,
        decisions: Decisions,
        connections: Connections,
        ending: Ending,
        checkpoints: Checkpoints,
        departures: Departures,
        welcome: control_pb2.AgentWelcome,
        returning: bool,
    ) -> None:
        self._decisions, self._connections, self._ending = decisions, connections, ending
        self._checkpoints, self._departures, self._welcome = checkpoints, departures, welcome
        self._returning = returning

    def message(self, stream: Stream, message: control_pb2.FromAgent) -> None:
        """Something has arrived."""
        match message.WhichOneof("message"):
            case "hello":
                self._hello(stream, message.hello)
            case "started":
                started = message.started
                self._decisions.apply(r.Started(wire.identity_value(started.identity), started.pid, started.warm))
            case "leaving":
                if name := self._connections.agent_name(stream):
                    self._decisions.apply(r.AgentLeaving(name, message.leaving.reason))
            case "exited":
                self._exited(message.exited)

    def ended(self, stream: Stream) -> None:
        """A stream is over."""
        name = self._connections.remove_agent(stream)
        if name is not None and not self._connections.closed:
            self._decisions.apply(r.AgentLost(name))

    def _hello(self, stream: Stream, hello: control_pb2.AgentHello) -> None:
        if self._connections.agent_name(stream) is not None:
            stream.reject(grpc.StatusCode.ALREADY_EXISTS, "an agent says hello once")
            return
        if before := self._connections.agent_of_id(hello.id):
            # It has connected again, so it has ended the workers it had, and the old connection is of no use.
            self.ended(before)
            before.close()
        name = self._connections.add_agent(stream, hello.host, hello.id)
        stream.send(control_pb2.ToAgent(welcome=self._welcome))
        if self._ending.end is not None:  # the job was stopped before this agent came
            stream.send(shutdown_message(self._ending.end))
        # One that is older than the newest checkpoint is of no use.
        states = hello.carried if self._returning else ()
        carried = {each.slot: each.step for each in states if each.step >= self._checkpoints.saved_step}
        epoch = max((each.epoch for each in states), default=0)
        self._decisions.apply(r.AgentJoined(name, tuple(hello.slots), carried, epoch, hello.spare))

    def _exited(self, exited: control_pb2.Exited) -> None:
        identity = wire.identity_value(exited.identity)
        self._departures.exited(identity)
        if not self._ending.worker_exited(identity, exited.exit_code, exited.time):
            event = r.Exited(identity, exited.exit_code, exited.traceback, exited.stuck_at)
            self._decisions.apply(event, reported_time=exited.time)
