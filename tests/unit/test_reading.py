"""A whole run in this process: what it reads, when, and in which thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import optax
import pytest
from flax import nnx

import elastic_train as et
from elastic_train.data.source import DataError
from elastic_train.errors import UserCodeError
from elastic_train.plain import fit_alone
from elastic_train.state import state_sha256

NUM_SAMPLES = 30


class Source:
    """Notes who reads what. `raises` are raised by the reads with these numbers."""

    def __init__(self, size: int = NUM_SAMPLES, raises: dict[int, BaseException] | None = None) -> None:
        self.size, self.raises = size, raises or {}
        self.reads: list[list[int]] = []
        self.threads = {threading.current_thread()}

    def __len__(self) -> int:
        self.threads.add(threading.current_thread())
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: value[0] for name, value in self.batch(np.array([index])).items()}

    def batch(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        self.threads.add(threading.current_thread())
        self.reads.append(ids.tolist())
        if error := self.raises.get(len(self.reads) - 1):
            raise error
        return {"x": np.sin(ids + np.arange(3)[:, None]).T.astype(np.float32)}


@dataclass(frozen=True, kw_only=True)
class ReadingConfig(et.Config):
    steps: int = 9
    batch_size: int = 8
    shards: int = 3
    eval_every: int = 4


class Reading(et.Trainer):
    config: ReadingConfig
    raises: dict[int, BaseException] | None = None
    eval_size: int = 10

    def model(self, rngs):
        return nnx.Linear(3, 1, rngs=rngs)

    def optimizer(self):
        return optax.sgd(0.1)

    def loss(self, model, batch, rngs):
        return (model(batch["x"])[:, 0] - 1) ** 2

    def train_data(self):
        self.source = Source(raises=self.raises)
        return self.source

    def eval_data(self):
        self.eval_source = Source(self.eval_size)
        return self.eval_source


def fit(prefetch: int, raises: dict[int, BaseException] | None = None, **settings: int) -> Reading:
    trainer = Reading(ReadingConfig(prefetch=prefetch, **settings))
    trainer.raises = raises
    threads = set(threading.enumerate())
    trainer.digest = state_sha256(fit_alone(trainer).state)
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.name == "data-reader"]
    return trainer


def test_prefetch_changes_neither_numbers_nor_what_is_read():
    ahead, direct = fit(3), fit(0)
    assert ahead.digest == direct.digest
    assert ahead.source.reads == direct.source.reads  # nothing beyond the last step, either
    assert len(direct.source.reads) == 1 + 9 * 3
    assert ahead.eval_source.reads == direct.eval_source.reads


def test_one_thread_opens_and_reads_all_data():
    trainer = fit(2)
    assert trainer.source.threads == trainer.eval_source.threads
    assert len(trainer.source.threads) == 1 and threading.current_thread() not in trainer.source.threads
    assert fit(0).source.threads == {threading.current_thread()}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_source_that_raises_once_is_asked_again(prefetch: int):
    errors = {5: OSError("away"), 6: OSError("still away"), 17: SystemExit(2)}
    assert fit(prefetch, errors).digest == fit(prefetch).digest


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_source_that_exits_every_time_ends_the_run_with_its_reason(prefetch: int):
    errors: dict[int, BaseException] = {number: SystemExit(2) for number in range(10, 100)}
    with pytest.raises(UserCodeError, match=r"the data source tried to exit the process, with SystemExit\(2\)"):
        fit(prefetch, errors)


def test_a_source_without_samples_is_named():
    trainer = Reading(ReadingConfig())
    trainer.eval_size = 0
    with pytest.raises(DataError, match=r"eval_data\(\) gave a data source without samples.*return None"):
        fit_alone(trainer)
