"""Who is connected to the coordinator, and under which name. Used from the event loop's thread only."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from elastic_train.coordinator import control_pb2
from elastic_train.coordinator.streams import Stream
from elastic_train.membership.group import Identity


class Connections:
    """The open streams. A message to whoever is not connected is dropped: the loss is an event of its own.

    Attributes:
      workers: by node, those of workers that were living when they said hello.
      none: set while nobody is connected; may be waited for in any thread.
      closed: this end has closed all: that one ends is no news any more.
    """

    def __init__(self) -> None:
        self.workers: dict[int, Stream] = {}
        self.none = threading.Event()
        self.none.set()
        self.closed = False
        self._identities: dict[Stream, Identity] = {}
        self._streams: dict[Identity, Stream] = {}
        self._agents: dict[str, Stream] = {}
        self._agent_names: dict[Stream, str] = {}
        self._agent_ids: dict[str, Stream] = {}

    def close(self) -> None:
        """Ends all of them."""
        self.closed = True
        for stream in (*self._identities, *self._agents.values()):
            stream.close()

    def _changed(self) -> None:
        (self.none.clear if self._identities or self._agents else self.none.set)()

    # Workers, strays included ---------------------------------------------------------------------

    def add_worker(self, stream: Stream, identity: Identity) -> bool:
        """Returns whether that was possible: one identity has one stream, and one stream one identity."""
        if identity in self._streams or stream in self._identities:
            return False
        self._identities[stream] = identity
        self._streams[identity] = stream
        self._changed()
        return True

    def identity_of(self, stream: Stream) -> Identity | None:
        return self._identities.get(stream)

    def remove_worker(self, stream: Stream) -> tuple[Identity | None, bool]:
        """Who that was, and whether it had its node's place in `workers`, as strays have not."""
        identity = self._identities.pop(stream, None)
        if identity is None:
            return None, False
        del self._streams[identity]
        self._changed()
        had_place = self.workers.get(identity.node) is stream
        if had_place:
            del self.workers[identity.node]
        return identity, had_place

    def tell(self, nodes: Iterable[int], message: control_pb2.ToWorker) -> None:
        for node in nodes:
            if stream := self.workers.get(node):
                stream.send(message)

    def tell_all(self, message: control_pb2.ToWorker) -> int:
        """Returns how many workers that are."""
        for stream in self.workers.values():
            stream.send(message)
        return len(self.workers)

    def evict(self, identity: Identity, reason: str) -> None:
        """Not by its node: another worker may have that one."""
        if stream := self._streams.get(identity):
            stream.send(control_pb2.ToWorker(evict=control_pb2.Evict(reason=reason)))

    # Agents ---------------------------------------------------------------------------------------

    def add_agent(self, stream: Stream, host: str, agent_id: str) -> str:
        """Returns the name that tells it from the other agents of its host."""
        name = host
        number = 2
        while name in self._agents:
            name = f"{host}#{number}"
            number += 1
        self._agents[name] = stream
        self._agent_names[stream] = name
        if agent_id:
            self._agent_ids[agent_id] = stream
        self._changed()
        return name

    def agent_name(self, stream: Stream) -> str | None:
        return self._agent_names.get(stream)

    def agent_of_id(self, agent_id: str) -> Stream | None:
        return self._agent_ids.get(agent_id) if agent_id else None

    def remove_agent(self, stream: Stream) -> str | None:
        """Returns its name."""
        name = self._agent_names.pop(stream, None)
        if name is not None:
            del self._agents[name]
            self._agent_ids = {key: held for key, held in self._agent_ids.items() if held is not stream}
            self._changed()
        return name

    def tell_agent(self, agent: str, message: control_pb2.ToAgent) -> None:
        if stream := self._agents.get(agent):
            stream.send(message)

    def tell_all_agents(self, message: control_pb2.ToAgent) -> None:
        for stream in self._agents.values():
            stream.send(message)
