"""A trainer made ready on this worker: model, compiled programs, open data."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_train.config import Config
from elastic_train.data.batches import batches
from elastic_train.data.prefetch import Prefetcher, Shard
from elastic_train.data.source import DataError, DataSource, read
from elastic_train.membership.heal import Healer
from elastic_train.state import Device, TrainState, key_path_leaves
from elastic_train.step.evaluate import Evaluator
from elastic_train.step.local import LocalProgram
from elastic_train.telemetry.phase_times import PhaseTimes

if TYPE_CHECKING:
    from elastic_train.trainer import Trainer

MAX_IDS_SHOWN = 16


class Recipe:
    """A trainer made ready on this worker's device: model, compiled programs, open data. Slow; needs no peers.

    Args:
      trainer: what to train.
      device: where.
      times: told when the parts of it begin: "data", "model", "compile".
    """

    def __init__(self, trainer: Trainer, device: Device, times: PhaseTimes | None = None) -> None:
        config: Config = trainer.config
        self.trainer, self.config, self.device = trainer, config, device
        # Sources are opened and read in one and the same thread, evaluation data too: some cannot bear another.
        self._prefetcher = Prefetcher(self._read_now, config.prefetch, self._describe)
        try:
            self._prepare(trainer, device, times or PhaseTimes())
        except BaseException:
            self.close()
            raise

    def _prepare(self, trainer: Trainer, device: Device, times: PhaseTimes) -> None:
        config = self.config
        times.enter("data")
        self._source, num_samples = self._prefetcher.call(lambda: _opened(trainer.train_data(), "train_data"))
        self.batches = batches(config.batch_policy, num_samples, config.batch_size, config.shards, config.seed)
        self._eval_source, num_eval = self._prefetcher.call(lambda: _opened(trainer.eval_data(), "eval_data"))
        rows = self.batches.rows
        batch, weight = self.read(0, 0)
        eval_batch = self._read_eval(np.arange(rows) % num_eval) if num_eval else None
        has_padding = bool(self.batches.size(1) % self.batches.num_shards(1)), bool(num_eval % rows)
        self.local = LocalProgram(trainer, device, batch, eval_batch, times, has_padding)
        if device.platform != "cpu":
            self.local.rehearse(self.local.place(0, 0, batch, weight), self.local.initial)
        self.evaluator = Evaluator(self.local, self._read_eval, num_eval, rows) if num_eval else None
        self.healer = Healer(self.local.initial.arrays, device)
        self.schema = _schema(self.local.initial, config)
        self.layout = _layout(self.schema)

    def expect(self, state: TrainState, missing: Sequence[int], run: range, batch_size: int) -> None:
        """Has the shards `missing` of the step after `state` read ahead, and `run` of those that follow up to the last
        step."""
        ahead = range(min(self.config.steps - state.step, self.config.prefetch + 1))
        self._prefetcher.expect((state.samples + number * batch_size, run if number else missing) for number in ahead)

    def read(self, samples: int, shard: int) -> Shard:
        """Samples of one shard of the batch that begins at position `samples`, and their weights."""
        try:
            return self._prefetcher.get(samples, shard)
        except Exception as error:
            error.add_note(f"while reading {self._describe(samples, shard)}")
            raise

    def refine(self, samples: int, shard: int, work: Callable[[Shard], Any]) -> None:
        """Has `read` give what `work` makes of a shard, if that has been read ahead by now."""
        self._prefetcher.refine(samples, shard, work)

    def close(self) -> None:
        """Ends the thread that reads data."""
        self._prefetcher.close()

    def _read_now(self, samples: int, shard: int) -> Shard:
        ids, weight = self.batches.shard_ids(samples, shard)
        return read(self._source, ids), weight

    def _read_eval(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return self._prefetcher.call(lambda: read(self._eval_source, ids))

    def _describe(self, samples: int, shard: int) -> str:
        ids, weight = self.batches.shard_ids(samples, shard)
        real = ids[weight > 0].tolist()
        more = f", … ({len(real)} in all)" if len(real) > MAX_IDS_SHOWN else ""
        named = ", ".join(str(index) for index in real[:MAX_IDS_SHOWN])
        return f"samples {named}{more} (shard {shard} of the batch at position {samples})"


def _opened(source: DataSource | None, method: str) -> tuple[Any, int]:
    if source is not None and len(source) == 0:
        hint = "; return None for no evaluation" if method == "eval_data" else ""
        raise DataError(f"{method}() gave a data source without samples: len(source) is 0{hint}")
    return source, 0 if source is None else len(source)


def _schema(state: TrainState, config: Config) -> dict[str, str]:
    """Key paths, shapes and dtypes of the state, and the settings; see `membership.schema`."""
    leaves = key_path_leaves(state.arrays)
    found = {f"state/{path}": f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for path, leaf in leaves}
    return found | {f"config/{name}": repr(value) for name, value in _settings(dataclasses.asdict(config), "")}


def _settings(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _layout(schema: Mapping[str, str]) -> tuple[int, int]:
    """64 bits over it."""
    digest = hashlib.sha256(repr(sorted(schema.items())).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
