"""Settings of a run, as frozen dataclasses that are checked when they are made; `config_files` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

MIN_STEP_TIMEOUT_S = 1.0
"""A busy machine delays reports, and a worker without reports counts as stuck."""

REPORT_INTERVAL_S, MAX_REPORTS_PER_S = 0.5, 500
"""How often, at least, a worker says where it is, whether that has changed or not: a watchdog listens."""

MAX_TIMEOUT_S = 1e6
"""Eleven days. gRPC counts milliseconds in 32 bits, JAX whole seconds, and neither knows infinity."""


class ConfigError(ValueError):
    """A setting is wrong, or several are. The message names the field, the value and the fix.

    Attributes:
      field: the name of the one that is wrong; empty if that is not known, or there are several.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


def require(condition: bool, field_name: str, value: object, fix: str) -> None:
    """Raises ConfigError naming `field_name` unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{field_name} = {value!r}: {fix}", field_name)


_LEAST = {
    "max_restarts": 0,
    "forgive_after_steps": 1,
    "max_step_failures": 1,
    "max_evictions": 0,
    "max_nonfinite_retries": 1,
    "max_skipped_steps": 1,
    "fingerprint_every": 0,
    "compile_ahead": 0,
    "max_coordinator_restarts": 0,
    "node_ids": 0,
    "warm_spares": 0,
}


def report_interval_s(step_timeout_s: float, num_workers: int = 0) -> float:
    """How often each of so many workers says where it is, and how often the coordinator looks (`num_workers` 0), in
    seconds: a standstill is found within a quarter of `step_timeout_s` after it has run out."""
    return min(max(REPORT_INTERVAL_S, num_workers / MAX_REPORTS_PER_S), step_timeout_s / 8)


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """How long to wait, and how often to try again.

    Attributes:
      max_restarts: how often one slot is started again before it is given up; the count starts anew once
        the worker has taken part in `forgive_after_steps` steps.
      forgive_after_steps: see `max_restarts`.
      first_backoff_s: wait before the second restart in a row; the first is immediate, each further
        wait doubles.
      max_backoff_s: upper limit of that wait.
      max_step_failures: how often user code may raise at one step on one worker before the worker leaves
        (or the job ends, if it raised on all workers).
      nonfinite: what to do with a step whose gradient or loss is not finite. "retry": try it again,
        which tells a passing fault of the hardware from a property of the model and the data; then stop. "skip": leave
        parameters and optimizer as they are and go on with the next samples. "stop": end the job.
      max_nonfinite_retries: how often "retry" tries one step again.
      max_skipped_steps: how many steps in a row "skip" leaves out before it stops after all.
      fingerprint_every: steps between two comparisons of all members' states; 0 compares them only when the members
        change.
      compile_ahead: for how many likely next lists of members programs are compiled in the background, once an epoch
        has settled: without each one of the present members, and with those that are ready to join. 0 for none.
      undecided: what to do when as many members hold one state as another. "stop": end the job, since nobody can say
        which is right. "oldest": the state of the member that was started first counts.
      start_timeout_s: a worker that is not ready this long after its start is killed and counted as failed.
      start_grace_s: how long the first group waits for the remaining slots once `min_workers` are ready.
      floor_timeout_s: how long a job below `min_workers` waits before it gives up.
      doubt_timeout_s: how long a member whose exchange failed waits for news of a death before it leaves.
      keepalive_s: a worker whose control connection does not answer for about twice this long is declared
        dead.
      jax_heartbeat_timeout_s: JAX's own failure detection, the net below ours.
      coordinator_timeout_s: how long the agent of another host tries to reach the coordinator, at its start and
        after it has lost it.
      max_coordinator_restarts: how often a coordinator that died is started again within
        `coordinator_restart_window_s`; then the job ends.
      coordinator_restart_window_s: see there.
      node_ids: how many starts of workers one generation has room for; 0 takes 32 for each worker, at least 255, and
        with many workers at most 512, or four for each.
        When they are used, the next generation begins.
      warm_spares: how many processes each host holds ready that have imported everything, the recipe too. A worker
        that must be started then is one of these, if there is one; see docs/operations.md.
      step_timeout_s: how long reading data, computing or updating may take within one step, at least; a worker that
        takes longer is killed and replaced.
      step_timeout_factor: the same as a multiple of the median step time; the longer of the two counts.
      first_step_timeout_s: the same in an epoch's beginning, where programs are compiled, and in its first step, for
        those who are new.
      evaluate_timeout_s: how long one batch of an evaluation may take.
      hook_timeout_s: how long an `on_...` hook may take, and what is written at the end.
      save_timeout_s: how long writing or reading a checkpoint may take.
      straggler_factor: a worker whose own work takes this many times as long as the others' is reported.
      evict_stragglers: kill and replace such a worker, too, if enough others are there.
      max_evictions: how often one slot's worker is replaced for being slow.
    """

    max_restarts: int = 10
    forgive_after_steps: int = 20
    first_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    max_step_failures: int = 3
    nonfinite: Literal["retry", "skip", "stop"] = "retry"
    max_nonfinite_retries: int = 2
    max_skipped_steps: int = 10
    fingerprint_every: int = 20
    compile_ahead: int = 8
    undecided: Literal["stop", "oldest"] = "stop"
    start_timeout_s: float = 600.0
    start_grace_s: float = 60.0
    floor_timeout_s: float = 3600.0
    doubt_timeout_s: float = 20.0
    keepalive_s: float = 5.0
    jax_heartbeat_timeout_s: float = 60.0
    coordinator_timeout_s: float = 600.0
    max_coordinator_restarts: int = 5
    coordinator_restart_window_s: float = 600.0
    node_ids: int = 0
    warm_spares: int = 0
    step_timeout_s: float = 120.0
    step_timeout_factor: float = 10.0
    first_step_timeout_s: float = 600.0
    evaluate_timeout_s: float = 600.0
    hook_timeout_s: float = 600.0
    save_timeout_s: float = 1800.0
    straggler_factor: float = 3.0
    evict_stragglers: bool = False
    max_evictions: int = 2

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            require(getattr(self, name) >= least, f"faults.{name}", getattr(self, name), f"use at least {least}")
        for name, choices in (("nonfinite", ("retry", "skip", "stop")), ("undecided", ("stop", "oldest"))):
            value = getattr(self, name)
            require(value in choices, f"faults.{name}", value, f"use one of {', '.join(choices)}")
        for name in self.__dataclass_fields__:
            if name.endswith("_s"):
                require(
                    getattr(self, name) > 0,
                    f"faults.{name}",
                    getattr(self, name),
                    "use a positive number of seconds",
                )
                require(
                    getattr(self, name) <= MAX_TIMEOUT_S,
                    f"faults.{name}",
                    getattr(self, name),
                    f"use at most {MAX_TIMEOUT_S:.0f} seconds",
                )
        require(
            self.doubt_timeout_s > 2 * self.keepalive_s,
            "faults.doubt_timeout_s",
            self.doubt_timeout_s,
            f"must exceed twice faults.keepalive_s ({self.keepalive_s}), or members leave before a silent one is found",
        )
        require(
            self.jax_heartbeat_timeout_s > 2 * self.keepalive_s,
            "faults.jax_heartbeat_timeout_s",
            self.jax_heartbeat_timeout_s,
            f"must exceed twice faults.keepalive_s ({self.keepalive_s}), or JAX acts before we do",
        )
        require(
            self.coordinator_timeout_s > 2 * self.keepalive_s,
            "faults.coordinator_timeout_s",
            self.coordinator_timeout_s,
            f"must exceed twice faults.keepalive_s ({self.keepalive_s}), the time until a loss is noticed",
        )
        require(
            self.step_timeout_s > self.doubt_timeout_s,
            "faults.step_timeout_s",
            self.step_timeout_s,
            f"must exceed faults.doubt_timeout_s ({self.doubt_timeout_s}), or members that wait for news of a death "
            "are taken for stuck",
        )
        require(
            self.step_timeout_s >= MIN_STEP_TIMEOUT_S,
            "faults.step_timeout_s",
            self.step_timeout_s,
            f"use at least {MIN_STEP_TIMEOUT_S:g} seconds, or workers whose reports are late are taken for stuck",
        )
        require(
            self.first_step_timeout_s >= self.step_timeout_s,
            "faults.first_step_timeout_s",
            self.first_step_timeout_s,
            f"must be at least faults.step_timeout_s ({self.step_timeout_s}): a first step takes longer than others",
        )
        for name in ("step_timeout_factor", "straggler_factor"):
            require(getattr(self, name) > 1, f"faults.{name}", getattr(self, name), "use a number above 1")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved, and what stays. It is saved at the end of a run, too, and when somebody asks.

    Attributes:
      every_steps: steps between two saves; 0 for none by steps.
      every_s: seconds between two saves; 0 for none by time.
      keep: how many of the newest stay. With 1 there is none to fall back on. 0 saves nothing at all.
      keep_every_steps: every so many steps one is saved that stays for ever; 0 for none.
      when_busy: what becomes of a save that is due by `every_steps` while the one before is still being written.
        "wait": training waits. "defer": it is left out, and the newest state is saved as soon as that is possible.
        "auto": "wait" with states up to 64 MiB, "defer" with larger ones.
      path: where to; by default `checkpoints` in the run directory. All hosts must reach it. Also `gs://BUCKET/…`,
        the only URLs that Orbax writes arrays to; needs the extra `gcs`.
    """

    every_steps: int = 0
    every_s: float = 300.0
    keep: int = 3
    keep_every_steps: int = 0
    when_busy: Literal["auto", "wait", "defer"] = "auto"
    path: str | None = None

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_s", "keep", "keep_every_steps"):
            value = getattr(self, name)
            require(value >= 0, f"checkpoint.{name}", value, "use 0 (none) or a positive number")
        known = ("auto", "wait", "defer")
        require(self.when_busy in known, "checkpoint.when_busy", self.when_busy, f"use one of {', '.join(known)}")
        require(self.path != "", "checkpoint.path", self.path, "name a directory, or leave it out")
        scheme, is_url, rest = (self.path or "").partition("://")
        fix = "Orbax writes to directories and to gs://BUCKET/…; mount other stores as directories"
        require(not is_url or scheme == "gs", "checkpoint.path", self.path, fix)
        bucket = rest.partition("/")[0]
        require(not is_url or bucket != "", "checkpoint.path", self.path, "name the bucket: gs://BUCKET/…")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every recipe can be told. A recipe subclasses it and adds its own fields.

    Attributes:
      steps: optimizer updates in total.
      batch_size: samples per step over all workers; it does not depend on how many workers there are.
      batch_policy: "fixed": `batch_size` samples a step, however many workers there are. "per_worker": so many for
        every member; the batch grows and shrinks with the group, and `shards` plays no part.
      shards: into how many slices the batch is cut, at least as many as workers. Each worker computes the
        gradients of its slices one after the other, and all are added in one fixed order, so the weights do not
        depend on how many workers there are. Part of the numbers: another value rounds differently and gives
        other random keys. As many shards as workers use a GPU best; more divide better after a loss, but make
        each program smaller: with a GPT of 354M parameters two per GPU cost 6 %, four 19 %.
      seed: start of every random key and of the order of the samples.
      eval_every: steps between two evaluations; 0 evaluates once at the end.
      log_every: steps between two lines of `metrics.jsonl`.
      tensorboard: also write the metrics to `tensorboard/` in the run directory; needs the extra `tensorboard`.
      prefetch: how many steps ahead training data is read, by a thread of its own; memory holds at most the
        samples of one step more. 0 reads in the step itself, in the main thread. No part of the numbers.
      deterministic: on GPUs, use only kernels that give the same bits every time, and one set of compiled programs
        for all workers; 8 % slower for a 354M GPT, 17 % for 124M. CPU runs are bitwise reproducible without it.
      exchange_dtype: "bfloat16" rounds each shard's gradient of float32, and each sum of two, to 16 bits: half as many
        bytes to send. Another rounding, but the same for any number of workers. Empty exchanges what there is.
      early_update: "always" queues the update behind the exchange before it is known whether the step counts, so that
        a device has no need to wait for that. It needs room for the state before and after, and for a third one if
        training is not to wait while a state is copied for a checkpoint. "auto" does so if all of it is no more than
        the gradients need anyway, or fits into half of the device's memory. No part of the numbers.
      checkpoint: when the state is saved.
      faults: time limits and budgets.
    """

    steps: int = 100
    batch_size: int = 64
    batch_policy: Literal["fixed", "per_worker"] = "fixed"
    shards: int = 8
    seed: int = 0
    eval_every: int = 0
    log_every: int = 1
    tensorboard: bool = False
    prefetch: int = 2
    deterministic: bool = False
    exchange_dtype: Literal["", "bfloat16"] = ""
    early_update: Literal["auto", "always", "never"] = "auto"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", self.steps, "train at least one step")
        require(self.shards >= 1, "shards", self.shards, "use at least one shard")
        policies = ("fixed", "per_worker")
        require(self.batch_policy in policies, "batch_policy", self.batch_policy, f"use one of {', '.join(policies)}")
        require(self.batch_size >= 1, "batch_size", self.batch_size, "use at least one sample")
        require(
            self.batch_policy == "per_worker" or self.batch_size >= self.shards,
            "batch_size",
            self.batch_size,
            f"must be at least shards ({self.shards}), so that no shard is empty",
        )
        require(0 <= self.seed < 2**32, "seed", self.seed, "use a number from 0 to 4294967295")
        require(
            self.eval_every >= 0,
            "eval_every",
            self.eval_every,
            "use 0 (only at the end) or a positive number",
        )
        require(self.log_every >= 1, "log_every", self.log_every, "use a positive number")
        dtypes = ("", "bfloat16")
        require(self.exchange_dtype in dtypes, "exchange_dtype", self.exchange_dtype, "use bfloat16, or leave it empty")
        choices = ("auto", "always", "never")
        require(self.early_update in choices, "early_update", self.early_update, f"use one of {', '.join(choices)}")
        require(self.prefetch >= 0, "prefetch", self.prefetch, "use 0 (read in the step itself) or a positive number")


def shards_note(shards: int, workers: int) -> str | None:
    """What to tell at the start of a run on GPUs whose programs are smaller than they could be."""
    if shards <= workers:
        return None
    each = -(-shards // workers)
    return (
        f"shards = {shards} for {workers} GPU{'s' * (workers > 1)}: each computes up to {each} slices of the batch, "
        f"one after the other, which uses it less well than one large slice. shards={workers} is the fastest; it "
        "rounds differently, so keep it the same in runs that are to be compared."
    )
