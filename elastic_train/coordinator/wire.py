"""What both ends of the control plane agree on: the secret, keepalive, and values as protobuf messages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from elastic_train.coordinator import control_pb2
from elastic_train.membership.group import Identity, View

SECRET_KEY = "x-elastic-train-secret"
"""Name of the gRPC metadata entry that carries the job's secret."""

RECONNECT_MS = 3000
"""Least time for an attempt to connect, and longest pause between two."""

HANDSHAKE_MS = 5000
"""A caller's time from its connection until it speaks the protocol; then the connection is closed."""

IDLE_MS = 30_000
"""After this long a connection is closed on which no call is open. Agents and workers always have one."""

NUM_VIEWS = 8
"""How many views are kept with their messages. All members report each; with many members it takes long to make one."""

Options = list[tuple[str, int]]


def secret_metadata(secret: str) -> tuple[tuple[str, str], ...]:
    """The metadata of every call except the health check."""
    return ((SECRET_KEY, secret),)


def channel_options(keepalive_s: float) -> Options:
    """Options of a client's channel: a peer that is silent for 2 * `keepalive_s` counts as gone."""
    return [
        *_keepalive(keepalive_s),
        # The coordinator is near; a proxy meant for the internet cannot reach it.
        ("grpc.enable_http_proxy", 0),
        # An attempt that got no answer is repeated this soon; gRPC's own pauses grow to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS),
    ]


def server_options(keepalive_s: float, max_connections: int) -> Options:
    """Options of the server: the same keepalive, and no penalty for clients that ping as often.

    What strangers can take up is bounded: connections that say nothing are closed soon, and beyond
    `max_connections` further ones are refused, so that the process keeps file descriptors for its own work.
    """
    return [
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        *_keepalive(keepalive_s),
        ("grpc.http2.min_ping_interval_without_data_ms", int(keepalive_s * 500)),
        ("grpc.http2.max_ping_strikes", 0),
        # A port that is in use must be an error, not a second server behind the same port.
        ("grpc.so_reuseport", 0),
    ]


def _keepalive(keepalive_s: float) -> Options:
    return [
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_s * 1000)),
        # With grpcio 1.85 a server waits for the answer to a keepalive ping for this long, not for the above.
        ("grpc.http2.ping_timeout_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def identity_message(identity: Identity) -> control_pb2.Identity:
    return control_pb2.Identity(slot=identity.slot, incarnation=identity.incarnation, node=identity.node)


def identity_value(message: control_pb2.Identity) -> Identity:
    return Identity(message.slot, message.incarnation, message.node)


def identity_messages(identities: Sequence[Identity]) -> list[control_pb2.Identity]:
    return [identity_message(identity) for identity in identities]


@lru_cache(NUM_VIEWS)
def view_message(view: View) -> control_pb2.View:
    return control_pb2.View(epoch=view.epoch, members=identity_messages(view.members))


def view_value(message: control_pb2.View) -> View:
    """The view that a message holds; of equal messages one and the same."""
    return _view_value(message.SerializeToString(deterministic=True))


@lru_cache(NUM_VIEWS)
def _view_value(data: bytes) -> View:
    message = control_pb2.View.FromString(data)
    return View(message.epoch, tuple(identity_value(member) for member in message.members))
