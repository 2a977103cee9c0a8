"""TLS for the control plane, and for JAX's coordination service where its version can: files, checks, credentials.

All files are checked before any worker starts, by handshakes in memory: gRPC would only say that a connection failed,
and JAX's client ends its process.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from elastic_train.coordinator import wire
from elastic_train.errors import UsageError

RELAY_HOST = "127.0.0.1"
"""Where workers find JAX's service: the agent's relay, so that is the name its certificate must prove."""


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The PEM files of one host; empty where not given. Without any of them connections are not encrypted.

    Attributes:
      cert, key: this host's certificate chain and its private key.
      ca: certificates of the authorities that peers must prove to come from.
      peer_uri_prefix: for JAX's service only: what a URI in a peer's certificate must begin with, instead of a
        check of its host name.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    peer_uri_prefix: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise UsageError("--tls-cert and --tls-key belong together: give both")
        if self.peer_uri_prefix and not self.mutual:
            raise UsageError("--tls-peer-uri-prefix needs --tls-cert, --tls-key and --tls-ca")
        if self.peer_uri_prefix and not self.peer_uri_prefix.endswith("/"):
            raise UsageError(
                f"--tls-peer-uri-prefix {self.peer_uri_prefix}: must end with '/', so that no longer name passes for it"
            )

    @property
    def given(self) -> bool:
        return bool(self.cert or self.ca)

    @property
    def mutual(self) -> bool:
        """Whether both ends prove who they are."""
        return bool(self.cert and self.ca)

    @property
    def roots(self) -> str:
        """What the coordinator's certificate is checked against; without a CA it must be its own."""
        return self.ca or self.cert

    def dump(self) -> str:
        """As one line, for `load`."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Tls:
        return cls(**json.loads(text))

    def jax_arguments(self) -> dict[str, str]:
        """What JAX's service and its clients take for mutual TLS."""
        arguments = {"mtls_cert_file": self.cert, "mtls_key_file": self.key, "mtls_ca_file": self.ca}
        return arguments | ({"mtls_peer_uri_prefix": self.peer_uri_prefix} if self.peer_uri_prefix else {})


PLAIN = Tls()


def open_channel(address: str, keepalive_s: float, tls: Tls) -> grpc.Channel:
    """A client's channel to the coordinator at `address`."""
    options = wire.channel_options(keepalive_s)
    if not tls.given:
        return grpc.insecure_channel(address, options=options)
    pair = (_read(tls.key), _read(tls.cert)) if tls.mutual else (None, None)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(_read(tls.roots), *pair), options=options)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """The server's; clients must have a certificate of the CA, where one is given."""
    pairs = [(_read(tls.key), _read(tls.cert))]
    ca = _read(tls.ca) if tls.ca else None
    return grpc.ssl_server_credentials(pairs, ca, require_client_auth=ca is not None)


def check_coordinator(tls: Tls, host: str) -> None:
    """Raises UsageError unless the coordinator's host, which others know as `host`, can use these files."""
    if not tls.given:
        return
    if not tls.cert:
        raise UsageError("--tls-ca: the coordinator's host needs --tls-cert and --tls-key, too")
    server, client = _context(ssl.PROTOCOL_TLS_SERVER, tls), _context(ssl.PROTOCOL_TLS_CLIENT, tls)
    try:
        _handshake(server, client, host)
    except ssl.SSLError as error:
        why = f"--tls-cert {tls.cert}: workers at {host} could not trust it: {_reason(error)}. "
        if tls.ca:
            fix = f"It must be valid now, come from {tls.ca}, and name {host} among its alternative names."
        else:
            fix = f"It must be valid now, signed by itself (or give --tls-ca), and name {host}."
        raise UsageError(why + fix) from error
    check_client(tls)


def check_client(tls: Tls) -> None:
    """Raises UsageError unless this host's own files fit together: they exist, match, and are valid now."""
    if not tls.given:
        return
    if not tls.ca and not tls.cert:
        raise UsageError("--tls-ca is missing: what shall the coordinator's certificate be checked against?")
    client = _context(ssl.PROTOCOL_TLS_CLIENT, tls)
    if not tls.mutual:
        return
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    server = _context(ssl.PROTOCOL_TLS_SERVER, tls)
    server.verify_mode = ssl.CERT_REQUIRED
    try:
        _handshake(server, client, "")
    except ssl.SSLError as error:
        raise UsageError(
            f"--tls-cert {tls.cert}: the coordinator would not accept it: {_reason(error)}. It must be valid now, come "
            f"from {tls.ca}, and be meant for clients."
        ) from error


def why_jax_cannot(tls: Tls, can_mtls: bool, jaxlib_version: str) -> str | None:
    """Why JAX's service cannot use these files, in words for the user; None if it can, or nothing was asked for.

    Args:
      tls: checked by `check_coordinator`.
      can_mtls: whether this jaxlib knows mutual TLS.
      jaxlib_version: for the message.
    """
    if not tls.given:
        return None
    if not tls.ca:
        return "it knows only mutual TLS, and there is no --tls-ca"
    if not can_mtls:
        return f"jaxlib {jaxlib_version} has no TLS for it; 0.11.2 and later have"
    server, client = _context(ssl.PROTOCOL_TLS_SERVER, tls), _context(ssl.PROTOCOL_TLS_CLIENT, tls)
    if tls.peer_uri_prefix:
        client.check_hostname = False
    try:
        peer = _handshake(server, client, "" if tls.peer_uri_prefix else RELAY_HOST)
    except ssl.SSLError as error:
        return (
            f"workers reach it through a relay at {RELAY_HOST}, which {tls.cert} does not name ({_reason(error)}). "
            "Add that address to the certificate, or give --tls-peer-uri-prefix"
        )
    uris = [value for kind, value in peer if kind == "URI"]
    if tls.peer_uri_prefix and not any(uri.startswith(tls.peer_uri_prefix) for uri in uris):
        found = ", ".join(uris) or "none"
        return f"no URI in {tls.cert} begins with {tls.peer_uri_prefix} (--tls-peer-uri-prefix); it has: {found}"
    return None


def _context(protocol: int, tls: Tls) -> ssl.SSLContext:
    """With this host's certificate and roots. Raises UsageError if a file cannot be used."""
    context = ssl.SSLContext(protocol)
    if tls.cert:
        _require_readable("--tls-cert", tls.cert)
        _require_readable("--tls-key", tls.key)
        try:
            context.load_cert_chain(tls.cert, tls.key, password=lambda: "")
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                f"--tls-cert {tls.cert} and --tls-key {tls.key} cannot be used together: {_reason(error)}. "
                "Give a certificate chain and its private key, without a password, as PEM files."
            ) from error
    option = "--tls-ca" if tls.ca else "--tls-cert"
    _require_readable(option, tls.roots)
    try:
        context.load_verify_locations(tls.roots)
    except ssl.SSLError as error:
        raise UsageError(f"{option} {tls.roots}: no certificates in PEM form ({_reason(error)})") from error
    return context


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> list[tuple[str, str]]:
    """Both ends of a TLS connection, in memory. Returns the alternative names of the server's certificate.

    Raises ssl.SSLError: one end does not accept the other.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host or None),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    # Each end needs to be asked a few times; with TLS 1.3 the client is done before the server has judged it.
    for _ in range(8):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    peer = ends[0].getpeercert() or {}
    return [(str(entry[0]), str(entry[1])) for entry in peer.get("subjectAltName", ())]  # type: ignore[union-attr]


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.rstrip(".")
    return str(error)


def _require_readable(option: str, path: str) -> None:
    try:
        _read(path)
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be read ({error.strerror})") from error


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; of names, only localhost counts."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
