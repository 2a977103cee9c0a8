"""The gRPC side of the coordinator: connections and their threads. No decisions are taken here.

Each stream has two threads: gRPC's own, which sends what is put into the stream's queue, and one that reads
and hands every message to the coordinator's event loop.
"""

from __future__ import annotations

import hmac
import queue
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from elastic_train.coordinator import control_pb2, control_pb2_grpc, security, wire
from elastic_train.errors import UsageError

MessageType = TypeVar("MessageType", control_pb2.FromWorker, control_pb2.FromAgent)

SERVICE_NAME = "elastic_train.Control"
CALL_LIMIT_S = 3600.0
"""How long a call may wait for its answer, if the caller does not say."""

HALF_CLOSE_S = 0.02
"""A broken connection may first look like a peer that has finished sending; the truth follows this soon."""


class Stream:
    """One open connection. `send` and `close` may be called from any thread and never block.

    Attributes:
      broken: set when the connection is gone without having been closed in order.
      heard: when the newest message arrived, in seconds of the monotonic clock.
    """

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.broken = threading.Event()
        self.heard = time.monotonic()
        if not context.add_callback(self._terminated):
            self._terminated()

    def send(self, message: Message) -> None:
        """Queues a message. If the connection is gone already, its end is reported by the reader."""
        self._outbox.put(message)

    def close(self) -> None:
        """Ends the call after what was queued before."""
        self._outbox.put(None)

    def reject(self, code: grpc.StatusCode, reason: str) -> None:
        """Ends the call with an error."""
        self._context.set_code(code)
        self._context.set_details(reason)
        self.close()

    def outgoing(self) -> Iterator[Message]:
        """What gRPC is to send, until `close` or the end of the connection."""
        while (message := self._outbox.get()) is not None:
            yield message

    def _terminated(self) -> None:
        self.broken.set()
        self._outbox.put(None)


class Receiver(Protocol):
    """What the coordinator does with what arrives. Called from many threads; must not block."""

    def worker_message(self, stream: Stream, message: control_pb2.FromWorker) -> None: ...
    def worker_ended(self, stream: Stream, broken: bool) -> None: ...
    def agent_message(self, stream: Stream, message: control_pb2.FromAgent) -> None: ...
    def agent_ended(self, stream: Stream, broken: bool) -> None: ...
    def status_json(self) -> str: ...
    def stop_called(self, reason: str) -> None: ...
    def peer_rejected(self, peer: str) -> None: ...
    def save_called(self) -> Future[control_pb2.SaveReply]: ...
    def drain_called(self, slot: int, reason: str) -> Future[str]: ...
    def resize_called(self, workers: int, reason: str) -> Future[str]: ...


class _Servicer(control_pb2_grpc.ControlServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Worker(self, requests, context):
        return self._serve(requests, context, self._receiver.worker_message, self._receiver.worker_ended)

    def Agent(self, requests, context):
        return self._serve(requests, context, self._receiver.agent_message, self._receiver.agent_ended)

    def Status(self, request, context):
        return control_pb2.StatusReply(json=self._receiver.status_json())

    def Stop(self, request, context):
        self._receiver.stop_called(request.reason)
        return control_pb2.StopReply()

    def Save(self, request, context):
        try:
            return self._receiver.save_called().result(min(context.time_remaining() or CALL_LIMIT_S, CALL_LIMIT_S))
        except TimeoutError:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no state has been saved in time")

    def Drain(self, request, context):
        refusal = self._receiver.drain_called(request.slot, request.reason).result(CALL_LIMIT_S)
        return control_pb2.DrainReply(refusal=refusal)

    def Resize(self, request, context):
        refusal = self._receiver.resize_called(request.workers, request.reason).result(CALL_LIMIT_S)
        return control_pb2.ResizeReply(refusal=refusal)

    def _serve(
        self,
        requests: Iterator[MessageType],
        context: grpc.ServicerContext,
        message_arrived: Callable[[Stream, MessageType], None],
        ended: Callable[[Stream, bool], None],
    ) -> Iterator[Message]:
        stream = Stream(context)

        def read() -> None:
            try:
                for message in requests:
                    stream.heard = time.monotonic()
                    message_arrived(stream, message)
                broken = stream.broken.wait(HALF_CLOSE_S)
            except grpc.RpcError:  # gRPC's way to say that the connection is gone
                broken = True
            ended(stream, broken)
            stream.close()

        threading.Thread(target=read, name="control-read", daemon=True).start()
        return stream.outgoing()


class _SecretCheck(grpc.ServerInterceptor):
    """Lets calls through that know the job's secret; only the question whether the server is healthy needs none.

    All others get one and the same answer, whatever they called and whatever they gave as secret.
    """

    def __init__(self, secret: str, rejected: Callable[[str], None]) -> None:
        self._secret = secret.encode()
        self._rejected = rejected
        # A handler for streams also serves the calls that are none.
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    def intercept_service(self, continuation, handler_call_details):
        if handler_call_details.method == f"/{health.SERVICE_NAME}/Check":
            return continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = metadata.get(wire.SECRET_KEY, "")
        if hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), self._secret):
            return continuation(handler_call_details)
        return self._refusal

    def _refuse(self, requests, context):
        self._rejected(context.peer())
        context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            f"this coordinator belongs to another job, or the secret is missing: metadata {wire.SECRET_KEY!r}"
            " must hold the secret of the job at this address",
        )


class Server:
    """The listening server.

    Raises UsageError if the address cannot be bound.

    Attributes:
      port: the one that was really bound.
    """

    def __init__(
        self, receiver: Receiver, bind: str, secret: str, keepalive_s: float, max_streams: int, tls: security.Tls
    ) -> None:
        self._health = health.HealthServicer()
        # Each stream occupies a thread for its whole life. Some more for status, stop, health.
        self._server = grpc.server(
            ThreadPoolExecutor(max_streams + 16, thread_name_prefix="control"),
            interceptors=[_SecretCheck(secret, receiver.peer_rejected)],
            options=wire.server_options(keepalive_s, _max_connections(max_streams)),
        )
        control_pb2_grpc.add_ControlServicer_to_server(_Servicer(receiver), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        _check_free(bind)
        try:
            if tls.given:
                self.port = self._server.add_secure_port(bind, security.server_credentials(tls))
            else:
                self.port = self._server.add_insecure_port(bind)
        except RuntimeError as error:
            raise _cannot_listen(bind, error) from error

    def start(self) -> None:
        self._server.start()
        for name in ("", SERVICE_NAME):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives open ones `grace_s` to end, then breaks them."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait()


def _max_connections(max_streams: int) -> int:
    """Half of the files this process may open; but enough for its own workers, whatever that leaves."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    half = 1 << 16 if soft == resource.RLIM_INFINITY else soft // 2
    return max(half, 2 * max_streams)


def _check_free(bind: str) -> None:
    """Asks before gRPC does, which would print its own account of the failure."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{bind!r} is no address to listen on: write host:port, such as 127.0.0.1:0")
    try:
        with socket.create_server((host.strip("[]"), int(port))):
            pass
    except OSError as error:
        raise _cannot_listen(bind, error) from error


def _cannot_listen(bind: str, error: Exception) -> UsageError:
    return UsageError(
        f"the coordinator cannot listen on {bind}: {error}. Is the port in use? Choose another one, or port 0"
        " for any free one."
    )
