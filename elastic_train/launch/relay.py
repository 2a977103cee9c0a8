"""A TCP relay between this host's workers and JAX's coordination service.

JAX ends a worker (SIGABRT) the moment its connection to the service closes. The relay keeps the worker's
side open when the service's side goes, so that workers live on until JAX's heartbeat timeout and the job has
time to bring a new service up.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

RECONNECT_S = 0.1
"""Pause between two attempts to reach a service that does not answer."""

MAX_EARLY_BYTES = 1 << 20
"""How much a worker may send before the service's side is connected; more is left in the kernel's buffer."""

THREAD_LIMIT_S = 10.0
"""How long the relay's thread may take to come up or to end."""


class Relay:
    """Forwards connections made to `address` to the service at `target_address`, both ways, unchanged.

    One background thread with an event loop of its own does the work. The attempt to reach the service is
    repeated for as long as the worker holds its own side open: JAX's client has a time limit, the relay needs
    none.

    Args:
      target_address: `HOST:PORT` of the service.

    Attributes:
      address: where it listens, `HOST:PORT`.
      target: host and port of the service.

    Raises:
      OSError: no port of the loopback interface could be bound.
    """

    def __init__(self, target_address: str) -> None:
        self.target = split_address(target_address)
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._server: asyncio.Server | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(THREAD_LIMIT_S)

    def close(self) -> None:
        """Closes every connection and ends the thread. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(THREAD_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(THREAD_LIMIT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._server = await self._loop.create_server(self._accept, sock=self._listener)

    def _accept(self) -> asyncio.Protocol:
        connection = _Connection(self)
        self._connections.add(connection)
        return connection.client

    async def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
        connecting = [connection.connecting for connection in self._connections if connection.connecting]
        for connection in tuple(self._connections):
            connection.drop()
        await asyncio.gather(*connecting, return_exceptions=True)
        await asyncio.sleep(0)  # lets the transports that were just aborted close their sockets

    def _forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)


class _Connection:
    """One worker's connection and the one it stands for. Lives on the relay's loop."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.client = _Side(self._client_data, self._client_gone, self._client_open)
        self.service = _Side(self._service_data, self._service_gone, self._service_open)
        self.client.other, self.service.other = self.service, self.client
        self.connecting: asyncio.Task[None] | None = None
        self._early = bytearray()  # what the worker sent before the service's side was there
        self._service_was_open = False

    def drop(self) -> None:
        """Closes both sides at once."""
        if self.connecting is not None:
            self.connecting.cancel()
        for side in (self.client, self.service):
            if side.transport is not None:
                side.transport.abort()
        self.relay._forget(self)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError):  # the service is not there (yet): the worker waits, and so do we
                await loop.create_connection(lambda: self.service, *self.relay.target)
                return
            await asyncio.sleep(RECONNECT_S)

    def _client_open(self) -> None:
        self.connecting = asyncio.get_running_loop().create_task(self._connect())

    def _client_data(self, data: bytes) -> None:
        if self.service.transport is not None:
            self.service.transport.write(data)
        elif not self._service_was_open:
            self._early += data
            if len(self._early) > MAX_EARLY_BYTES:
                self.client.read(False)
        # Otherwise the service is gone for good, and with it the meaning of these bytes.

    def _client_gone(self) -> None:
        if self.connecting is not None:
            self.connecting.cancel()
        if self.service.transport is not None:
            self.service.transport.close()  # sends what is still buffered first
        else:
            self.relay._forget(self)

    def _service_open(self) -> None:
        self._service_was_open = True
        service = self.service.transport
        assert service is not None
        if self.client.transport is None:
            service.abort()
            return
        if self._early:
            service.write(bytes(self._early))
            self._early.clear()
        if not self.service.is_full:
            self.client.read(True)

    def _service_data(self, data: bytes) -> None:
        if self.client.transport is not None:
            self.client.transport.write(data)

    def _service_gone(self) -> None:
        if self.client.transport is None:
            self.relay._forget(self)
        else:
            self.client.read(True)  # the one way left to learn that the worker closes its side


class _Side(asyncio.Protocol):
    """One end of a connection. When its peer does not take what is written, the other end is not read."""

    def __init__(
        self, on_data: Callable[[bytes], None], on_gone: Callable[[], None], on_open: Callable[[], None]
    ) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side = self  # until the connection pairs its two sides
        self.is_full = False
        self._on_data = on_data
        self._on_gone = on_gone
        self._on_open = on_open

    def read(self, wanted: bool) -> None:
        """Starts or stops reading; calling it twice is fine."""
        if self.transport is not None and not self.transport.is_closing():
            (self.transport.resume_reading if wanted else self.transport.pause_reading)()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._on_open()

    def data_received(self, data: bytes) -> None:
        self._on_data(data)

    def pause_writing(self) -> None:
        self.is_full = True
        self.other.read(False)

    def resume_writing(self) -> None:
        self.is_full = False
        self.other.read(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._on_gone()


def split_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` as a pair; raises ValueError if it is none."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise ValueError(f"{address!r} is no address; write it as HOST:PORT, for example 127.0.0.1:9000")
    return host.strip("[]"), int(port)
