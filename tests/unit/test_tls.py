"""Which TLS files are refused before a job starts, and in which words."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from elastic_train.coordinator.security import (
    PLAIN,
    Tls,
    check_client,
    check_coordinator,
    open_channel,
    server_credentials,
    why_jax_cannot,
)
from elastic_train.errors import UsageError

LONG_AGO = datetime(2020, 1, 1)
HOST = "10.0.0.7"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def make(tmp_path: Path, authority: trustme.CA):
    def files(*names: str, by: trustme.CA = authority, **more) -> Tls:
        number = len(list(tmp_path.iterdir()))
        certificate = by.issue_cert(*names, **more)
        paths = {name: tmp_path / f"{name}{number}.pem" for name in ("cert", "key", "ca")}
        certificate.private_key_pem.write_to_path(str(paths["key"]))
        certificate.cert_chain_pems[0].write_to_path(str(paths["cert"]))
        authority.cert_pem.write_to_path(str(paths["ca"]))
        return Tls(**{name: str(path) for name, path in paths.items()})

    return files


def test_good_files_are_accepted(make) -> None:
    tls = make(HOST, "127.0.0.1", "train.example.org")
    for host in (HOST, "127.0.0.1", "train.example.org"):
        check_coordinator(tls, host)
    check_client(Tls(ca=tls.ca))
    assert why_jax_cannot(tls, True, "0.12.0") is None
    assert Tls.load(tls.dump()) == tls


def test_nothing_given_is_nothing_to_check() -> None:
    check_coordinator(PLAIN, HOST)
    check_client(PLAIN)
    assert why_jax_cannot(PLAIN, True, "0.12.0") is None
    assert not PLAIN.given


def test_another_name(make) -> None:
    with pytest.raises(UsageError, match=r"workers at 10.0.0.7 could not trust it: IP address mismatch.*name 10.0.0.7"):
        check_coordinator(make("10.0.0.8"), HOST)


def test_expired(make) -> None:
    tls = make(HOST, not_before=LONG_AGO, not_after=datetime(2020, 2, 1))
    with pytest.raises(UsageError, match="certificate has expired"):
        check_coordinator(tls, HOST)
    with pytest.raises(UsageError, match="the coordinator would not accept it: certificate has expired"):
        check_client(tls)


def test_another_authority(make) -> None:
    tls = make(HOST, by=trustme.CA())
    with pytest.raises(UsageError, match=r"unable to get local issuer certificate.*come from "):
        check_coordinator(tls, HOST)
    with pytest.raises(UsageError, match="unable to get local issuer certificate"):
        check_client(tls)


def test_a_certificate_that_is_not_its_own_authority_needs_one(make) -> None:
    tls = make(HOST)
    with pytest.raises(UsageError, match=r"signed by itself \(or give --tls-ca\)"):
        check_coordinator(Tls(cert=tls.cert, key=tls.key), HOST)


def test_the_key_of_another_certificate(make) -> None:
    one, other = make(HOST), make(HOST)
    with pytest.raises(UsageError, match=r"--tls-cert .* and --tls-key .* cannot be used together.*mismatch"):
        check_coordinator(Tls(cert=one.cert, key=other.key, ca=one.ca), HOST)


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_missing_and_broken_files(make, tmp_path: Path, name: str) -> None:
    tls = make(HOST)
    given = {"cert": tls.cert, "key": tls.key, "ca": tls.ca}
    with pytest.raises(UsageError, match=rf"--tls-{name} /does/not/exist: cannot be read \(No such file"):
        check_coordinator(Tls(**{**given, name: "/does/not/exist"}), HOST)
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(UsageError, match=str(broken)):
        check_coordinator(Tls(**{**given, name: str(broken)}), HOST)


def test_options_that_do_not_go_together(make) -> None:
    tls = make(HOST)
    with pytest.raises(UsageError, match="belong together"):
        Tls(cert=tls.cert)
    with pytest.raises(UsageError, match="must end with '/'"):
        Tls(cert=tls.cert, key=tls.key, ca=tls.ca, peer_uri_prefix="spiffe://example.org")
    with pytest.raises(UsageError, match="needs --tls-cert, --tls-key and --tls-ca"):
        Tls(ca=tls.ca, peer_uri_prefix="spiffe://example.org/")
    with pytest.raises(UsageError, match="needs --tls-cert and --tls-key, too"):
        check_coordinator(Tls(ca=tls.ca), HOST)


def test_why_jax_cannot_use_them(make) -> None:
    tls = make(HOST)
    assert "127.0.0.1, which" in (why_jax_cannot(tls, True, "0.12.0") or "")
    assert "jaxlib 0.10.2 has no TLS" in (why_jax_cannot(tls, False, "0.10.2") or "")
    assert "no --tls-ca" in (why_jax_cannot(Tls(cert=tls.cert, key=tls.key), True, "0.12.0") or "")
    prefixed = Tls(cert=tls.cert, key=tls.key, ca=tls.ca, peer_uri_prefix="spiffe://example.org/")
    assert "it has: none" in (why_jax_cannot(prefixed, True, "0.12.0") or "")


def test_what_jax_is_told(make) -> None:
    tls = make(HOST)
    told = {"mtls_cert_file": tls.cert, "mtls_key_file": tls.key, "mtls_ca_file": tls.ca}
    assert tls.jax_arguments() == told
    prefixed = Tls(cert=tls.cert, key=tls.key, ca=tls.ca, peer_uri_prefix="spiffe://example.org/")
    assert prefixed.jax_arguments() == {**told, "mtls_peer_uri_prefix": "spiffe://example.org/"}


def test_a_self_signed_certificate_is_enough_to_encrypt(tmp_path: Path) -> None:
    """Its authority is itself; clients need no certificate of their own."""
    if shutil.which("openssl") is None:
        pytest.skip("no `openssl` command to sign with")
    tls = Tls(cert=str(tmp_path / "cert.pem"), key=str(tmp_path / "key.pem"))
    subject = ("-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    files = ("-keyout", tls.key, "-out", tls.cert)
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, *files]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    check_coordinator(tls, "127.0.0.1")
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        port = server.add_secure_port("127.0.0.1:0", server_credentials(tls))
        server.start()
        request = health_pb2.HealthCheckRequest()
        for client in (tls, Tls(ca=tls.cert)):
            with open_channel(f"127.0.0.1:{port}", 5.0, client) as channel:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=30)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        server.stop(0).wait(30)
