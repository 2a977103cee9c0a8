"""grain's data sets as sources."""

import numpy as np
import pytest

import elastic_train as et
from elastic_train.data.source import DataError, DataSource, read

grain = pytest.importorskip("grain", reason="needs the extra `grain`")


def dataset():
    return grain.MapDataset.source(np.arange(10)).seed(3).map(lambda number: {"x": np.full(2, number)})


def test_samples_are_read_by_number_through_the_transformations():
    source = et.from_grain(dataset().map(lambda sample: {**sample, "square": sample["x"][0] ** 2}))
    assert isinstance(source, DataSource) and len(source) == 10
    batch = read(source, [7, 2, 7])
    assert batch["x"].tolist() == [[7, 7], [2, 2], [7, 7]] and batch["square"].tolist() == [49, 4, 49]


def test_random_transformations_are_the_same_at_every_read():
    def noise(sample, generator):
        return {**sample, "noise": generator.random()}

    first, again = (et.from_grain(dataset().shuffle().random_map(noise)) for _ in range(2))
    forwards = read(first, np.arange(10))
    backwards = read(again, np.arange(10)[::-1])
    np.testing.assert_array_equal(forwards["noise"], backwards["noise"][::-1])
    np.testing.assert_array_equal(np.sort(forwards["x"][:, 0]), np.arange(10))
    assert len(set(forwards["noise"])) == 10


def test_there_is_nothing_behind_the_end():
    source = et.from_grain(dataset())
    with pytest.raises(IndexError):
        source[10]
    assert source[-1]["x"].tolist() == [9, 9]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataset().to_iter_dataset(), "can only be read from its beginning.*Pass the MapDataset"),
        (lambda: dataset().repeat(), "repeated without end"),
        (lambda: dataset().slice(slice(0, 0)), "is empty"),
        (lambda: iter([{"x": 1}]), "expected a grain.MapDataset; got list_iterator"),
        (lambda: [{"x": 1}], "expected a grain.MapDataset; got list.*data source as it is"),
    ],
)
def test_what_has_no_random_access_is_refused(make, message: str):
    with pytest.raises(DataError, match=message):
        et.from_grain(make())


def test_a_filtered_element_is_named():
    source = et.from_grain(dataset().filter(lambda sample: sample["x"][0] != 4))
    assert read(source, [3, 5])["x"].tolist() == [[3, 3], [5, 5]]
    with pytest.raises(DataError, match="sample 4 was filtered out"):
        read(source, [3, 4])


def test_a_random_access_source_of_grain_is_a_source_as_it_is():
    source = grain.sources.RangeDataSource(0, 10, 1)
    assert isinstance(source, DataSource) and len(source) == 10
    with pytest.raises(DataError, match="expected a non-empty dict"):
        read(source, [1])
