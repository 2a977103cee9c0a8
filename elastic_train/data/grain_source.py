"""Data sets of Google's grain as sources."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elastic_train.data.source import DataError, DataSource

if TYPE_CHECKING:
    import grain


def from_grain(dataset: grain.MapDataset[Any]) -> DataSource:
    """A `grain.MapDataset` as a data source. Needs the extra `grain`.

    Its transformations (`map`, `random_map`, `shuffle`, `slice`, `mix`, …) are applied when a sample is read.
    Order and batches are this package's business: do not `repeat` or `batch`, and `shuffle` is not needed. A
    random transformation depends on the sample's id, hence is the same in each pass.

    A random-access source of grain (`len` and `source[i]`) is a data source already, if its samples are dicts.

    Args:
      dataset: its elements must be flat dicts of arrays or numbers, all of one shape.

    Raises:
      DataError: `dataset` has no random access, has no end, or is empty. Reading raises it for an element that
        was filtered out.
    """
    try:
        import grain
    except ImportError as error:
        raise ImportError("from_grain needs grain: install elastic-train[grain]") from error
    if isinstance(dataset, grain.IterDataset):
        raise DataError(
            f"{_name(dataset)} can only be read from its beginning, but a step that is taken again asks for the same "
            "samples by number. Pass the MapDataset, before `to_iter_dataset()` or other iterator transformations"
        )
    if not isinstance(dataset, grain.MapDataset):
        raise DataError(
            f"expected a grain.MapDataset; got {_name(dataset)}. What has `len(source)` and `source[i]` is a "
            "data source as it is, or can be wrapped in grain.MapDataset.source(...)"
        )
    if len(dataset) == sys.maxsize:
        raise DataError(f"{_name(dataset)} is repeated without end; leave `repeat()` out: passes are counted here")
    if len(dataset) == 0:
        raise DataError(f"{_name(dataset)} is empty")
    return _GrainSource(dataset)


def _name(dataset: object) -> str:
    return type(dataset).__name__


class _GrainSource:
    """A finite `grain.MapDataset`."""

    def __init__(self, dataset: grain.MapDataset[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        # grain goes on with another pass behind the last element.
        element = self._dataset[range(len(self))[index]]
        if element is None:
            raise DataError(
                f"sample {index} was filtered out of the grain data set, but every number from 0 to {len(self) - 1} "
                "must have a sample. Filter the list of records before it becomes a MapDataset"
            )
        return element
