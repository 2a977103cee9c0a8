"""Loads a recipe and resolves its config in a process of its own, before any worker starts.

The process that runs a job must not run user code, nor import jax. So it starts
`python -m elastic_train.launch.check`, which either says in one message what is wrong, or hands back what the
job needs to know.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from elastic_train.checkpoint.resume import Mode, Resume
from elastic_train.config import ConfigError, FaultConfig
from elastic_train.errors import ElasticTrainError, UsageError
from elastic_train.launch.bond import die_with_parent
from elastic_train.terminal import say

CHECK_LIMIT_S = 300.0
"""How long a recipe may take to import. Reading data belongs into its methods."""

VERIFY_LIMIT_S = 1800.0
"""How much longer the check may take where a run is gone on with: its newest checkpoint is read as a whole."""


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """What the command line said about recipe and config.

    Attributes:
      run_dir: a run to go on with, if it holds one; None on hosts that only join a job.
      resume: whether to: "never", "auto" or "must".
    """

    recipe: str
    workers: int
    run_dir: str | None = None
    resume: Mode = "never"
    config: str | None = None
    overrides: tuple[str, ...] = ()
    flags: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a job needs to know about its recipe.

    Attributes:
      trainer: name of the trainer class.
      config_toml: the resolved config.
      steps, log_every, tensorboard, deterministic, batch_policy, faults: from the config.
      shards: into how many a batch of that many workers is cut.
      max_workers: how many could take part; 0 if any number.
      resume: where the run goes on; None if a new one begins.
    """

    trainer: str
    config_toml: str
    steps: int
    log_every: int
    tensorboard: bool
    shards: int
    max_workers: int
    deterministic: bool
    batch_policy: str
    faults: FaultConfig
    resume: Resume | None


class CheckFailed(ElasticTrainError):
    """The check has said what is wrong, on stderr; there is nothing to add."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the recipe was refused")
        self.exit_code = exit_code


def check(request: CheckRequest, environ: Mapping[str, str]) -> Checked:
    """Runs the check in a process of its own; that process prints what is wrong to this one's stderr.

    Raises:
      CheckFailed: the recipe or its config is refused.
      UsageError: the process crashed, or took longer than `CHECK_LIMIT_S`.
    """
    limit_s = CHECK_LIMIT_S + (VERIFY_LIMIT_S if request.run_dir is not None else 0.0)
    with tempfile.TemporaryFile() as answer:
        command = [
            sys.executable,
            "-m",
            "elastic_train.launch.check",
            json.dumps(dataclasses.asdict(request)),
            str(answer.fileno()),
            str(os.getpid()),
        ]
        try:
            ended = subprocess.run(
                command,
                env={**environ, "JAX_PLATFORMS": "cpu"},  # a check takes no accelerator from the workers
                stdin=subprocess.DEVNULL,
                pass_fds=[answer.fileno()],
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UsageError(
                f"importing the recipe {request.recipe} (and reading its checkpoint) took longer than {limit_s:.0f} s. "
                "Move what is slow, such as reading data, into the trainer's methods."
            ) from error
        if ended.returncode in (UsageError.exit_code, 130):
            raise CheckFailed(ended.returncode)
        if ended.returncode != 0:
            raise UsageError(
                f"importing the recipe {request.recipe} ended the process with code {ended.returncode}; "
                "what it printed is above"
            )
        answer.seek(0)
        found = json.load(answer)
    resume = found["resume"]
    return Checked(**{**found, "faults": FaultConfig(**found["faults"]), "resume": resume and Resume.from_json(resume)})


def inspect_recipe(request: CheckRequest) -> Checked:
    """The check itself: runs the user's module, in this process.

    Raises:
      UsageError: all that is wrong, and what to do.
    """
    from elastic_train import jax_private
    from elastic_train.checkpoint.planning import plan
    from elastic_train.config_files import SettingsError, resolve, to_toml, to_values
    from elastic_train.launch.recipe import config_class_of, load_recipe
    from elastic_train.packages import missing

    trainer = load_recipe(request.recipe)
    if jax_private.backends_initialized():
        raise UsageError(
            f"jax already initialised: importing the recipe {request.recipe} created arrays or asked for "
            "devices. A worker must join its group before jax does that. Move such code from the top level "
            "of the module into the trainer's methods; use numpy for constants."
        )

    def beyond(settings: Mapping[str, Any]) -> list[str]:
        return [*missing(trainer, settings), *_too_many(settings, request.workers)]

    try:
        config_file = Path(request.config) if request.config is not None else None
        config = resolve(config_class_of(trainer), config_file, request.overrides, request.flags)
        toml = to_toml(config)
    except SettingsError as error:
        raise UsageError("\n".join([str(error), *beyond(error.right)])) from error
    except ConfigError as error:
        raise UsageError(str(error)) from error
    if wrong := beyond(vars(config)):
        raise UsageError("\n".join(wrong))
    resume = None
    if request.run_dir is not None:
        from elastic_train.step.model import leaf_kinds_of

        run_dir, kinds = Path(request.run_dir), partial(leaf_kinds_of, trainer, config)
        resume = plan(run_dir, request.resume, config.checkpoint, to_values(config), kinds)
    return Checked(
        trainer=trainer.__name__,
        config_toml=toml,
        steps=config.steps,
        log_every=config.log_every,
        tensorboard=config.tensorboard,
        shards=config.shards if config.batch_policy == "fixed" else request.workers,
        max_workers=config.shards if config.batch_policy == "fixed" else 0,
        deterministic=config.deterministic,
        batch_policy=config.batch_policy,
        faults=config.faults,
        resume=resume,
    )


def _too_many(settings: Mapping[str, Any], workers: int) -> list[str]:
    """What is said if some of the workers would have nothing to do. Nothing, if a setting is wrong that decides it."""
    shards = settings.get("shards")
    if settings.get("batch_policy") != "fixed" or shards is None or workers <= shards:
        return []
    return [
        f"{workers} workers, but the batch is cut into shards = {shards}: some workers "
        f"would have nothing to do. Use at most {shards} workers, or --set "
        f"shards={workers} (which rounds differently: shards are part of the numbers)."
    ]


def main() -> int:
    """The process's entry: argv holds the request as JSON, the descriptor for the answer, and the parent."""
    request, descriptor, parent = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent)
    os.set_inheritable(descriptor, False)
    sys.stdout = sys.stderr  # what a module prints when it is imported is no part of the command's output
    try:
        found = inspect_recipe(CheckRequest(**request))
    except UsageError as error:
        say(f"elastic-train: {error}", sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    with open(descriptor, "w", encoding="utf-8") as answer:
        json.dump(dataclasses.asdict(found), answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
