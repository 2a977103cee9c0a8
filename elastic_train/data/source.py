"""Where samples come from: a random-access protocol, and sources for what fits in memory or in a file.

A source knows nothing of workers, batches or order. It answers one question: what is sample `i`? Any object
with `__len__` and `__getitem__` does, grain's random-access sources included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class DataSource(Protocol):
    """Random access to samples.

    A sample is a mapping from names to arrays; all samples of one source have the same names, shapes and
    dtypes. Sample `i` must be the same on every worker and at every call: a step that is retried reads again.
    One thread calls a run's sources, evaluation data included, but it is not the main thread (unless
    `Config.prefetch` is 0).

    A source may also have `batch(ids)`, taking int[rows] and returning the samples stacked along a new first
    dimension. `read` prefers it, because one vectorised look-up is faster than many small ones.
    """

    def __len__(self) -> int:
        """Number of samples; their ids are 0 … len - 1."""
        ...

    def __getitem__(self, index: Any, /) -> Mapping[str, Any]:
        """The sample with this id. Raises IndexError if there is none."""
        ...


@runtime_checkable
class BatchedDataSource(DataSource, Protocol):
    """A source that reads many samples at once."""

    def batch(self, ids: np.ndarray, /) -> Mapping[str, Any]: ...


class DataError(ValueError):
    """A source gave something that is no sample. The message names the sample."""


def read(source: DataSource, ids: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
    """The samples `ids` of `source`, stacked: every array has first dimension `len(ids)`.

    Raises:
      IndexError: an id is outside the source.
      DataError: samples differ in names, shapes or dtypes, or `source.batch` returned a wrong number of rows.
    """
    ids = np.asarray(ids, dtype=np.int64)
    if ids.ndim != 1 or not len(ids):
        raise DataError(f"ids must be a non-empty list of sample ids; got an array of shape {ids.shape}")
    if isinstance(source, BatchedDataSource):
        return _checked_batch(source, ids)
    return _stacked(source, ids)


def _sample(source: DataSource, index: int) -> dict[str, np.ndarray]:
    try:
        sample = source[index]
    except Exception as error:
        error.add_note(f"while reading sample {index}")
        raise
    if not isinstance(sample, Mapping) or not sample:
        raise DataError(
            f"sample {index}: expected a non-empty dict of arrays; got {type(sample).__name__}. "
            'Return something like {"image": image, "label": label}'
        )
    return {name: np.asarray(value) for name, value in sample.items()}


def _stacked(source: DataSource, ids: np.ndarray) -> dict[str, np.ndarray]:
    # Each sample is copied before the next one is read: a source may return the same buffer every time.
    first_id = int(ids[0])
    sample = _sample(source, first_id)
    expected = {name: (value.shape, value.dtype) for name, value in sample.items()}
    # The type of a result is in this machine's byte order.
    batch = {name: np.empty((len(ids), *shape), np.result_type(dtype)) for name, (shape, dtype) in expected.items()}
    for row, index in enumerate(ids.tolist()):
        sample = sample if row == 0 else _sample(source, index)
        if sample.keys() != batch.keys():
            raise DataError(
                f"sample {index} has the entries {sorted(sample)}, sample {first_id} has {sorted(batch)}; "
                "all samples of a source need the same entries"
            )
        for name, (shape, dtype) in expected.items():
            value = sample[name]
            if (value.shape, value.dtype) != (shape, dtype):
                raise DataError(
                    f"sample {index}, entry {name!r}: {value.dtype}{list(value.shape)}, but sample "
                    f"{first_id} has {dtype}{list(shape)}; crop, pad or cast samples to one shape"
                )
            batch[name][row] = value
    return batch


def _checked_batch(source: BatchedDataSource, ids: np.ndarray) -> dict[str, np.ndarray]:
    # Copies, for the same reason: this batch may still be on its way to the device when the next one is read.
    batch = {name: np.array(value) for name, value in source.batch(ids).items()}
    if not batch:
        raise DataError(f"{type(source).__name__}.batch returned no arrays for sample {ids[0]} and following")
    for name, value in batch.items():
        if value.shape[:1] != (len(ids),):
            raise DataError(
                f"{type(source).__name__}.batch, entry {name!r}: asked for {len(ids)} samples "
                f"(first id {ids[0]}), got shape {list(value.shape)}; the first dimension must count samples"
            )
    return batch


class ArraySource:
    """Samples that are rows of arrays in memory.

    >>> source = ArraySource(x=np.arange(6).reshape(3, 2), y=np.array([0, 1, 0]))
    >>> len(source), source[1]["x"].tolist()
    (3, [2, 3])

    Raises DataError if the arrays have different lengths or no names, or there is none.
    """

    def __init__(self, *unnamed: object, **arrays: np.ndarray) -> None:
        if unnamed:
            raise DataError("name the arrays: ArraySource(x=images, y=labels), or ArraySource(**arrays) for a dict")
        lengths = {name: np.shape(array)[0] if np.ndim(array) else None for name, array in arrays.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            raise DataError(f"arrays must have one common first dimension, the number of samples; got {lengths}")
        self._arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self._length = len(next(iter(self._arrays.values())))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: array[index] for name, array in self._arrays.items()}

    def batch(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array[ids] for name, array in self._arrays.items()}


class TokenSource:
    """Windows over one long row of tokens, in memory or a `np.memmap`.

    Sample `i` is {"tokens": int32[length + 1]}, starting at token `i * length`: inputs and targets are its
    first and its last `length` tokens, and every token is a target once. Tokens after the last whole
    window are left out.

    >>> source = TokenSource(np.arange(10), length=4)
    >>> len(source), source[1]["tokens"].tolist()
    (2, [4, 5, 6, 7, 8])

    Raises DataError if `tokens` is not one row of integers, or shorter than one window.
    """

    @classmethod
    def from_file(cls, path: str | Path, length: int, dtype: np.typing.DTypeLike) -> TokenSource:
        """Windows over a file of tokens that is mapped into memory, so that it may be larger than memory.

        Args:
          path: nothing but the tokens, one after the other, as `array.tofile` writes them; or an `.npy` file
            of one row.
          length: tokens of a window; each sample has one more.
          dtype: of the file, such as `np.uint16`; with a byte order ("<u2") if another machine wrote it.

        Raises:
          OSError: the file cannot be opened.
          DataError: it does not hold a whole number of tokens, or too few for one window.
        """
        path, dtype = Path(path), np.dtype(dtype)
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            if tokens.dtype != dtype:
                raise DataError(f"{path}: holds {tokens.dtype}, not {dtype}; correct the argument `dtype`")
            return cls(tokens, length)
        num_bytes = path.stat().st_size
        if num_bytes == 0 or num_bytes % dtype.itemsize:
            raise DataError(
                f"{path}: {num_bytes} bytes are no whole number of tokens of {dtype.itemsize} bytes ({dtype}); "
                "the file is cut short, or `dtype` is another one"
            )
        return cls(np.memmap(path, dtype=dtype, mode="r"), length)

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise DataError(f"tokens must be one row of integers; got {tokens.dtype}{list(tokens.shape)}")
        if length < 1 or len(tokens) <= length:
            raise DataError(f"length = {length}: must be at least 1 and less than the number of tokens ({len(tokens)})")
        self._tokens = tokens
        self._within_window = np.arange(length + 1)
        self._length = length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": self.batch(np.array([range(len(self))[index]]))["tokens"][0]}

    def batch(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        if ids.size and not (ids.min() >= 0 and ids.max() < len(self)):
            raise IndexError(f"sample ids must be in 0 … {len(self) - 1}; got {ids.min()} … {ids.max()}")
        windows = self._tokens[ids[:, None] * self._length + self._within_window]
        return {"tokens": np.asarray(windows, dtype=np.int32)}
