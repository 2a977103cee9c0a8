"""Workers without JAX, many in one process: a light end of the control plane, and a bare client of JAX's service each.

Used by `control_plane.py`. They train nothing: what they say, and when, is told by whoever measures. They are no
`Link`s, whose threads, hundreds in a process, would take the processor from what is measured: all of a process share
one thread and one connection, and build each message once. What they send, and how often, is what links send.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import grpc

from elastic_train import jax_private
from elastic_train.coordinator import control_pb2, control_pb2_grpc, wire
from elastic_train.membership.group import Identity, View

HEARTBEAT_S = 60
TOGETHER = 32
"""How many workers of one process connect at the same time."""

HELLO_LIMIT_S, LIMIT_S = 60.0, 120.0

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


class LightLink:
    """One worker's stream. It notes when it hears of a death, of joiners, and of a view. All in the loop's thread.

    Attributes:
      training: while it is set, each report of any worker tells of a new step.
    """

    training = threading.Event()

    def __init__(self, stub: Any, metadata: Any, identity: Identity, arrivals: Arrivals, lost: list[str]) -> None:
        self._stub, self._metadata, self._identity = stub, metadata, identity
        self._arrivals, self._lost = arrivals, lost
        self._outgoing: asyncio.Queue[control_pb2.FromWorker | None] = asyncio.Queue()
        self._interval_s = 0.0
        self._welcome = asyncio.Event()
        self._beats = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def hello(self) -> float:
        """Connects; returns how long that took, in seconds."""
        started = time.monotonic()
        hello = control_pb2.Hello(identity=wire.identity_message(self._identity), pid=1, host="simulated")
        call = self._stub.Worker(metadata=self._metadata, wait_for_ready=True)
        await call.write(control_pb2.FromWorker(hello=hello))
        self._tasks = [asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))]
        async with asyncio.timeout(HELLO_LIMIT_S):
            await self._welcome.wait()
        return time.monotonic() - started

    def send(self, message: control_pb2.FromWorker | None) -> None:
        """None ends the stream."""
        self._outgoing.put_nowait(message)

    async def _write(self, call: Any) -> None:
        await self._welcome.wait()
        while True:
            try:
                message = await asyncio.wait_for(self._outgoing.get(), self._interval_s)
            except TimeoutError:
                message = self._report()
            if message is None:
                await call.done_writing()
                return
            await call.write(message)

    def _report(self) -> control_pb2.FromWorker:
        step = 0
        if self.training.is_set():
            step = int(time.monotonic() / STEP_S)
            self._beats += 1
        return control_pb2.FromWorker(progress=control_pb2.Progress(step=step, phase="compute", beats=self._beats))

    async def _read(self, call: Any) -> None:
        try:
            async for message in call:
                self._receive(message)
        except grpc.aio.AioRpcError as error:
            self._lost.append(f"{error.code().name}: {error.details()}")

    def _receive(self, message: control_pb2.ToWorker) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                self._interval_s = message.welcome.report_interval_s
                self._welcome.set()
            case "abort":
                for node in message.abort.nodes:
                    self._arrivals.add("abort", node)
            case "candidates":
                for joiner in message.candidates.joiners:
                    self._arrivals.add("candidate", joiner.node)
            case "form":
                self._arrivals.add("form", message.form.view.epoch)


class Workers:
    """The workers of this process."""

    def __init__(self, address: str, secret: str, jax_address: str) -> None:
        self._jax_address = jax_address
        self._metadata = wire.secret_metadata(secret)
        self._arrivals = Arrivals()
        self._links: dict[int, LightLink] = {}
        self._clients: dict[int, Any] = {}
        self._lost: list[str] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="links", daemon=True).start()
        self._stub = self._call(self._open(address))

    async def _open(self, address: str) -> Any:
        return control_pb2_grpc.ControlStub(grpc.aio.insecure_channel(address, options=wire.channel_options(30)))

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)

    def _send(self, links: Iterable[LightLink], message: control_pb2.FromWorker | None) -> None:
        def send() -> None:
            for link in found:
                link.send(message)

        found = list(links)
        self._loop.call_soon_threadsafe(send)

    def connect(self, identities: Sequence[Identity]) -> list[float]:
        """Says hello for all of them; returns how long each one's hello took, in seconds."""
        return self._each(self._connect, identities)

    def _connect(self, identity: Identity) -> float:
        client = jax_private.coordination_client(
            self._jax_address, identity.node, timeout_s=60, heartbeat_timeout_s=HEARTBEAT_S, tls={}
        )
        client.connect()
        self._clients[identity.node] = client

        async def hello() -> float:
            link = self._links[identity.node] = LightLink(
                self._stub, self._metadata, identity, self._arrivals, self._lost
            )
            return await link.hello()

        return self._call(hello())

    def ready(self, nodes: Iterable[int], schema: dict[str, str]) -> None:
        """Those of `nodes` that are here could join at once."""
        message = control_pb2.FromWorker(ready=control_pb2.Ready(schema=schema))
        self._send([self._links[node] for node in nodes if node in self._links], message)

    def viewed(self, view: View, step: int) -> None:
        """All members report the view they are in."""
        changed = control_pb2.ViewChanged(view=wire.view_message(view), reason="death", step=step, time=time.time())
        members = set(view.nodes)
        self._send(
            [link for node, link in self._links.items() if node in members], control_pb2.FromWorker(view=changed)
        )

    def train(self, begin: bool) -> None:
        """From now on the workers report steps, or no longer do."""
        LightLink.training.set() if begin else LightLink.training.clear()

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
            self._send([self._links.pop(node)], None)

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
