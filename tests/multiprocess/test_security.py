"""Strangers at the coordinator's port, what of the secret can be seen, and TLS."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import psutil
import pytest
import trustme
from job import ROOT, UNSAVED, Job, plain_run

from elastic_train import jax_private
from elastic_train.coordinator import control_pb2, wire
from elastic_train.coordinator.security import PLAIN, Tls, open_channel

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 30.0
WAIT = {"wait_for_ready": True, "timeout": PATIENCE_S}
RECIPE = """
import os, subprocess, time
from recipes.linear import *

class Paced(Linear):
    def model(self, rngs):
        print("CHILD", subprocess.run(["env"], capture_output=True, text=True, check=True).stdout, flush=True)
        return super().model(rngs)

    def on_step(self, event):
        time.sleep(0.02)

if __name__ == "__main__":
    et.main(Paced)
"""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = bytes(3) + b"\x04" + bytes(5)
LIMITED_FILES = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")


class Strangers:
    """Connections of callers that do not belong to the job, all held open until the end of the test."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._open: list[socket.socket] = []
        self._done = threading.Event()
        self._slow: list[threading.Thread] = []

    def say(self, data: bytes, times: int = 1) -> None:
        for _ in range(times):
            connection = socket.create_connection(self._target, timeout=PATIENCE_S)
            self._open.append(connection)
            with contextlib.suppress(OSError):  # it may have been thrown out already
                connection.sendall(data)

    def say_slowly(self, data: bytes) -> None:
        def drip() -> None:
            with contextlib.suppress(OSError), socket.create_connection(self._target) as connection:
                for byte in data:
                    connection.sendall(bytes([byte]))
                    if self._done.wait(0.5):
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        self._slow.append(thread)

    def close(self) -> None:
        self._done.set()
        for connection in self._open:
            connection.close()
        for thread in self._slow:
            thread.join(PATIENCE_S)


def refusals(address: str, metadata) -> set[tuple]:
    """What a gRPC client gets that calls every method there is, and one that there is not."""
    service = control_pb2.DESCRIPTOR.services_by_name["Control"]
    calls = [(f"/{service.full_name}/{method.name}", method.client_streaming) for method in service.methods]
    calls += [("/elastic_train.Control/Nothing", False), ("/grpc.health.v1.Health/Watch", False)]
    answers = set()
    with grpc.insecure_channel(address) as channel:
        for name, is_stream in calls:
            payload = bytes(1 << 20)
            with pytest.raises(grpc.RpcError) as refused:
                if is_stream:
                    call = channel.stream_stream(name)(iter([payload]), metadata=metadata, **WAIT)
                    next(call)
                else:
                    channel.unary_unary(name)(payload, metadata=metadata, **WAIT)
            answers.add((refused.value.code(), refused.value.details()))
    return answers


def test_row_24_strangers_are_rejected_and_the_job_does_not_notice(tmp_path):
    recipe = tmp_path / "paced.py"
    recipe.write_text(RECIPE)
    options = ("--steps", "1000000", "--set", "faults.first_backoff_s=0.1")
    with Job(tmp_path / "run", recipe, *options, workers=2, prefix=LIMITED_FILES) as job:
        job.wait_members(0, 1)
        address = job.json("job.json")["address"]
        strangers = Strangers(address)
        try:
            strangers.say(b"\x00\xff" * 5000, times=20)
            strangers.say(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", times=20)
            strangers.say(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(508), times=20)
            strangers.say(HTTP2_PREFACE + EMPTY_SETTINGS + b"\xff\xff\xff\x00\x00" + bytes(1 << 20), times=5)
            strangers.say(HTTP2_PREFACE + EMPTY_SETTINGS, times=20)
            strangers.say_slowly(HTTP2_PREFACE + EMPTY_SETTINGS)
            strangers.say(b"", times=300)  # more than the process may have files
            step = job.lines("ledger.jsonl")[-1]["step"]
            job.wait_step(step + 20)
            answers = refusals(address, None) | refusals(address, wire.secret_metadata("a guess"))
            assert len(answers) == 1 and answers.pop()[0] is grpc.StatusCode.UNAUTHENTICATED
            # Meanwhile a worker can be replaced: there are files left to start it with, and it can connect.
            job.kill(1)
            job.wait_event("recovered", kind="admission")
            job.wait_members(0, 1)
        finally:
            strangers.close()
        rejected = job.events("peer_rejected")
        assert [(event["peer"], event["calls"]) for event in rejected] == [("127.0.0.1", 1)]
        assert job.output.count("rejected a caller at 127.0.0.1") == 1
        assert_secret_is_hidden(job)
        job.process.send_signal(signal.SIGINT)
        assert job.finish() == 130, job.logs()
        assert [event["exit_code"] for event in job.events("worker_died")] == [-9]
        assert len(job.output.splitlines()) < 60, job.output
        summary = job.summary
    alone = plain_run(tmp_path / "alone", summary["step"], recipe=recipe)
    assert summary["state_sha256"] == alone["state_sha256"]


def assert_secret_is_hidden(job: Job) -> None:
    path = job.run_dir / "secret"
    secret = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(secret) == 32
    others = [file for file in job.run_dir.rglob("*") if file.is_file() and file != path]
    assert "CHILD" in job.logs() and "ELASTIC_TRAIN_SLOT" in job.logs()  # a child's environment is in the log
    assert [file for file in others if secret in file.read_text(errors="replace")] == []
    job.note_processes()
    processes = [psutil.Process(job.process.pid), *psutil.Process(job.process.pid).children(recursive=True)]
    assert [process for process in processes if secret in " ".join(process.cmdline())] == []


def listeners(job: Job) -> set[str]:
    """Addresses at which any process of the job listens."""
    parent = psutil.Process(job.process.pid)
    found = set()
    for process in [parent, *parent.children(recursive=True)]:
        sockets = process.net_connections(kind="tcp")
        found |= {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return {address.removeprefix("::ffff:") for address in found}  # one way to write an IPv4 address


# TLS ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write_files(directory: Path, authority: trustme.CA, *names: str, **more) -> dict[str, str]:
    """A host's files, as options."""
    directory.mkdir()
    certificate = authority.issue_cert(*names, **more)
    paths = {name: str(directory / f"{name}.pem") for name in ("cert", "key", "ca")}
    certificate.private_key_pem.write_to_path(paths["key"])
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(paths["cert"], append=True)
    authority.cert_pem.write_to_path(paths["ca"])
    return paths


def options_of(paths: dict[str, str], *names: str) -> list[str]:
    return [text for name in names for text in (f"--tls-{name}", paths[name])]


def test_a_job_with_mutual_tls_keeps_out_who_has_no_certificate(tmp_path, authority):
    """Both ends prove who they are; JAX's service, too, where the jaxlib can."""
    ours = write_files(tmp_path / "ours", authority, "127.0.0.1")
    theirs = write_files(tmp_path / "theirs", trustme.CA(), "127.0.0.1")
    options = ("--steps", "1000000", *UNSAVED, *options_of(ours, "cert", "key", "ca"))
    with Job(tmp_path / "run", "linear", *options, workers=2) as job:
        job.wait_members(0, 1)
        jax_is_plain = "JAX's coordination service is NOT encrypted" in job.output
        assert jax_is_plain == (not jax_private.knows_mtls())
        status = subprocess.run(
            [sys.executable, "-m", "elastic_train.cli", "status", str(job.run_dir), "--json"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert json.loads(status.stdout)["status"] == "running"  # the coordinator has answered, not the files
        address, metadata = job.json("job.json")["address"], wire.secret_metadata((job.run_dir / "secret").read_text())
        stranger = Tls(ca=ours["ca"]), Tls(**{**theirs, "ca": ours["ca"]})
        for tls in (PLAIN, *stranger):
            with open_channel(address, 5.0, tls) as channel, pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/elastic_train.Control/Status")(b"", metadata=metadata, timeout=PATIENCE_S)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        if not jax_is_plain:
            service = jax_port(job)
            with socket.create_connection(("127.0.0.1", service), timeout=PATIENCE_S) as connection:
                connection.sendall(HTTP2_PREFACE + EMPTY_SETTINGS)
                assert not connection.recv(1 << 16).startswith(EMPTY_SETTINGS[:3])  # no HTTP/2 without TLS
        job.process.send_signal(signal.SIGINT)
        assert job.finish() == 130, job.logs()


def jax_port(job: Job) -> int:
    """The coordinator's process listens at the control plane's port and at that of JAX's service."""
    ours = {
        found.laddr.port
        for found in psutil.Process(job.events("generation_began")[-1]["pid"]).net_connections(kind="tcp")
        if found.status == psutil.CONN_LISTEN
    }
    (port,) = ours - {int(job.json("job.json")["address"].rpartition(":")[2])}
    return port


# Ports, run directories, and other jobs on the same host --------------------------------------------------


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that is to be refused before any worker starts."""
    command = [sys.executable, "-m", "elastic_train.cli", "run", "linear", "--workers", "2", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False)


def test_row_23_ports_run_directories_and_jobs_do_not_mix(tmp_path):
    options = ("--steps", "1000000", *UNSAVED)
    with Job(tmp_path / "one", "linear", *options, workers=2) as one, Job(tmp_path / "two", "linear", workers=2) as two:
        one.wait_members(0, 1)
        address = one.json("job.json")["address"]
        assert listeners(one) == {"127.0.0.1"}  # collectives and JAX's service included
        # The port of a job is refused to another one, by name. No trace is left.
        refused = start("--run-dir", str(tmp_path / "three"), "--bind", address)
        assert refused.returncode == 2
        assert f"--bind {address}: cannot listen there (Address already in use" in refused.stderr
        assert not (tmp_path / "three").exists()
        # So is its run directory while it runs.
        refused = start("--run-dir", str(one.run_dir))
        assert refused.returncode == 2 and "another job is writing to" in refused.stderr
        # Two jobs side by side have ports and secrets of their own, and one is not let into the other.
        assert two.finish() == 0, two.logs()
        other = {"ELASTIC_TRAIN_SECRET": (two.run_dir / "secret").read_text()}
        join = ("--coordinator", address, "--slots", "0")
        with Job(tmp_path / "stray", "linear", *join, workers=2, environ=other) as stray:
            assert stray.finish() == 4
            assert f"cannot join the coordinator at {address} (UNAUTHENTICATED" in stray.output
        one.wait_event("peer_rejected", peer="127.0.0.1")
        before = (one.run_dir / "events.jsonl").read_text()
        # A job that died leaves a directory that is not written again by who wants a run of its own.
        one.note_processes()
        one.process.kill()
        one.process.wait()
        assert one.processes_left() == []
        refused = start("--run-dir", str(one.run_dir), "--resume", "never")
        assert refused.returncode == 2 and "holds a run already" in refused.stderr
        assert (one.run_dir / "events.jsonl").read_text().startswith(before)
