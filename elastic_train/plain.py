"""A trainer in one plain process: no launcher, no coordinator, the same steps and the same numbers."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from elastic_train.checkpoint.planning import plan
from elastic_train.checkpoint.resume import Mode, checkpoint_directory
from elastic_train.checkpoint.saves import Save
from elastic_train.config import ConfigError
from elastic_train.config_files import SettingsError, resolve, to_toml, to_values
from elastic_train.errors import (
    ElasticTrainError,
    InterruptedByUser,
    NonFiniteError,
    UsageError,
    UserCodeError,
    as_utf8,
    last_error,
)
from elastic_train.launch.environment import DETERMINISTIC_XLA_FLAGS, with_flags
from elastic_train.launch.signals import Signals
from elastic_train.launch.versions import versions
from elastic_train.membership.group import Identity, View
from elastic_train.membership.live import Alone, Group
from elastic_train.packages import missing
from elastic_train.recipe import Recipe
from elastic_train.state import params_sha256, state_sha256
from elastic_train.step.model import leaf_kinds_of
from elastic_train.telemetry import saves
from elastic_train.telemetry.phase_times import PhaseTimes
from elastic_train.telemetry.progress import Display, Pace
from elastic_train.telemetry.records import RunDirectory, prepare_run_directory
from elastic_train.telemetry.report import format_summary
from elastic_train.telemetry.trackers import open_trackers
from elastic_train.terminal import say
from elastic_train.training import Result, Training, write_params

if TYPE_CHECKING:
    from elastic_train.trainer import Trainer

ME = Identity(slot=0, incarnation=0, node=0)


class Nobody:
    """The outside of a process that nobody watches and nobody asks for anything."""

    candidates: tuple[Identity, ...] = ()
    stop_requested: str | None = None
    drained: bool = False
    save_requested: int = 0
    saved_step: int = 0
    has_checkpoints: bool = False
    first_epoch: int = 1
    generation: int = 0

    _times: PhaseTimes | None = None

    @property
    def times(self) -> PhaseTimes:
        if self._times is None:
            self._times = PhaseTimes()
        return self._times

    def phase(self, name: str, step: int) -> None:
        self.times.enter(name)

    def worked(self, seconds: float, num_shards: int) -> None:
        pass

    def viewed(self, view: View, reason: str, gone: Any, came: Any, step: int, time: float) -> None:
        pass

    def record(self, record: dict[str, Any], flush: bool = False, send: bool = True) -> None:
        pass

    def resend(self) -> None:
        pass

    def noted(self, event: str, show: str, **fields: object) -> None:
        pass

    def pending_records(self) -> tuple[str, ...]:
        return ()

    def saved(self, save: Save) -> None:
        pass

    def loaded(self, step: int, samples: int, path: str, seconds: float) -> None:
        pass

    def set_aside(self, text: str) -> None:
        pass

    def wait_last_save(self, step: int, nodes: frozenset[int], timeout: float) -> bool | None:
        return False

    def failed(self, step: int, fatal: bool, startup: bool, traceback: str) -> None:
        pass

    def wait_dead(self, nodes: frozenset[int], timeout: float) -> bool:
        return False


def fit_alone(trainer: Trainer, outside: Nobody | None = None, checkpoints: str | None = None) -> Result:
    """Trains to the last step (or until a stop is asked for) in this process.

    Args:
      trainer: what to train.
      outside: where records go and requests come from; by default nobody.
      checkpoints: the checkpoint directory; None for a run that leaves no trace.
    """
    outside = outside or Nobody()
    device = jax.local_devices()[0]
    recipe = Recipe(trainer, device)
    try:
        group = Group(
            ME,
            {ME.node: device},
            recipe.local.layout,
            recipe.batches.num_shards,
            outside,
            trainer.config.faults,
            None,
            lambda devices, trace: Alone(),
        )
        training = Training(recipe, group, outside, checkpoints=checkpoints)
        return training.run(View(outside.first_epoch, (ME,)))
    finally:
        recipe.close()


class _Process(Nobody):
    """The outside of `et.main`: the run directory, a display, and this process's own signals."""

    def __init__(
        self,
        records: RunDirectory,
        display: Display,
        signals: Signals,
        max_step_failures: int,
        has_checkpoints: bool,
    ) -> None:
        self._records, self._display, self._signals = records, display, signals
        self._max_step_failures = max_step_failures
        self._error = ""
        self._attempts: Counter[int] = Counter()
        self._has_said_stopping = False
        self._pace = Pace()
        self.first_epoch = records.past.epoch + 1
        self.has_checkpoints = has_checkpoints

    @property
    def stop_requested(self) -> str | None:
        """The first signal asks for a stop after the next commit, the second one stops at once."""
        while self._signals.wait(0):
            pass
        if self._signals.num_stops > 1:
            raise InterruptedByUser("stopped at once, not after a commit: a second signal")
        if self._signals.num_stops and not self._has_said_stopping:
            self._has_said_stopping = True
            self._display.note("stopping after the next commit; once more stops at once")
        return "a signal" if self._signals.num_stops else None

    def viewed(self, view: View, reason: str, gone: Any, came: Any, step: int, time: float) -> None:
        if self.stop_requested:
            raise InterruptedByUser("stopped before training began: a signal")
        slots = [member.slot for member in view.members]
        self._records.event("view_changed", epoch=view.epoch, members=slots, came=slots, left=[], step=step)

    def record(self, record: dict[str, Any], flush: bool = False, send: bool = True) -> None:
        for written in self._records.commit(record):
            self._display.update({**written, **self._pace.committed(written)})

    def noted(self, event: str, show: str, **fields: object) -> None:
        self._records.event(event, **fields)
        self._display.note(show)

    def pending_records(self) -> tuple[str, ...]:
        self._records.flush()
        return ()

    def saved(self, save: Save) -> None:
        saves.tell(dataclasses.asdict(save), self._records.event, self._display.note)

    def loaded(self, step: int, samples: int, path: str, seconds: float) -> None:
        self._records.event("checkpoint_loaded", step=step, samples=samples, path=path, seconds=seconds)

    def set_aside(self, text: str) -> None:
        self._records.event("checkpoint_damaged", text=text)
        self._display.note(text)

    def failed(self, step: int, fatal: bool, startup: bool, traceback: str) -> None:
        about = {"step": step, "fatal": fatal, "startup": startup, "traceback": traceback}
        self._records.event("user_code_failed", **ME._asdict(), **about)
        self._attempts[step] += 1
        attempt = f"at step {step + 1} (attempt {self._attempts[step]} of {self._max_step_failures})"
        error = last_error(traceback)
        if startup:
            self._display.note(f"user code raised while starting:\n{traceback.rstrip()}")
        elif error == self._error:
            self._display.note(f"again {attempt}: {error}")
        else:
            self._display.note(f"user code raised {attempt}:\n{traceback.rstrip()}")
        self._error = error


def main(trainer: type[Trainer]) -> NoReturn:
    """The end of a recipe's file: `et.main(MyTrainer)` trains in this process, with the options that make sense here.

    Ends the process with the exit codes of `elastic-train run`.
    """
    # First of all: a KeyboardInterrupt may be swallowed where it arises, in a callback of the garbage collector.
    with Signals(signal.SIGINT, signal.SIGTERM, last=3) as signals:
        _main(trainer, signals)


def _main(trainer: type[Trainer], signals: Signals) -> NoReturn:
    from elastic_train.cli import default_run_dir, parse_plain, report_error

    name = Path(sys.argv[0]).stem
    options = parse_plain(sys.argv[1:], f"python {sys.argv[0]}")
    try:
        flags = {"steps": options.steps, "seed": options.seed}
        config = resolve(trainer.config_class(), options.config, options.set, flags)
        if lacking := missing(trainer, vars(config)):
            raise UsageError("\n".join(lacking))
        if config.deterministic:  # read when the first backend is created, which is later
            os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), DETERMINISTIC_XLA_FLAGS)
        run_dir = options.run_dir or default_run_dir(name)
        sys.exit(_train(trainer(config), run_dir, name, options.resume, signals))
    except SettingsError as error:
        sys.exit(report_error(UsageError("\n".join([str(error), *missing(trainer, error.right)]))))
    except ConfigError as error:
        sys.exit(report_error(UsageError(str(error))))
    except ElasticTrainError as error:
        sys.exit(report_error(error))


def _train(trainer: Trainer, run_dir: Path, name: str, mode: Mode, signals: Signals) -> int:
    config = trainer.config
    prepare_run_directory(run_dir, may_hold_run=mode != "never")
    resume = plan(run_dir, mode, config.checkpoint, to_values(config), lambda: leaf_kinds_of(type(trainer), config))
    trackers = open_trackers(config.tensorboard, run_dir)
    display = Display(sys.stderr, 1, trainer.config.steps, first_step=resume.step if resume else 0)
    with RunDirectory(
        run_dir,
        log_every=config.log_every,
        trackers=trackers,
        resume=resume.step if resume else None,
    ) as records:
        records.write_config(to_toml(trainer.config))
        about = {"versions": versions(), "start_time": time.time(), "recipe": name, "workers": 1, "pid": os.getpid()}
        records.write_job({"address": None, "steps": trainer.config.steps, **about})
        records.event("job_started", recipe=name, trainer=type(trainer).__name__, workers=1)
        if resume:
            resume.tell(records.event, display.note)
            records.fill_up(resume.step, resume.records)
        records.event("worker_started", **ME._asdict(), pid=os.getpid(), host=socket.gethostname())
        display.start()
        try:
            failures = trainer.config.faults.max_step_failures
            outside = _Process(records, display, signals, failures, resume is not None and bool(resume.path))
            ended = _summarized(trainer, outside, run_dir, checkpoint_directory(run_dir, config.checkpoint))
        finally:
            display.stop()
        records.event("end", status=ended["status"], exit_code=ended["exit_code"])
        summary = records.summary({**ended, "versions": versions()})
    say(format_summary(summary, run_dir))
    return ended["exit_code"]


def _summarized(trainer: Trainer, outside: _Process, run_dir: Path, checkpoints: str) -> dict[str, Any]:
    """Trains, and leaves a description of the parameters in `run_dir`; how it ended, for the summary."""
    try:
        result = fit_alone(trainer, outside, checkpoints)
    except UsageError:
        raise
    except NonFiniteError as error:
        return {"status": "failed", "exit_code": error.exit_code, "message": str(error)}
    except UserCodeError as error:
        return {"status": "failed", "exit_code": error.exit_code, **_failure(str(error))}
    except InterruptedByUser as error:
        return {"status": "stopped", "exit_code": error.exit_code, "message": str(error)}
    except Exception:  # the model, the optimizer or the first trace of the loss
        outside.failed(0, fatal=True, startup=True, traceback=traceback.format_exc())
        return {"status": "failed", "exit_code": UserCodeError.exit_code, **_failure(traceback.format_exc())}
    state = result.state
    write_params(run_dir, state)
    return {
        "status": result.status,
        "message": "done" if result.status == "done" else "stopped after a commit",
        "exit_code": 0 if result.status == "done" else InterruptedByUser.exit_code,
        "step": state.step,
        "samples": state.samples,
        "params_sha256": params_sha256(state),
        "state_sha256": state_sha256(state),
        "metrics": result.metrics,
    }


def _failure(trace: str) -> dict[str, str]:
    trace = as_utf8(trace)
    return {"message": f"the recipe's own code failed: {last_error(trace)}", "traceback": trace}
