"""JAX's coordination service as we run it, with real JAX processes.

JAX's own heartbeat timeout is 60 s, so that only the tombstone can release a barrier in time.
"""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_train.coordinator import jax_service
from elastic_train.coordinator.jax_service import JaxService
from elastic_train.errors import UsageError

NUM_NODES = 12


class JaxProcess:
    """A worker process with its lines of output as a queue."""

    def __init__(self, service: JaxService, node: int, errors: Path) -> None:
        script = Path(__file__).with_name("jax_process.py")
        self._errors = errors / f"{node}.log"
        with self._errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(script), service.address, str(NUM_NODES), str(node)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("[Gloo]"):  # it greets on stdout
                self._lines.put(line.strip())
        self._lines.put("end of output")

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def expect(self, line: str, timeout: float) -> None:
        got = self._lines.get(timeout=timeout)
        assert got == line, self._errors.read_text()

    def expect_all(self, lines: set[str], timeout: float) -> None:
        """These lines, in any order."""
        got = {self._lines.get(timeout=timeout) for _ in lines}
        assert got == lines, self._errors.read_text()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def service() -> Iterator[JaxService]:
    service = JaxService(NUM_NODES, heartbeat_timeout_s=60)
    yield service
    service.close()


def local_ids(node: int) -> str:
    return ",".join(str(2048 * node + ordinal) for ordinal in range(8))


def test_tombstone_releases_the_barrier_and_a_fresh_node_joins(service: JaxService, tmp_path: Path) -> None:
    # Node 1 is never started: the topology must come from whoever is first.
    processes = {node: JaxProcess(service, node, tmp_path) for node in (2, 3)}
    try:
        for node, process in processes.items():
            process.expect(f"devices {8 * NUM_NODES} {local_ids(node)}", timeout=60)
        for process in processes.values():
            process.say("live 2,3")
        for process in processes.values():
            process.expect("live 2,3", timeout=10)

        processes[3].say("live 2,3")  # waits for node 2, which will not come
        victim = processes[2].process
        victim.kill()
        victim.wait()
        started = time.monotonic()
        service.tombstone(2)
        tombstone_s = time.monotonic() - started
        processes[3].expect("live 3", timeout=5)
        released_s = time.monotonic() - started
        print(f"tombstone {tombstone_s * 1000:.1f} ms, barrier released after {released_s * 1000:.1f} ms")

        processes[4] = JaxProcess(service, 4, tmp_path)
        processes[4].expect(f"devices {8 * NUM_NODES} {local_ids(4)}", timeout=60)
        for node in (3, 4):
            processes[node].say("live 3,4")
        for node in (3, 4):
            processes[node].expect("live 3,4", timeout=10)
        for node in (3, 4):
            processes[node].say("exit")
            assert processes[node].process.wait(timeout=20) == 0
    finally:
        for process in processes.values():
            process.end()


def test_members_do_not_wait_for_one_that_died_before_it_came(service: JaxService, tmp_path: Path) -> None:
    """Whatever its place among them. Gloo itself would wait 30 s for the address that it has not told."""
    processes = {node: JaxProcess(service, node, tmp_path) for node in (2, 4)}
    try:
        for node, process in processes.items():
            process.expect(f"devices {8 * NUM_NODES} {local_ids(node)}", timeout=60)
        for absent, nodes in ((1, "1,2,4"), (3, "2,3,4"), (5, "2,4,5")):
            for process in processes.values():
                process.say(f"meet {nodes}")
            for process in processes.values():
                process.expect("meeting", timeout=20)
            for process in processes.values():
                process.say(f"died {nodes} {absent}")
            for process in processes.values():
                process.expect_all({"heard", "not met"}, timeout=20)
        for process in processes.values():
            process.say("meet 2,4")
        for process in processes.values():
            process.expect("meeting", timeout=20)
            process.expect("met", timeout=20)
    finally:
        for process in processes.values():
            process.end()


def test_fifty_tombstones_leave_no_thread_and_no_file_behind(service: JaxService) -> None:
    me = psutil.Process()
    for _ in range(3):
        service.tombstone(1)
    threads, files = me.num_threads(), me.num_fds()
    for number in range(50):
        service.tombstone(1 + number % (NUM_NODES - 1))
    # A few of gRPC's own threads come and go.
    assert me.num_threads() <= threads + 3
    assert me.num_fds() <= files + 3


def test_only_workers_get_a_tombstone(service: JaxService) -> None:
    for node in (0, NUM_NODES, -1):
        with pytest.raises(ValueError, match="none of the workers"):
            service.tombstone(node)


def test_nobody_can_take_the_port_before_the_service_has_it() -> None:
    with jax_service._held_port("127.0.0.1") as port, socket.socket() as thief:
        with pytest.raises(OSError):
            thief.bind(("127.0.0.1", port))
        with jax_service._held_port("127.0.0.1") as other:
            assert other != port


def test_no_address_of_this_machine() -> None:
    with pytest.raises(UsageError, match="Use an address of this machine"):
        JaxService(2, heartbeat_timeout_s=60, host="192.0.2.1")


def test_all_node_ids_of_a_large_job_register_quickly() -> None:
    started = time.monotonic()
    service = JaxService(256, heartbeat_timeout_s=60)
    print(f"256 node ids registered in {time.monotonic() - started:.2f} s")
    service.close()
    service.close()
