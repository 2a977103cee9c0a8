"""Hosts on one machine: a network namespace each, joined by a bridge whose ports can be unplugged.

Needs no root where the kernel lets users make namespaces; `unavailable()` says why not, where it does not. An unplugged
port drops what comes: nobody is told, as when a switch loses power.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

PATIENCE_S = 10.0


@functools.cache
def unavailable() -> str:
    """Why hosts cannot be simulated here; empty if they can."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"no `{tool}` command"
    try:
        with network("probe"):
            return ""
    except (AssertionError, subprocess.CalledProcessError) as error:
        details = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"the kernel does not let this user make network namespaces joined by a bridge: {details}"


class Host:
    """One namespace with two interfaces. `prefix` before a command runs it there.

    Attributes:
      address, second_address: of its interfaces; each has a network of its own.
    """

    def __init__(self, name: str, number: int, holder: subprocess.Popen[str], switch: list[str]) -> None:
        self.address, self.second_address = f"10.77.0.{number}", f"10.77.1.{number}"
        self.prefix = _inside(holder.pid)
        self._ports, self._switch = (f"{name}-0", f"{name}-1"), switch
        _run(self.prefix, "ip", "link", "set", "lo", "up")
        for network, address in enumerate((self.address, self.second_address)):
            port, interface = self._ports[network], f"eth{network}"
            peer = ("peer", "name", interface, "netns", str(holder.pid))
            _run(switch, "ip", "link", "add", port, "type", "veth", *peer)
            _run(self.prefix, "ip", "addr", "add", f"{address}/24", "dev", interface)
            _run(self.prefix, "ip", "link", "set", interface, "up")
            _run(switch, "ip", "link", "set", port, "up")
            self.heal(network)

    def cut(self, network: int = 0) -> None:
        """From now on nothing reaches this host that way, and nothing leaves it. No connection is closed by that."""
        _run(self._switch, "ip", "link", "set", self._ports[network], "nomaster")

    def heal(self, network: int = 0) -> None:
        _run(self._switch, "ip", "link", "set", self._ports[network], "master", f"switch{network}")


@contextlib.contextmanager
def network(*names: str) -> Iterator[list[Host]]:
    """Hosts of these names at 10.77.0.1, 10.77.0.2, …, and 10.77.1.1, …, on a second network.

    They are gone at the end; what ran there should be, too.
    """
    with contextlib.ExitStack() as stack:
        switch = _inside(stack.enter_context(_holder(["unshare", "--user", "--map-root-user", "--net"])).pid)
        for bridge in ("switch0", "switch1"):
            _run(switch, "ip", "link", "add", bridge, "type", "bridge")
            _run(switch, "ip", "link", "set", bridge, "up")
        holders = [stack.enter_context(_holder([*switch, "unshare", "--net"])) for _ in names]
        yield [
            Host(name, number, holder, switch)
            for number, (name, holder) in enumerate(zip(names, holders, strict=True), start=1)
        ]


@contextlib.contextmanager
def _holder(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process whose only purpose is to keep a new namespace alive."""
    line = [*command, "sh", "-c", "echo made; exec sleep infinity"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        said = process.stdout.readline()
        assert said == "made\n", process.stderr.read()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def _inside(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--user", "--net", "--preserve-credentials"]


def _run(prefix: list[str], *command: str) -> None:
    subprocess.run([*prefix, *command], check=True, capture_output=True, text=True, timeout=PATIENCE_S)


def own_connections(pid: int) -> set[tuple[str, int, str, int, str]]:
    """The IPv4 TCP sockets of a process: local address and port, remote ones, and the kernel's state."""
    inodes = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
    with open(f"/proc/{pid}/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    return {(*_address(row[1]), *_address(row[2]), row[3]) for row in rows if f"socket:[{row[9]}]" in inodes}


LISTEN, ESTABLISHED = "0A", "01"


def _address(field: str) -> tuple[str, int]:
    host, port = field.split(":")
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(host))), int(port, 16)


def wait_until(what: str, condition, deadline_s: float = 60.0):
    """Polls until `condition` gives something true, and returns it."""
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}"
        time.sleep(0.01)
    return found
