"""One job on two hosts, each a network namespace: hosts that die, leave, and are cut off for a while.

The hosts have run directories of their own, and the same name: what it resolves to (127.0.0.1) is of no use to the
other one. The cut is silent: no connection is closed by it.
"""

import signal
from pathlib import Path

import psutil
import pytest
from job import FAULTY, Job, undisturbed_after
from network import ESTABLISHED, Host, network, own_connections, unavailable, wait_until

from elastic_train.launch.environment import TRACE_VARIABLE

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(unavailable()), reason=f"cannot simulate hosts: {unavailable()}"),
]

UNTRACED = {TRACE_VARIABLE: "0"}
"""Each host keeps its workers' barriers to itself, so that none can prove anything about all."""
SECRET = {**UNTRACED, "ELASTIC_TRAIN_SECRET": "what both hosts know"}
SETTINGS = (
    "faults.keepalive_s=1",
    "faults.first_backoff_s=0.1",
    "faults.coordinator_timeout_s=90",
    "checkpoint.keep=0",
)
COMMON = ("--steps", "1000000", "--set", *SETTINGS)
PACE_S = 0.03


@pytest.fixture
def hosts():
    with network("a", "b") as made:
        yield made


def first_host(host: Host, run_dir: Path, slots: str, *options: str, workers: int) -> Job:
    """The coordinator's host."""
    bind = ("--bind", f"{host.address}:0", "--slots", slots)
    return Job(
        run_dir, FAULTY, *COMMON, *bind, *options, workers=workers, pace_s=PACE_S, prefix=host.prefix, environ=SECRET
    )


def second_host(host: Host, run_dir: Path, slots: str, first: Job, *options: str, workers: int, environ=SECRET) -> Job:
    address = first.wait_for("the coordinator's address", lambda: coordinator_of(first))
    join = ("--coordinator", address, "--slots", slots)
    return Job(
        run_dir, FAULTY, *COMMON, *join, *options, workers=workers, pace_s=PACE_S, prefix=host.prefix, environ=environ
    )


def coordinator_of(job: Job) -> str:
    return job.json("job.json").get("address", "")


def workers_of(agent: Job) -> list[psutil.Process]:
    return [child for child in psutil.Process(agent.process.pid).children() if child.status() != psutil.STATUS_ZOMBIE]


def cross_host_sockets(job: Job, slot: int, address: str) -> list[tuple]:
    """Connections of a worker to another host's address: those of collectives, if it is not the coordinator's."""
    sockets = own_connections(job.worker_pid(slot))
    return [socket for socket in sockets if socket[2] == address and socket[4] == ESTABLISHED]


def stop_and_compare(first: Job) -> None:
    """Stops the job after a commit. All must hold the state of an undisturbed run of as many steps in one process."""
    first.process.send_signal(signal.SIGINT)
    assert first.finish() == 130, first.logs()
    assert first.events("digests_differ") == []
    assert first.processes_left() == []
    summary = first.summary
    assert [line["step"] for line in first.lines("ledger.jsonl")] == list(range(1, summary["step"] + 1))
    alone = undisturbed_after(summary["step"])
    assert summary["params_sha256"] == alone["params_sha256"]
    assert summary["state_sha256"] == alone["state_sha256"]


def test_row_16_a_host_dies_is_cut_off_leaves_and_returns_each_time(tmp_path, hosts):
    a, b = hosts
    with first_host(a, tmp_path / "a", "0-1", workers=3) as first:
        # A plain job of two hosts: exact at the end, and the members really talk to each other across.
        with second_host(b, tmp_path / "b1", "2", first, workers=3) as second:
            first.wait_members(0, 1, 2)
            assert cross_host_sockets(first, 0, b.address) and cross_host_sockets(first, 1, b.address)

            # The agent dies, and its workers with it.
            second.note_processes()
            second.process.kill()
            first.wait_members(0, 1)
            assert second.processes_left() == []
            assert first.events("agent_lost")

        with second_host(b, tmp_path / "b2", "2", first, workers=3) as second:
            first.wait_members(0, 1, 2)

            # The network is cut, which nobody is told.
            b.cut()
            first.wait_members(0, 1)
            wait_until("the workers that are cut off to end", lambda: workers_of(second) == [])
            cut_step = first.lines("ledger.jsonl")[-1]["step"]
            first.wait_step(cut_step + 20)
            assert first.lines("ledger.jsonl")[-1]["workers"] == [0, 1]
            assert second.process.poll() is None
            assert "lost the coordinator" in second.output and "Trying to reach it again" in second.output
            b.heal()
            first.wait_members(0, 1, 2)
            assert second.output.count("joined the job at") == 2

            # The host is asked to leave: its members leave after a commit, and no step fails.
            died, aborts = len(first.events("worker_died")), len(first.events("abort_sent"))
            second.process.send_signal(signal.SIGTERM)
            assert second.finish() == 130, second.logs()
            first.wait_members(0, 1)
            assert second.processes_left() == []
            first.wait_event("agent_leaving", slots=[2])
            left = first.events("worker_died")[died:]
            assert [event["exit_code"] for event in left] == [0]
            assert first.events("recovered")[-1]["kind"] == "leave"
            assert len(first.events("agent_lost")) == 3 and len(first.events("abort_sent")) - aborts <= 1
            stop_and_compare(first)


@pytest.mark.soak
def test_row_16_the_side_without_the_floor_pauses_until_the_network_is_healed(tmp_path, hosts):
    """The coordinator runs alone here; host a shares its run directory, and finds the secret there."""
    a, b = hosts
    floor = ("--min-workers", "2")
    bind = ("--bind", "0.0.0.0:0", "--address", a.address)
    (tmp_path / "a").symlink_to(tmp_path / "coordinator")
    with (
        Job(
            tmp_path / "coordinator",
            FAULTY,
            *COMMON,
            *bind,
            *floor,
            workers=2,
            command="coordinator",
            prefix=a.prefix,
            environ=SECRET,
        ) as first,
        second_host(a, tmp_path / "a", "0", first, *floor, workers=2, environ=UNTRACED) as one,
        second_host(b, tmp_path / "b", "1", first, *floor, workers=2) as two,
    ):
        first.wait_members(0, 1)
        b.cut()
        first.wait_event("below_floor", members=[0], missing=[1])
        wait_until("the worker that is cut off to end", lambda: workers_of(two) == [])
        b.heal()
        first.wait_event("floor_reached")
        back = first.wait_event("recovered", kind="admission")
        first.wait_step(back["step"] + 10)
        assert all(line["workers"] == [0, 1] for line in first.lines("ledger.jsonl"))
        stop_and_compare(first)
        assert one.finish() == two.finish() == 130, one.logs() + two.logs()
        assert one.processes_left() == two.processes_left() == []


@pytest.mark.soak
def test_only_the_network_of_the_collectives_is_cut_and_healed(tmp_path, hosts):
    """Nobody is dead, as far as the coordinator can see: no step commits until it is healed."""
    a, b = hosts
    with (
        first_host(a, tmp_path / "a", "0", "--address", a.second_address, workers=2) as first,
        second_host(b, tmp_path / "b", "1", first, "--address", b.second_address, workers=2) as second,
    ):
        first.wait_members(0, 1)
        (found,) = {socket[2] for socket in cross_host_sockets(first, 0, b.second_address)}
        assert found == b.second_address
        b.cut(network=1)
        first.wait_event("no_progress")
        stuck = first.lines("ledger.jsonl")[-1]["step"]
        b.heal(network=1)
        first.wait_step(stuck + 20)
        first.wait_members(0, 1)
        stop_and_compare(first)
        assert second.finish() == 130, second.logs()
