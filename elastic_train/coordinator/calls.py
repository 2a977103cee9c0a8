"""Calls to the coordinator of a running job, from outside of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import grpc

from elastic_train.coordinator import control_pb2, control_pb2_grpc, security, wire
from elastic_train.errors import ElasticTrainError, UsageError
from elastic_train.telemetry.json_files import CHANGED
from elastic_train.telemetry.run_files import read_config, read_job, read_secret, require_run_directory

CALL_LIMIT_S = 10.0
"""The coordinator's answer to a call that only gives an order."""

SAVE_LIMIT_S = 1800.0
"""How long `save` waits: for a step, and for the save of the state after it."""

Reply = TypeVar("Reply")


def stop(run_dir: Path) -> None:
    """Asks the job in `run_dir` to stop after a commit. A second call stops it at once. Raises as `_call`."""
    request = control_pb2.StopRequest(reason="elastic-train stop")
    _call(run_dir, CALL_LIMIT_S, lambda stub, about: stub.Stop(request, **about))


def drain(run_dir: Path, slot: int) -> None:
    """Has the worker of a slot leave for good. Raises as `_call`, and UsageError if that cannot be."""
    request = control_pb2.DrainRequest(slot=slot, reason="elastic-train drain")
    reply = _call(run_dir, CALL_LIMIT_S, lambda stub, about: stub.Drain(request, **about))
    if reply.refusal:
        raise UsageError(f"slot {slot} cannot be drained: {reply.refusal}")


def resize(run_dir: Path, workers: int) -> None:
    """Changes the number of workers. Raises as `_call`, and UsageError if that cannot be; nothing has changed then."""
    request = control_pb2.ResizeRequest(workers=workers, reason="elastic-train resize")
    reply = _call(run_dir, CALL_LIMIT_S, lambda stub, about: stub.Resize(request, **about))
    if reply.refusal:
        raise UsageError(f"the job cannot have {workers} workers: {reply.refusal}")


def save(run_dir: Path) -> tuple[int, str]:
    """Has the job save its state; waits, and returns the step and the checkpoint's path.

    Raises as `_call`; UsageError if the job saves nothing; ElasticTrainError if the save has failed.
    """
    require_run_directory(run_dir)
    if read_config(run_dir).get("checkpoint.keep") == 0:
        raise UsageError(f"the job in {run_dir} saves nothing: it was started with checkpoint.keep = 0")
    request = control_pb2.SaveRequest()
    reply = _call(run_dir, SAVE_LIMIT_S, lambda stub, about: stub.Save(request, **about))
    if reply.error:
        raise ElasticTrainError(f"the state was not saved: {reply.error}")
    return reply.step, reply.path


def open_channel(run_dir: Path, job: Mapping[str, Any], keepalive_s: float) -> grpc.Channel:
    """A channel to the coordinator that `job`, the content of job.json, names.

    Raises UsageError if one of the job's TLS files cannot be read, or if they make no sense.
    """
    told = job.get("tls", {})
    try:
        tls = security.Tls(**{field.name: told[field.name] for field in fields(security.Tls) if field.name in told})
    except UsageError as error:
        raise UsageError(f"{run_dir / 'job.json'}: {error}; {CHANGED}") from error
    try:
        return security.open_channel(job["address"], keepalive_s, tls)
    except OSError as error:
        raise UsageError(
            f"cannot read {error.filename}: {error.strerror}; the job uses TLS, and is only to be asked with its files"
        ) from error


def _call(run_dir: Path, limit_s: float, call: Callable[..., Reply]) -> Reply:
    """Raises UsageError if no job runs in `run_dir`, and ElasticTrainError if it does not answer in time."""
    require_run_directory(run_dir)
    try:
        job = read_job(run_dir)
        address = job.get("address")
        secret = read_secret(run_dir) if address else ""
    except (OSError, UsageError) as error:
        raise UsageError(f"cannot read what leads to the job in {run_dir}: {error}") from error
    if not address:
        raise UsageError(f"the run in {run_dir} is one plain process; send it SIGTERM to stop it")
    with open_channel(run_dir, job, CALL_LIMIT_S) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        try:
            return call(stub, {"timeout": limit_s, "metadata": wire.secret_metadata(secret)})
        except grpc.RpcError as error:
            code, details = error.code(), error.details()  # type: ignore[attr-defined]
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ElasticTrainError(f"the job in {run_dir} has not answered within {limit_s:g} s") from error
            told = f" ({code.name}: {details})"
            if code is grpc.StatusCode.UNAVAILABLE:
                told = ". If its coordinator is just being started again, try again in some seconds"
            raise UsageError(f"no job runs in {run_dir}: nobody who knows it answers at {address}{told}") from error
