"""The relay against a real echo server."""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Iterator

import pytest

from elastic_train.launch.relay import Relay, split_address

LIMIT_S = 10.0


class EchoServer:
    """Sends back what it gets. `hang_up` closes its connections, `stop` the listener too."""

    def __init__(self, port: int = 0) -> None:
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port = self.listener.getsockname()[1]
        self.connections: list[socket.socket] = []
        self.closed_by_peer = threading.Event()
        self.accepted = threading.Semaphore(0)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections.append(connection)
            self.accepted.release()
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)
            self.closed_by_peer.set()

    def hang_up(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self.listener.close()
        self.hang_up()


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    server = EchoServer()
    yield server
    server.stop()


@pytest.fixture
def relay(echo: EchoServer) -> Iterator[Relay]:
    relay = Relay(echo.address)
    yield relay
    relay.close()


def connect(address: str) -> socket.socket:
    client = socket.create_connection(split_address(address), timeout=LIMIT_S)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def exchange(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    answer = b""
    while len(answer) < len(data):
        part = client.recv(65536)
        assert part, "the relay closed the connection"
        answer += part
    return answer


def test_passes_bytes_both_ways(relay: Relay) -> None:
    with connect(relay.address) as client:
        assert exchange(client, b"hello") == b"hello"


def test_respects_back_pressure_and_loses_nothing(relay: Relay) -> None:
    data = bytes(range(256)) * (16 << 10)
    with connect(relay.address) as client:
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        received = bytearray()
        while len(received) < len(data):
            received += client.recv(65536)
        sender.join(LIMIT_S)
    assert received == data


def test_keeps_the_client_when_the_service_goes(echo: EchoServer, relay: Relay) -> None:
    with connect(relay.address) as client:
        exchange(client, b"before")
        echo.stop()
        client.settimeout(0.5)
        for _ in range(5):
            client.sendall(b"after")
            with pytest.raises(TimeoutError):  # an end of file or a reset would show here
                client.recv(1)


def test_closes_the_service_side_when_the_client_goes(echo: EchoServer, relay: Relay) -> None:
    client = connect(relay.address)
    exchange(client, b"x")
    client.close()
    assert echo.closed_by_peer.wait(LIMIT_S)


def test_waits_for_a_service_that_comes_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    relay = Relay(f"127.0.0.1:{port}")
    with connect(relay.address) as client:
        client.sendall(b"early")
        late = EchoServer(port=port)
        assert client.recv(100) == b"early"
        late.stop()
    relay.close()


def test_close_ends_connections_and_thread(echo: EchoServer) -> None:
    relay = Relay(echo.address)
    with connect(relay.address) as client:
        exchange(client, b"x")
        relay.close()
        relay.close()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    assert not relay._thread.is_alive()


def test_adds_little_latency(echo: EchoServer, relay: Relay) -> None:
    direct, relayed = (median_round_trip(address) for address in (echo.address, relay.address))
    print(f"100-byte round trip: direct {direct * 1e6:.0f} us, relayed {relayed * 1e6:.0f} us")
    assert relayed - direct < 0.005


def median_round_trip(address: str) -> float:
    with connect(address) as client:
        times = []
        for _ in range(300):
            start = time.perf_counter()
            exchange(client, bytes(100))
            times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.parametrize("address", ["", "host", ":80", "host:", "host:x", "host:70000"])
def test_refuses_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_address(address)
