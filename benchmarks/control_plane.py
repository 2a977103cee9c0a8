"""The control plane alone: barrier, abort broadcast and admission with up to 1,000 simulated workers.

    python benchmarks/control_plane.py --workers 4 16 64 256 1000 --out benchmarks/results/NAME.json

The coordinator is the real one, in a process of its own, with JAX's service, roster and run directory. Workers
are light (`light_workers.py`): an end of the control plane and a bare client of JAX's service each, many in one
process. Here is the agent, which reports their deaths. Times hold what the clients themselves take on the same cores;
the coordinator's own share is told as its processor time. A line is fitted through each figure over the number of
workers.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import queue
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import light_workers
import numpy as np
import report
from observed import usage

from elastic_train.config import FaultConfig
from elastic_train.coordinator import control_pb2, control_pb2_grpc, wire
from elastic_train.coordinator.service import Coordinator, Endpoint
from elastic_train.membership.group import Identity, View
from elastic_train.membership.roster import Limits, apply
from elastic_train.telemetry.records import RunDirectory

SPARE_NODES = 24
"""Node ids for the workers that come back."""

SCHEMA = {f"state/params/layer_{number}/kernel": "float32[1024,1024]" for number in range(150)}
"""What a worker says of itself when it is ready, about as much as a transformer's does."""

FITTED = ("barrier_s", "abort_last_s", "announce_last_s", "form_s", "all_connected_s", "rss_mib", "training_cpu_share")
WINDOW_S = 3.0
REST_S, REST_LIMIT_S = 0.3, 10.0
LIMIT_S = 180.0


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64, 256, 1000])
    parser.add_argument("--processes", type=int, default=4, help="among which the workers are divided")
    parser.add_argument("--rounds", type=int, default=5, help="deaths and returns")
    parser.add_argument("--barriers", type=int, default=20)
    arguments = parser.parse_args()
    result = report.about()
    rows = []
    for num in arguments.workers:
        with tempfile.TemporaryDirectory() as directory:
            rows.append(measure(num, arguments, Path(directory)))
        print(rows[-1], flush=True)
    fits = {name: fit([row["workers"] for row in rows], [value_of(row[name]) for row in rows]) for name in FITTED}
    report.write({**result, "processes": arguments.processes, "rows": rows, "fits": fits}, arguments.out)


def measure(num: int, arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All figures for `num` workers."""
    secret = secrets.token_hex(16)
    with ExitStack() as stack:
        coordinator = Process(stack, hold_coordinator, num, secret, directory)
        address, jax_address, start_s = coordinator.receive()
        workers = Divided(stack, min(arguments.processes, num), address, secret, jax_address)
        agent = Agent(address, secret, range(num))
        stack.callback(agent.close)
        usage = Usage(coordinator)
        found: dict[str, Any] = {"workers": num, "service_start_s": round(start_s, 3)}
        view, figures = measure_admission(num, workers, agent, usage)
        found |= figures
        found |= measure_barrier(workers, view, arguments.barriers, usage)
        found |= usage.memory() | {"idle_cpu_share": usage.share()}
        workers.call("train", True)
        found["training_cpu_share"] = usage.share()
        workers.call("train", False)
        usage.rest(found["idle_cpu_share"])
        found |= measure_losses(workers, agent, view, arguments.rounds, usage)
        found["connections_lost"] = [reason for lost in workers.call("close") for reason in lost]
        return found


def measure_admission(num: int, workers: Divided, agent: Agent, usage: Usage) -> tuple[View, dict[str, Any]]:
    """From the first hello until all know the first view."""
    workers.call("arrived", "", 0, ())  # imported, before anything is measured
    identities = [agent.next_start() for _ in range(num)]
    view = View.of(1, identities)
    cpu, began = usage.cpu_s(), time.monotonic()
    hellos = workers.connect(identities)
    connected = time.monotonic()
    workers.call("ready", view.nodes, SCHEMA)
    formed = max(workers.arrived("form", 1, view.nodes))
    workers.call("viewed", view, 0)
    return view, {
        "all_connected_s": round(connected - began, 3),
        "hello_s": report.spread(hellos, 5),
        "all_ready_to_formed_s": round(formed - connected, 3),
        "admission_coordinator_cpu_s": round(usage.cpu_s() - cpu, 3),
    }


def measure_barrier(workers: Divided, view: View, rounds: int, usage: Usage) -> dict[str, Any]:
    """Barriers one right after the other, as if steps took no time."""
    workers.call("barrier", view.nodes, 2)
    cpu = usage.cpu_s()
    times = workers.call("barrier", view.nodes, rounds)
    return {
        # In the first one they wait for each other's threads to start.
        "barrier_s": report.spread([value for one in times for value in one[1:]], 5),
        "barrier_coordinator_cpu_s": round((usage.cpu_s() - cpu) / rounds, 5),
    }


def measure_losses(workers: Divided, agent: Agent, view: View, rounds: int, usage: Usage) -> dict[str, Any]:
    """Workers die and come back, one after the other."""
    figures: dict[str, list[float]] = {}

    def add(**seconds: float) -> None:
        for name, value in seconds.items():
            figures.setdefault(f"{name}_s", []).append(value)

    for number in range(rounds):
        dead = view.members[len(view.members) // 2]
        rest = tuple(member for member in view.members if member != dead)
        workers.call("disconnect", dead.node)
        usage.rest()
        cpu, began = usage.cpu_s(), time.monotonic()
        agent.exited(dead)
        heard = workers.arrived("abort", dead.node, [member.node for member in rest])
        add(
            abort_median=median(heard) - began, abort_last=max(heard) - began, abort_coordinator_cpu=usage.cpu_s() - cpu
        )
        workers.call("end", dead.node)
        view = View.of(view.epoch + 1, rest)
        workers.call("viewed", view, number)

        joiner = agent.next_start()
        workers.connect([joiner])
        usage.rest()
        cpu, began = usage.cpu_s(), time.monotonic()
        workers.ready(joiner.node, SCHEMA)
        heard = workers.arrived("candidate", joiner.node, view.nodes)
        add(announce_last=max(heard) - began)
        view = View.of(view.epoch + 1, (*rest, joiner))
        began = time.monotonic()
        workers.call("viewed", view, number)
        add(form=max(workers.arrived("form", view.epoch, [joiner.node])) - began)
        add(return_coordinator_cpu=usage.cpu_s() - cpu)
    return {name: report.spread(values, 5) for name, values in figures.items()}


class Process:
    """A process with a pipe; ended with the stack."""

    def __init__(self, stack: ExitStack, main: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=main, args=(other, *arguments), daemon=True)
        self._process.start()
        other.close()
        stack.callback(self._end)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, *message: Any) -> None:
        self._pipe.send(message)

    def receive(self) -> Any:
        """The next answer. Raises SystemExit if there is none in time."""
        if not self._pipe.poll(LIMIT_S):
            raise SystemExit(f"{self._process.name} did not answer within {LIMIT_S:g} s")
        return self._pipe.recv()

    def _end(self) -> None:
        self._process.kill()
        self._process.join()


class Divided:
    """Simulated workers, divided among processes."""

    def __init__(self, stack: ExitStack, num: int, address: str, secret: str, jax_address: str) -> None:
        self._processes = [Process(stack, light_workers.serve, address, secret, jax_address) for _ in range(num)]
        self._homes: dict[int, Process] = {}

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Has all processes do the same at the same time; their answers."""
        for process in self._processes:
            process.send(method, arguments)
        return [_answer(process) for process in self._processes]

    def arrived(self, kind: str, number: int, nodes: Sequence[int]) -> list[float]:
        """When each of `nodes` heard of something."""
        return [time for times in self.call("arrived", kind, number, nodes) for time in times]

    def connect(self, identities: Sequence[Identity]) -> list[float]:
        """Connects new workers, dealt out to the processes; how long each one's hello took."""
        deals = [(process, identities[index :: len(self._processes)]) for index, process in enumerate(self._processes)]
        for process, dealt in deals:
            self._homes |= {identity.node: process for identity in dealt}
            process.send("connect", (dealt,))
        return [time for process in self._processes for time in _answer(process)]

    def ready(self, node: int, schema: dict[str, str]) -> None:
        self._homes[node].send("ready", ([node], schema))
        _answer(self._homes[node])


def _answer(process: Process) -> Any:
    result, error = process.receive()
    if error:
        raise SystemExit(error)
    return result


class Agent:
    """The agent of all slots: takes the orders to start, and reports exits. Starts nothing."""

    def __init__(self, address: str, secret: str, slots: Sequence[int]) -> None:
        self._outgoing: queue.SimpleQueue[control_pb2.FromAgent | None] = queue.SimpleQueue()
        self._starts: queue.SimpleQueue[Identity] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address, options=wire.channel_options(30))
        hello = control_pb2.AgentHello(host="simulated", slots=slots, id=secrets.token_hex(8))
        self._outgoing.put(control_pb2.FromAgent(hello=hello))
        stub = control_pb2_grpc.ControlStub(self._channel)
        call = stub.Agent(iter(self._outgoing.get, None), metadata=wire.secret_metadata(secret), wait_for_ready=True)
        threading.Thread(target=self._read, args=(call,), daemon=True).start()

    def next_start(self) -> Identity:
        """The next worker that is to be started, reported as started."""
        identity = self._starts.get(timeout=LIMIT_S)
        started = control_pb2.Started(identity=wire.identity_message(identity), pid=1)
        self._outgoing.put(control_pb2.FromAgent(started=started))
        return identity

    def exited(self, identity: Identity) -> None:
        """Reports that a worker's process is gone."""
        exited = control_pb2.Exited(identity=wire.identity_message(identity), exit_code=-9, time=time.time())
        self._outgoing.put(control_pb2.FromAgent(exited=exited))

    def close(self) -> None:
        self._outgoing.put(None)
        self._channel.close()

    def _read(self, call: Iterable[control_pb2.ToAgent]) -> None:
        with contextlib.suppress(grpc.RpcError):  # the end
            for message in call:
                if message.WhichOneof("message") == "start":
                    self._starts.put(wire.identity_value(message.start.identity))


class Usage:
    """What the coordinator's process takes."""

    def __init__(self, coordinator: Process) -> None:
        self._coordinator = coordinator
        self._idle_share = 0.0

    def cpu_s(self) -> float:
        """Processor time so far, in seconds."""
        self._coordinator.send()
        return self._coordinator.receive()

    def share(self) -> float:
        """The share of one processor that it takes over some seconds."""
        cpu, began = self.cpu_s(), time.monotonic()
        time.sleep(WINDOW_S)
        return round((self.cpu_s() - cpu) / (time.monotonic() - began), 4)

    def rest(self, idle_share: float | None = None) -> None:
        """Waits until it has done what was asked of it before: takes hardly more than while nothing is asked."""
        self._idle_share = self._idle_share if idle_share is None else idle_share
        deadline = time.monotonic() + REST_LIMIT_S
        share = 1.0
        while share > 1.5 * self._idle_share + 0.05 and time.monotonic() < deadline:
            cpu, began = self.cpu_s(), time.monotonic()
            time.sleep(REST_S)
            share = (self.cpu_s() - cpu) / (time.monotonic() - began)

    def memory(self) -> dict[str, float]:
        found = usage(self._coordinator.pid)
        return {"rss_mib": round(found["rss_mib"], 1), "num_threads": found["num_threads"]}


def hold_coordinator(pipe: Connection, num: int, secret: str, directory: Path) -> None:
    """A process's main: a coordinator for `num` workers. Says its addresses and how long its start took; then, at
    each message, the processor time it has used."""
    faults = FaultConfig(max_restarts=1000, first_backoff_s=0.001, max_backoff_s=0.001)
    limits = Limits(num, faults=faults, num_nodes=num + SPARE_NODES)
    began = time.monotonic()
    with RunDirectory(directory / "run") as records:
        coordinator = Coordinator(limits, records, Endpoint(secret=secret), apply=apply)
        pipe.send((coordinator.address, coordinator.jax_address, time.monotonic() - began))
        while True:
            pipe.recv()
            pipe.send(time.process_time())


def fit(numbers: Sequence[int], values: Sequence[float]) -> dict[str, float]:
    """A straight line over the number of workers, and the exponent between the two largest numbers."""
    if len(numbers) < 2:
        return {}
    slope, intercept = np.polyfit(numbers, values, 1)
    found = {"at_zero": round(float(intercept), 5), "per_100_workers": round(100 * float(slope), 5)}
    if min(values[-2:]) > 0:
        exponent = np.log(values[-1] / values[-2]) / np.log(numbers[-1] / numbers[-2])
        found["exponent_at_the_end"] = round(float(exponent), 2)
    return found


def value_of(figure: Any) -> float:
    return figure["median"] if isinstance(figure, dict) else figure


if __name__ == "__main__":
    main()
