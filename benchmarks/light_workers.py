"""Workers without JAX, many in one process: the real link to the coordinator, and a bare client of JAX's service.

Used by `control_plane.py`. They train nothing: what they say, and when, is told by whoever measures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from elastic_train import jax_private
from elastic_train.coordinator import control_pb2
from elastic_train.coordinator.client import Link
from elastic_train.membership.group import Identity, View

HEARTBEAT_S = 60
TOGETHER = 4
"""How many workers of one process connect at the same time. More would wait for its interpreter's lock."""

LIMIT_S = 120.0

STEP_S = 0.1
"""How long steps seem to take."""


class Arrivals:
    """When which message came, over all links of this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._times: dict[tuple[str, int], list[float]] = {}

    def add(self, kind: str, number: int) -> None:
        now = time.monotonic()
        with self._changed:
            self._times.setdefault((kind, number), []).append(now)
            self._changed.notify_all()

    def wait(self, kind: str, number: int, num: int) -> list[float]:
        """The times of `num` arrivals, in seconds of the monotonic clock. Raises TimeoutError."""
        with self._changed:
            found = self._changed.wait_for(lambda: len(self._times.get((kind, number), ())) >= num, LIMIT_S)
            times = self._times.get((kind, number), [])
        if not found:
            raise TimeoutError(f"{len(times)} of {num} workers have heard of {kind} {number} within {LIMIT_S:g} s")
        return times


class TimedLink(Link):
    """A link that notes when it hears of a death, of joiners, and of a view.

    While its workers train, each of its reports tells of a new step.
    """

    arrivals: Arrivals
    training = threading.Event()

    def _progress(self, records: list[str]) -> control_pb2.FromWorker:
        if self.training.is_set():
            self.phase("compute", int(time.monotonic() / STEP_S))
        return super()._progress(records)

    def _receive(self, message: control_pb2.ToWorker) -> None:
        super()._receive(message)
        match message.WhichOneof("message"):
            case "abort":
                for node in message.abort.nodes:
                    self.arrivals.add("abort", node)
            case "candidates":
                for joiner in message.candidates.joiners:
                    self.arrivals.add("candidate", joiner.node)
            case "form":
                self.arrivals.add("form", message.form.view.epoch)


class Workers:
    """The workers of this process."""

    def __init__(self, address: str, secret: str, jax_address: str) -> None:
        self._address, self._secret, self._jax_address = address, secret, jax_address
        self._arrivals = Arrivals()
        self._links: dict[int, TimedLink] = {}
        self._clients: dict[int, Any] = {}
        self._lost: list[str] = []

    def connect(self, identities: Sequence[Identity]) -> list[float]:
        """Says hello for all of them; returns how long each one's hello took, in seconds."""
        return self._each(self._connect, identities)

    def _connect(self, identity: Identity) -> float:
        client = jax_private.coordination_client(
            self._jax_address, identity.node, timeout_s=60, heartbeat_timeout_s=HEARTBEAT_S, tls={}
        )
        client.connect()
        self._clients[identity.node] = client
        link = TimedLink(self._address, self._secret, identity, keepalive_s=30)
        link.arrivals = self._arrivals
        link.on_lost = self._lost.append
        started = time.monotonic()
        link.hello(pid=1, host="simulated", versions="")
        self._links[identity.node] = link
        return time.monotonic() - started

    def ready(self, nodes: Iterable[int], schema: dict[str, str]) -> None:
        """Those of `nodes` that are here could join at once."""
        for node in nodes:
            if node in self._links:
                self._links[node].ready(schema)

    def viewed(self, view: View, step: int) -> None:
        """All members report the view they are in."""
        for node, link in self._links.items():
            if node in view.nodes:
                link.viewed(view, "death", (), (), step, time.time())

    def train(self, begin: bool) -> None:
        """From now on the workers report steps, or no longer do."""
        TimedLink.training.set() if begin else TimedLink.training.clear()

    def arrived(self, kind: str, number: int, nodes: Sequence[int]) -> list[float]:
        """When those of `nodes` that are here heard of it."""
        return self._arrivals.wait(kind, number, sum(node in self._links for node in nodes))

    def barrier(self, nodes: Sequence[int], rounds: int) -> list[float]:
        """All workers pass the barrier of `live_devices` so many times; one worker's times, in seconds."""
        mine = [self._clients[node] for node in nodes if node in self._clients]
        return self._each(lambda client: _pass(client, list(nodes), rounds), mine, together=len(mine))[0]

    def disconnect(self, node: int) -> None:
        """One worker, if it is here, leaves JAX's service, which would else end this process."""
        if node in self._clients:
            self._clients.pop(node).shutdown()

    def end(self, node: int) -> None:
        """One worker goes, if it is here."""
        self.disconnect(node)
        if node in self._links:
            self._links.pop(node).close()

    def close(self) -> list[str]:
        """Ends all; returns why connections broke before."""
        lost = list(self._lost)
        self._each(self.end, list(self._links))
        return lost

    def _each(self, call: Callable[[Any], Any], values: Sequence[Any], together: int = TOGETHER) -> list[Any]:
        with ThreadPoolExecutor(max(1, together)) as pool:
            return list(pool.map(call, values))


def _pass(client: Any, nodes: list[int], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        started = time.monotonic()
        live = client.get_live_nodes(nodes)
        times.append(time.monotonic() - started)
        if len(live) != len(nodes):
            raise RuntimeError(f"the barrier let {len(live)} of {len(nodes)} workers through")
    return times


def serve(pipe: Connection, address: str, secret: str, jax_address: str) -> None:
    """A process's main: calls what it is told, `(method, arguments)`, and sends back `(result, error)`."""
    workers = Workers(address, secret, jax_address)
    method = ""
    while method != "close":
        method, arguments = pipe.recv()
        try:
            pipe.send((getattr(workers, method)(*arguments), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))
