"""The agent against a small coordinator, with workers that are plain Python one-liners."""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest

from elastic_train.coordinator import control_pb2, control_pb2_grpc, wire
from elastic_train.launch import agent as agent_module
from elastic_train.launch.agent import Agent
from elastic_train.launch.environment import JaxRuntime
from elastic_train.membership.group import Identity

LIMIT_S = 20.0
SLEEPER = "import time; time.sleep(600)"


class FakeCoordinator(control_pb2_grpc.ControlServicer):
    """Sends what a test puts into `orders`, keeps what the agent says in `reports`."""

    def __init__(self, bind: str = "127.0.0.1:0") -> None:
        self.orders: queue.SimpleQueue[control_pb2.ToAgent | None] = queue.SimpleQueue()
        self.reports: queue.SimpleQueue[control_pb2.FromAgent | None] = queue.SimpleQueue()
        self.metadata: dict[str, str] = {}
        self.pool = ThreadPoolExecutor(8)
        self.server = grpc.server(self.pool)
        control_pb2_grpc.add_ControlServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port(bind)}"
        self.server.start()
        welcome = control_pb2.AgentWelcome(jax_address=self.address, num_nodes=64)
        self.orders.put(control_pb2.ToAgent(welcome=welcome))

    def Agent(self, request_iterator, context):
        self.metadata = dict(context.invocation_metadata())
        threading.Thread(target=self._read, args=(request_iterator,), daemon=True).start()
        yield from iter(self.orders.get, None)

    def _read(self, requests) -> None:
        try:
            for request in requests:
                self.reports.put(request)
        except grpc.RpcError:
            pass  # the agent is gone
        finally:
            self.reports.put(None)

    def start(self, slot: int, incarnation: int = 0, node: int = 1) -> None:
        identity = control_pb2.Identity(slot=slot, incarnation=incarnation, node=node)
        self.orders.put(control_pb2.ToAgent(start=control_pb2.StartWorker(identity=identity)))

    def kill(self, slot: int, incarnation: int = 0, node: int = 1, dump_stacks: bool = False) -> None:
        identity = control_pb2.Identity(slot=slot, incarnation=incarnation, node=node)
        kill = control_pb2.KillWorker(identity=identity, reason="test", dump_stacks=dump_stacks)
        self.orders.put(control_pb2.ToAgent(kill=kill))

    def shutdown(self, exit_code: int = 0) -> None:
        message = control_pb2.Shutdown(exit_code=exit_code, reason="done")
        self.orders.put(control_pb2.ToAgent(shutdown=message))

    def report(self, kind: str):
        message = self.reports.get(timeout=LIMIT_S)
        assert message is not None and message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    def close(self) -> None:
        self.orders.put(None)
        self.server.stop(0).wait(LIMIT_S)
        self.pool.shutdown()


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    fake = FakeCoordinator()
    yield fake
    fake.close()


class Agents:
    """Makes agents whose workers run a piece of Python code, and ends them after the test."""

    def __init__(self, coordinator: FakeCoordinator, log_dir: Path) -> None:
        self.coordinator = coordinator
        self.log_dir = log_dir
        self.made: list[Agent] = []

    def __call__(self, code: str, command: list[str] | None = None) -> Agent:
        def environment(identity: Identity, jax: JaxRuntime) -> dict[str, str]:
            return {**os.environ, "SLOT": str(identity.slot), "NODES": str(jax.num_nodes), "RELAY": jax.address}

        agent = Agent(
            self.coordinator.address,
            "s3cret",
            [0, 1],
            command or [sys.executable, "-c", textwrap.dedent(code)],
            environment,
            self.log_dir,
            "here",
            5.0,
        )
        self.made.append(agent)
        agent.start()
        assert list(self.coordinator.report("hello").slots) == [0, 1]
        return agent


@pytest.fixture
def agents(coordinator: FakeCoordinator, tmp_path: Path) -> Iterator[Agents]:
    made = Agents(coordinator, tmp_path)
    yield made
    for agent in made.made:
        agent.close(LIMIT_S)


def wait_gone(*pids: int) -> None:
    """Waits until these processes have ended, be they children or not."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([descriptor], [], [], LIMIT_S)[0], f"process {pid} is still there"
        finally:
            os.close(descriptor)


def wait_for_text(path: Path, count: int = 1) -> list[str]:
    """Waits until `path` holds `count` whole lines."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if len(lines) >= count and lines[count - 1].endswith("\n"):
            return [line.strip() for line in lines]
        assert time.monotonic() < deadline, f"{path} has {len(lines)} lines, {count} expected"
        threading.Event().wait(0.01)  # a file gives no event


def test_starts_with_its_environment_and_reports_the_exit(
    coordinator: FakeCoordinator, agents: Agents, tmp_path: Path
) -> None:
    agents("import os, sys; print(os.environ['SLOT'], os.environ['NODES'], sys.stdin.read() == ''); sys.exit(7)")
    assert coordinator.metadata[wire.SECRET_KEY] == "s3cret"
    coordinator.start(1, incarnation=4, node=9)
    started = coordinator.report("started")
    exited = coordinator.report("exited")
    assert started.identity == exited.identity == control_pb2.Identity(slot=1, incarnation=4, node=9)
    assert (exited.exit_code, exited.traceback) == (7, "")
    assert abs(exited.time - time.time()) < LIMIT_S
    assert (tmp_path / "1-4.log").read_text() == "1 64 True\n"
    wait_gone(started.pid)


def test_worker_leads_a_session(coordinator: FakeCoordinator, agents: Agents) -> None:
    agents(SLEEPER)
    coordinator.start(0)
    pid = coordinator.report("started").pid
    assert os.getsid(pid) == os.getpgid(pid) == pid


def test_exit_is_reported_within_milliseconds(coordinator: FakeCoordinator, agents: Agents) -> None:
    agents(SLEEPER)
    waits = []
    for incarnation in range(5):
        coordinator.start(0, incarnation)
        pid = coordinator.report("started").pid
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert coordinator.report("exited").exit_code == -signal.SIGKILL
        waits.append(time.monotonic() - killed)
    print(f"SIGKILL to report at the coordinator: {min(waits) * 1e3:.1f} to {max(waits) * 1e3:.1f} ms")
    assert min(waits) < 0.05


PARENT = """
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    {then}
"""


def test_kill_takes_grandchildren_along(coordinator: FakeCoordinator, agents: Agents, tmp_path: Path) -> None:
    agents(PARENT.format(then="time.sleep(600)"))
    coordinator.start(0)
    pid = coordinator.report("started").pid
    grandchild = int(wait_for_text(tmp_path / "0-0.log")[0])
    coordinator.kill(0)
    assert coordinator.report("exited").exit_code == -signal.SIGKILL
    wait_gone(pid, grandchild)


def test_exit_is_reported_without_a_log(coordinator: FakeCoordinator, agents: Agents, tmp_path: Path) -> None:
    agents("import time; time.sleep(600)")
    coordinator.start(0)
    coordinator.report("started")
    (tmp_path / "0-0.log").unlink()
    coordinator.kill(0)
    assert coordinator.report("exited").exit_code == -signal.SIGKILL


def test_grandchildren_do_not_outlive_an_exit(coordinator: FakeCoordinator, agents: Agents, tmp_path: Path) -> None:
    agents(PARENT.format(then=""))
    coordinator.start(0)
    assert coordinator.report("started").pid
    assert coordinator.report("exited").exit_code == 0
    wait_gone(int(wait_for_text(tmp_path / "0-0.log")[0]))


def test_kill_of_an_older_start_is_harmless(coordinator: FakeCoordinator, agents: Agents) -> None:
    agents(SLEEPER)
    coordinator.start(0, incarnation=1, node=2)
    pid = coordinator.report("started").pid
    coordinator.kill(0, incarnation=0, node=1)
    coordinator.kill(0, incarnation=1, node=2)
    assert coordinator.report("exited").identity.incarnation == 1
    wait_gone(pid)


def test_reports_the_first_traceback(coordinator: FakeCoordinator, agents: Agents) -> None:
    agent = agents("print('hello', flush=True)\ntry: 1 / 0\nexcept ZeroDivisionError: raise ValueError('bad input')")
    coordinator.start(0)
    coordinator.report("started")
    exited = coordinator.report("exited")
    assert exited.exit_code == 1
    assert exited.traceback.startswith("Traceback (most recent call last):")
    assert "ZeroDivisionError: division by zero" in exited.traceback
    assert exited.traceback.endswith("ValueError: bad input")
    assert agent.first_failure is not None and agent.first_failure.identity.slot == 0


def test_a_command_that_does_not_exist_counts_as_an_exit(coordinator: FakeCoordinator, agents: Agents) -> None:
    agents("", command=["/does/not/exist"])
    coordinator.start(0)
    exited = coordinator.report("exited")
    assert exited.exit_code == 127
    assert "No such file or directory: '/does/not/exist'" in exited.traceback


def test_shutdown_ends_all_and_reports_it(coordinator: FakeCoordinator, agents: Agents) -> None:
    agent = agents(SLEEPER)
    pids = []
    for slot in (0, 1):
        coordinator.start(slot, node=1 + slot)
        pids.append(coordinator.report("started").pid)
    coordinator.shutdown(exit_code=3)
    assert {coordinator.report("exited").identity.slot for _ in pids} == {0, 1}
    assert agent.wait(LIMIT_S) == (3, "done")
    wait_gone(*pids)
    assert not psutil.Process().children()


def test_close_ends_all(coordinator: FakeCoordinator, agents: Agents) -> None:
    agent = agents(SLEEPER)
    coordinator.start(0)
    pid = coordinator.report("started").pid
    assert agent.close(LIMIT_S).exit_code == 130
    wait_gone(pid)


def test_loss_of_the_coordinator_ends_all(coordinator: FakeCoordinator, agents: Agents) -> None:
    agent = agents(SLEEPER)
    coordinator.start(0)
    pid = coordinator.report("started").pid
    coordinator.close()
    end = agent.wait(LIMIT_S)
    assert end.exit_code == 4
    assert f"lost the coordinator at {coordinator.address}" in end.reason
    wait_gone(pid)


def with_worker_that_exits(on_sigterm: int, coordinator: FakeCoordinator, agents: Agents, log_dir: Path) -> Agent:
    """An agent with one worker, which ends with the exit code `on_sigterm` when it gets that signal."""
    agent = agents(
        f"""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit({on_sigterm}))
        print("ready", flush=True)
        time.sleep(600)
        """
    )
    coordinator.start(0)
    coordinator.report("started")
    wait_for_text(log_dir / "0-0.log")
    return agent


def test_forwards_signals_to_workers(coordinator: FakeCoordinator, agents: Agents, tmp_path: Path) -> None:
    agent = with_worker_that_exits(5, coordinator, agents, tmp_path)
    agent.forward(signal.SIGTERM)
    assert coordinator.report("exited").exit_code == 5


AGENT_PROCESS = """
    import os, sys
    from pathlib import Path
    from elastic_train.launch.agent import Agent

    address, log_dir = sys.argv[1:]
    worker = (
        "from elastic_train.launch.bond import die_with_parent; die_with_parent(int(%r));"
        "import time; print('bound', flush=True); time.sleep(600)" % os.getpid()
    )
    environment = dict(os.environ)
    command = [sys.executable, "-c", worker]
    agent = Agent(address, "s", [0, 1], command, lambda *_: environment, Path(log_dir), "here", 5.0)
    agent.start()
    sys.exit(agent.wait(600).exit_code)
"""


def test_sigkill_of_the_agent_takes_its_workers_along(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    code = textwrap.dedent(AGENT_PROCESS)
    agent = subprocess.Popen([sys.executable, "-c", code, coordinator.address, str(tmp_path)])
    try:
        coordinator.report("hello")
        pids = []
        for slot in (0, 1):
            coordinator.start(slot, node=1 + slot)
            pids.append(coordinator.report("started").pid)
        for slot in (0, 1):
            wait_for_text(tmp_path / f"{slot}-0.log")
    finally:
        agent.kill()
        agent.wait(LIMIT_S)
    wait_gone(*pids)


def test_a_worker_whose_agent_is_already_gone_ends_at_once() -> None:
    code = "from elastic_train.launch.bond import die_with_parent; die_with_parent(1 << 22)"
    ended = subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S, capture_output=True, text=True)
    assert ended.returncode == 77
    assert "is gone" in ended.stderr


def test_an_agent_that_leaves_waits_for_its_workers_and_starts_none(
    coordinator: FakeCoordinator, agents: Agents, tmp_path: Path
) -> None:
    agent = with_worker_that_exits(0, coordinator, agents, tmp_path)
    agent.leave("a test")
    assert coordinator.report("leaving").reason == "a test"
    assert coordinator.report("exited").exit_code == 0
    assert coordinator.reports.get(timeout=LIMIT_S) is None  # it has closed its side
    coordinator.start(1, node=2)  # sent before it was known here
    coordinator.orders.put(None)
    assert agent.wait(LIMIT_S) == (130, "left the job on request")
    assert not (tmp_path / "1-0.log").exists()


def test_an_agent_without_workers_leaves_at_once(coordinator: FakeCoordinator, agents: Agents) -> None:
    agent = agents("")
    coordinator.start(0)
    coordinator.report("started")
    coordinator.report("exited")
    agent.leave("a test")
    coordinator.report("leaving")
    assert coordinator.reports.get(timeout=LIMIT_S) is None
    coordinator.orders.put(None)
    assert agent.wait(LIMIT_S).exit_code == 130


def lone_agent(address: str, tmp_path: Path, said: list[str], **more) -> Agent:
    return Agent(
        address,
        "s3cret",
        [0],
        [sys.executable, "-c", SLEEPER],
        lambda *_: os.environ,
        tmp_path,
        "here",
        5.0,
        on_note=said.append,
        **more,
    )


def test_says_whom_it_waits_for_and_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "SAY_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections and never answers
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        said: list[str] = []
        agent = lone_agent(address, tmp_path, said, patience_s=1.0)
        agent.start()
        end = agent.wait(LIMIT_S)
    assert said == [f"waiting for the coordinator at {address}, for up to 1 s"]
    assert end.exit_code == 4
    assert end.reason.startswith(f"cannot join the coordinator at {address} (no answer within 1 s)")


def test_a_lost_coordinator_is_sought_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a cut of the network: its workers are gone before it is back, and it is known by its id."""
    monkeypatch.setattr(agent_module, "RETRY_S", 0.01)
    said: list[str] = []
    first = FakeCoordinator()
    agent = lone_agent(first.address, tmp_path, said, patience_s=LIMIT_S, rejoin=True)
    agent.start()
    try:
        hello = first.report("hello")
        first.start(0)
        pid = first.report("started").pid
        first.server.stop(0).wait(LIMIT_S)
        wait_gone(pid)
        second = FakeCoordinator(first.address)
        try:
            again = second.report("hello")
            assert (again.id, list(again.slots)) == (hello.id, [0]) and again.id
            assert len(said) == 1 and "Trying to reach it again, for up to 20 s" in said[0]
            second.start(0, incarnation=1, node=2)
            second.report("started")
            second.shutdown()
            assert second.report("exited").exit_code == -signal.SIGKILL
            assert agent.wait(LIMIT_S) == (0, "done")
        finally:
            second.close()
    finally:
        agent.close(LIMIT_S)
        first.close()


STUCK = """
import ctypes, threading
from elastic_train.launch.stacks import install_dumps
install_dumps()
threading.Thread(target=threading.Event().wait, daemon=True).start()
def never_back():
    print("stuck", flush=True)
    ctypes.PyDLL(None).sleep(600)
never_back()
"""


def test_a_stuck_worker_writes_the_stacks_of_all_threads_before_it_ends(coordinator, agents, tmp_path) -> None:
    """It keeps the interpreter's lock, so no Python code of its own can run."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    agents("", [sys.executable, str(script)])
    coordinator.start(0)
    coordinator.report("started")
    wait_for_text(tmp_path / "0-0.log")
    coordinator.kill(0, dump_stacks=True)
    exited = coordinator.report("exited")
    assert exited.exit_code == -signal.SIGUSR2
    assert exited.stuck_at == f"{script}:8 in never_back"
    assert exited.traceback == ""
    log = (tmp_path / "0-0.log").read_text()
    assert log.count("(most recent call first):") == 2
    assert "in wait" in log and "in never_back" in log


def test_a_worker_that_does_not_dump_is_killed_all_the_same(coordinator, agents, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("elastic_train.launch.processes.DUMP_LIMIT_S", 0.1)
    agents("import signal, time; signal.signal(signal.SIGUSR2, signal.SIG_IGN); print(1, flush=True); time.sleep(600)")
    coordinator.start(1)
    coordinator.report("started")
    wait_for_text(tmp_path / "1-0.log")
    coordinator.kill(1, dump_stacks=True)
    exited = coordinator.report("exited")
    assert (exited.exit_code, exited.stuck_at) == (-signal.SIGKILL, "")
