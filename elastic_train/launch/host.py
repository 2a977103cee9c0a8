"""One host's part of a job: its agent, started with what its workers need to know."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from elastic_train.config import FaultConfig
from elastic_train.coordinator.security import Tls, check_client
from elastic_train.errors import InterruptedByUser, UsageError
from elastic_train.launch.agent import Agent, AgentEnd
from elastic_train.launch.check import Checked, check
from elastic_train.launch.devices import Devices, pick_platform
from elastic_train.launch.environment import (
    HOST_ID_VARIABLE,
    SECRET_VARIABLE,
    JaxRuntime,
    JobSettings,
    spare_environment,
    with_shared_memory,
    worker_environment,
)
from elastic_train.launch.options import JobOptions, address_towards
from elastic_train.launch.processes import KILL_LIMIT_S
from elastic_train.launch.relay import split_address
from elastic_train.launch.signals import ON_TSTP, POLL_S, Signals
from elastic_train.launch.spares import Spares
from elastic_train.membership.group import Identity, name_slots
from elastic_train.telemetry.run_files import read_secret
from elastic_train.terminal import say

END_LIMIT_S = KILL_LIMIT_S + 10.0
"""How long an agent may take to end all its workers."""

LEAVE_LIMIT_S = 120.0
"""How long the workers of a host that was asked to end may take to leave after a commit; then they are killed."""


def run_agent(options: JobOptions, coordinator: str, environ: Mapping[str, str]) -> int:
    """Fills this host's slots in the job of an existing coordinator; returns the exit code that one sends.

    A run directory that the hosts share gives secret and config; otherwise the secret comes from the
    environment variable `ELASTIC_TRAIN_SECRET`, and the config from the same options as on the other hosts.
    """
    check_client(options.tls)
    try:
        split_address(coordinator)
    except ValueError as error:
        raise UsageError(f"--coordinator: {error}") from error
    if options.workers is None:
        raise UsageError("--coordinator needs --workers, the number of workers on all hosts together")
    platform = pick_platform(environ)
    slots = options.slots or tuple(range(options.workers))
    devices = Devices(platform, slots, environ)
    run_dir = options.run_dir.resolve()
    secret = find_secret(run_dir, environ)
    environ = without_secret(environ)
    request = options.check_request(options.workers)
    config_file = run_dir / "config.toml"
    if request.config is None and config_file.exists():
        request = dataclasses.replace(request, config=str(config_file))
    checked = check(request, environ)
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        if not config_file.exists():
            config_file.write_text(checked.config_toml, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the run directory {run_dir}: {error}; give another --run-dir") from error

    with ExitStack() as stack:
        signals = stack.enter_context(Signals(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGTSTP))
        settings = job_settings(coordinator, secret, run_dir, options, platform, checked)
        agent = start_agent(
            stack,
            settings,
            slots,
            devices,
            environ,
            options,
            checked.faults,
            _say,
        )
        joined = f"joined the job at {coordinator}, for {name_slots(slots)}; workers' output: {run_dir / 'logs'}"
        end = _watch(agent, signals, joined)
    _say(end.reason if end.exit_code != 0 else "the job is done")
    return end.exit_code


def _watch(agent: Agent, signals: Signals, joined: str) -> AgentEnd:
    """Waits for the agent's end; hands on signals in the meantime. `joined`: what is said whenever it has joined."""
    deadline: float | None = None
    num_said = 0
    while not agent.ended:
        if (num_joined := agent.num_joined) > num_said:
            _say(joined)
            num_said = num_joined
        for number in signals.wait(POLL_S):
            if number == signal.SIGUSR1:
                agent.forward(signal.SIGUSR1)  # each worker writes its stacks to its log
            elif number == signal.SIGTSTP:
                _say(ON_TSTP)
            elif signals.num_stops == 1:
                _say(f"{number.name}: the workers of this host leave after a commit; once more ends them at once")
                deadline = time.monotonic() + LEAVE_LIMIT_S
                agent.leave(f"{number.name} at its process")
            else:
                raise InterruptedByUser("interrupted a second time; the workers of this host were ended")
        if deadline is not None and time.monotonic() > deadline:
            raise InterruptedByUser(
                f"the workers of this host did not leave within {LEAVE_LIMIT_S:g} s, and were ended. "
                "`elastic-train status` on the coordinator's host shows what the job does."
            )
    return agent.wait(0)


def _say(text: str) -> None:
    say(f"elastic-train: {text}", sys.stderr)


def job_settings(
    coordinator: str, secret: str, run_dir: Path, options: JobOptions, platform: str, checked: Checked
) -> JobSettings:
    """What the workers of a host have in common. The config file is the one in `run_dir`."""
    return JobSettings(
        chaos=str(run_dir / "chaos") if options.chaos is not None else "",
        coordinator=coordinator,
        secret=secret,
        run_dir=run_dir,
        recipe=options.recipe,
        config_file=run_dir / "config.toml",
        platform=platform,
        keepalive_s=checked.faults.keepalive_s,
        heartbeat_timeout_s=checked.faults.jax_heartbeat_timeout_s,
        min_workers=options.min_workers,
        deterministic=checked.deterministic,
        tls=options.tls.dump(),
        last_step=options.last_step,
    )


def start_agent(
    stack: ExitStack,
    settings: JobSettings,
    slots: Sequence[int],
    devices: Devices,
    environ: Mapping[str, str],
    options: JobOptions,
    faults: FaultConfig,
    on_note: Callable[[str], None],
) -> Agent:
    """Starts this host's agent; leaving `stack` ends it, and its workers.

    Args:
      stack: see above.
      settings: what its workers have in common.
      slots: those it fills.
      devices: what each slot's `CUDA_VISIBLE_DEVICES` is.
      environ: what workers inherit.
      options: where workers listen for other hosts, by default at the address that this host has towards the
        coordinator; and whether this host fills certain slots only, or could fill more.
      faults: how many processes are held ready for its workers; how long it tries to reach the coordinator.
      on_note: shows a line to the person who watches.
    """
    environ = with_shared_memory(environ, devices.sharing)
    host = environ.get(HOST_ID_VARIABLE) or socket.gethostname()

    def environment(identity: Identity, jax: JaxRuntime) -> dict[str, str]:
        return worker_environment(
            environ,
            identity,
            settings,
            device=devices.of(identity.slot),
            jax=jax,
            host_address=options.address or address_towards(settings.coordinator),
            agent_pid=os.getpid(),
            host_id=f"{host}-{identity.slot}" if devices.sharing > 1 else "",
        )

    command = [sys.executable, "-m", "elastic_train.launch.worker"]
    log_dir = settings.run_dir / "logs"
    warm = None
    if faults.warm_spares:
        warm = Spares(faults.warm_spares, command, spare_environment(environ, settings, os.getpid()), log_dir, on_note)
    agent = Agent(
        settings.coordinator,
        settings.secret,
        slots,
        command,
        environment,
        log_dir,
        socket.gethostname(),
        settings.keepalive_s,
        faults.coordinator_timeout_s,
        rejoin=True,
        handover_s=settings.heartbeat_timeout_s,
        spare=0 if options.slots else devices.num_spare,
        warm=warm,
        tls=Tls.load(settings.tls),
        on_note=on_note,
    )
    agent.start()
    stack.callback(agent.close, END_LIMIT_S)
    return agent


def without_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """What may be handed to the user's code."""
    return {name: value for name, value in environ.items() if name != SECRET_VARIABLE}


def secret_of(environ: Mapping[str, str]) -> str | None:
    """The secret that the user has set. Raises UsageError if no call could carry it."""
    secret = environ.get(SECRET_VARIABLE)
    if secret and not (secret.isascii() and secret.isprintable() and secret == secret.strip()):
        raise UsageError(
            f"{SECRET_VARIABLE} holds what no call can carry: use printable ASCII characters, without blanks or a "
            "newline at either end"
        )
    return secret


def find_secret(run_dir: Path, environ: Mapping[str, str]) -> str:
    if secret := secret_of(environ):
        return secret
    try:
        return read_secret(run_dir)
    except OSError as error:
        raise UsageError(
            f"no secret for the coordinator: {SECRET_VARIABLE} is not set and {run_dir / 'secret'} cannot be "
            f"read ({error.strerror}). Give the job's own --run-dir if the hosts share it, or set the "
            "variable to the content of that file, on every host."
        ) from error
