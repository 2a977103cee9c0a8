"""Reading samples: what `read` promises, and the two sources that come with the package."""

import doctest
from pathlib import Path

import numpy as np
import pytest

from elastic_train.data import source
from elastic_train.data.source import ArraySource, DataError, DataSource, TokenSource, read


class Samples:
    """A source without `batch`: a list of samples."""

    def __init__(self, *samples: object) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> object:
        return self.samples[index]


def test_read_stacks_items_in_the_order_of_the_ids():
    samples = Samples({"x": 0, "y": [0, 1]}, {"x": 1, "y": [2, 3]}, {"x": 2, "y": [4, 5]})
    batch = read(samples, [2, 0, 2])
    assert batch["x"].tolist() == [2, 0, 2]
    assert batch["y"].tolist() == [[4, 5], [0, 1], [4, 5]]


def test_read_gives_the_same_with_and_without_batch():
    arrays = ArraySource(x=np.arange(12.0).reshape(4, 3), y=np.arange(4))
    items = Samples(*(arrays[index] for index in range(4)))
    for name, value in read(arrays, np.array([3, 1])).items():
        np.testing.assert_array_equal(value, read(items, np.array([3, 1]))[name])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"x": np.zeros(3), "z": 0}, r"sample 1 has the entries \['x', 'z'\], sample 0 has \['x'\]"),
        ({"x": np.zeros(4)}, r"sample 1, entry 'x': float64\[4\], but sample 0 has float64\[3\]"),
        ({"x": np.zeros(3, np.float32)}, r"sample 1, entry 'x': float32\[3\]"),
        ({}, "sample 1: expected a non-empty dict of arrays"),
        ((0, 1), "sample 1: expected a non-empty dict of arrays.*got tuple"),
    ],
)
def test_an_odd_sample_is_named(sample: object, message: str):
    with pytest.raises(DataError, match=message):
        read(Samples({"x": np.zeros(3)}, sample), [0, 1])


def test_a_batch_with_the_wrong_number_of_rows_is_an_error():
    class Short(ArraySource):
        def batch(self, ids: np.ndarray) -> dict[str, np.ndarray]:
            return super().batch(ids[1:])

    with pytest.raises(DataError, match=r"Short.batch, entry 'x': asked for 3 samples \(first id 4\), got shape \[2\]"):
        read(Short(x=np.arange(9)), [4, 5, 6])


@pytest.mark.parametrize("ids", [[], [[0, 1]]])
def test_ids_must_be_a_list(ids: list):
    with pytest.raises(DataError, match="non-empty list"):
        read(ArraySource(x=np.arange(3)), ids)


def test_ids_outside_the_source_are_errors():
    for outside in (ArraySource(x=np.arange(3)), TokenSource(np.arange(9), 2)):
        with pytest.raises(IndexError):
            read(outside, [0, 7])


@pytest.mark.parametrize("arrays", [{}, {"x": np.arange(3), "y": np.arange(4)}, {"x": np.float32(1)}])
def test_arrays_need_one_length(arrays: dict):
    with pytest.raises(DataError, match="one common first dimension"):
        ArraySource(**arrays)


def test_arrays_need_names():
    with pytest.raises(DataError, match=r"name the arrays: ArraySource\(x=images"):
        ArraySource({"x": np.zeros(3)})


def test_token_windows_cover_every_target_once():
    tokens = TokenSource(np.arange(100, dtype=np.uint8), length=8)
    batch = read(tokens, np.arange(len(tokens)))["tokens"]
    assert batch.shape == (12, 9) and batch.dtype == np.int32
    assert batch[:, 1:].ravel().tolist() == list(range(1, 97))
    assert tokens[-1]["tokens"].tolist() == batch[-1].tolist()


def test_token_source_reads_a_memmap(tmp_path: Path):
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    tokens = TokenSource(np.memmap(path, dtype=np.uint16, mode="r"), length=10)
    assert read(tokens, [3])["tokens"].tolist() == [list(range(30, 41))]


@pytest.mark.parametrize(
    ("tokens", "length", "message"),
    [
        (np.zeros((2, 3), int), 2, r"one row of integers; got int64\[2, 3\]"),
        (np.zeros(3), 2, "one row of integers; got float64"),
        (np.arange(4), 4, "less than the number of tokens"),
        (np.arange(4), 0, "at least 1"),
    ],
)
def test_token_source_checks_its_arguments(tokens: np.ndarray, length: int, message: str):
    with pytest.raises(DataError, match=message):
        TokenSource(tokens, length)


def test_the_sources_follow_the_protocol():
    assert isinstance(ArraySource(x=np.arange(2)), DataSource)
    assert isinstance(TokenSource(np.arange(3), 1), DataSource)


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(source).failed == 0


def test_a_source_may_return_the_same_buffer_every_time():
    class Buffered:
        def __init__(self) -> None:
            self.row = np.zeros(2)

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            self.row[:] = index
            return {"x": self.row}

    class BufferedBatch(Buffered):
        def batch(self, ids: np.ndarray) -> dict[str, np.ndarray]:
            self.row[:] = ids
            return {"x": self.row}

    assert read(Buffered(), [3, 1])["x"].tolist() == [[3, 3], [1, 1]]
    source = BufferedBatch()
    first, second = read(source, [3, 1]), read(source, [0, 4])
    assert first["x"].tolist() == [3, 1] and second["x"].tolist() == [0, 4]


def test_samples_are_in_this_machines_byte_order():
    batch = read(Samples({"x": np.arange(3, dtype=">i4")}, {"x": np.arange(3, dtype=">i4")}), [0, 1])
    assert batch["x"].dtype.isnative and batch["x"].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy"])
def test_token_source_from_a_file(tmp_path: Path, name: str):
    tokens, path = np.arange(1000, dtype=np.uint16), tmp_path / name
    np.save(path, tokens) if name.endswith("npy") else tokens.tofile(path)
    source = TokenSource.from_file(path, 10, np.uint16)
    assert len(source) == 99
    assert read(source, [3, 98])["tokens"].tolist() == [list(range(30, 41)), list(range(980, 991))]


def test_a_token_file_that_does_not_fit_is_refused(tmp_path: Path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"123")
    with pytest.raises(DataError, match=r"3 bytes are no whole number of tokens of 2 bytes \(uint16\)"):
        TokenSource.from_file(path, 1, np.uint16)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="0 bytes"):
        TokenSource.from_file(path, 1, np.uint16)
    with pytest.raises(FileNotFoundError):
        TokenSource.from_file(tmp_path / "none.bin", 1, np.uint16)
    np.save(tmp_path / "tokens.npy", np.arange(9))
    with pytest.raises(DataError, match="holds int64, not uint16"):
        TokenSource.from_file(tmp_path / "tokens.npy", 1, np.uint16)


def test_a_token_file_may_be_larger_than_what_is_in_memory(tmp_path: Path):
    num_tokens, length = 2**31 + 1, 1024  # 4 GiB, of which the disk holds only what is written below

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    path = tmp_path / "tokens.bin"
    with open(path, "wb") as file:
        file.truncate(2 * num_tokens)
        file.seek(2 * (num_tokens - 3))
        np.array([5, 6, 7], np.uint16).tofile(file)
    before = resident_bytes()
    source = TokenSource.from_file(path, length, np.uint16)
    assert len(source) == 2**21
    ids = np.linspace(0, len(source) - 1, 64).astype(np.int64)
    assert read(source, ids)["tokens"].shape == (64, length + 1)
    assert source[-1]["tokens"][-3:].tolist() == [5, 6, 7]
    assert resident_bytes() - before < 256 * 2**20
