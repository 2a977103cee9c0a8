"""Reading ahead: order, errors, threads, and what is held in memory."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from elastic_train.data import prefetch
from elastic_train.data.prefetch import Prefetcher, Shard
from elastic_train.data.source import DataError

LIMIT_S = 20.0


def shard_of(samples: int, number: int) -> Shard:
    return {"x": np.array([samples, number])}, np.ones(1, np.float32)


@contextmanager
def prefetcher(read: Callable[[int, int], Shard], depth: int = 2) -> Iterator[Prefetcher]:
    made = Prefetcher(read, depth)
    try:
        yield made
    finally:
        made.close()


def settle(made: Prefetcher) -> None:
    """Waits until all that is expected has been read."""
    with made._changed:
        assert made._changed.wait_for(lambda: made._next() is None and made._reading is None, LIMIT_S)


class Source:
    """Notes what is read, in which thread; raises what it was told to, once each."""

    def __init__(self, **raises: BaseException) -> None:
        self.reads: list[tuple[int, int]] = []
        self.threads: set[threading.Thread] = set()
        self.raises = {tuple(map(int, key.removeprefix("at_").split("_"))): error for key, error in raises.items()}

    def __call__(self, samples: int, shard: int) -> Shard:
        self.reads.append((samples, shard))
        self.threads.add(threading.current_thread())
        if error := self.raises.pop((samples, shard), None):
            raise error
        return shard_of(samples, shard)


def test_only_what_has_been_read_is_refined():
    source = Source(at_0_2=ValueError("planned"))
    with prefetcher(source) as made:
        made.refine(0, 1, pytest.fail)  # nobody has read it
        made.expect([(0, (1, 2))])
        settle(made)
        made.refine(0, 1, lambda shard: shard[0]["x"].tolist())
        made.refine(0, 2, pytest.fail)  # reading it failed
        assert made.get(0, 1) == [0, 1]
        with pytest.raises(ValueError, match="planned"):
            made.get(0, 2)


def test_what_cannot_be_refined_is_given_as_it_was_read_and_that_is_said_once(capsys: pytest.CaptureFixture[str]):
    with prefetcher(shard_of) as made:
        made.expect([(0, (1, 2))])
        settle(made)
        for shard in (1, 2):
            made.refine(0, shard, lambda read: read[17])
            assert made.get(0, shard)[0]["x"].tolist() == [0, shard]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "elastic_train: cannot prepare ahead shard 1 of the batch at 0; it is done in the step: "
        "IndexError('tuple index out of range')"
    )


def test_what_is_expected_is_read_in_order_and_once():
    source = Source()
    with prefetcher(source) as made:
        made.expect([(0, (1, 2)), (10, (1, 2)), (20, (1, 2)), (30, (1, 2))])
        settle(made)
        assert source.reads == [(0, 1), (0, 2), (10, 1), (10, 2), (20, 1), (20, 2)]
        assert made.num_held == 6
        assert made.get(0, 1)[0]["x"].tolist() == [0, 1]
        made.expect([(0, (2,)), (10, (2, 3))])
        settle(made)
        assert source.reads[6:] == [(10, 3)] and made.num_held == 3


def test_what_is_waited_for_comes_before_what_is_expected():
    may_read = threading.Event()
    reads = []

    def read(samples: int, shard: int) -> Shard:
        reads.append((samples, shard))
        assert may_read.wait(LIMIT_S)
        return shard_of(samples, shard)

    with prefetcher(read) as made:
        made.expect([(0, range(5))])
        asked = threading.Thread(target=made.get, args=(7, 7))
        asked.start()
        with made._changed:
            assert made._changed.wait_for(lambda: made._request is not None, LIMIT_S)
        may_read.set()
        asked.join(LIMIT_S)
        assert not asked.is_alive() and (7, 7) in reads[:2]
        settle(made)
        assert made.num_held == 5


def test_depth_zero_reads_in_the_call_itself():
    source = Source()
    threads = set(threading.enumerate())
    made = Prefetcher(source, 0)
    made.expect([(0, (0, 1))])
    assert made.get(0, 1)[0]["x"].tolist() == [0, 1]
    assert source.reads == [(0, 1)] and source.threads == {threading.current_thread()}
    assert set(threading.enumerate()) <= threads


def test_an_error_is_raised_for_its_key_once_then_read_again():
    source = Source(at_0_1=OSError("the disk is away"))
    with prefetcher(source) as made:
        made.expect([(0, (0, 1))])
        settle(made)
        assert made.get(0, 0)[0]["x"].tolist() == [0, 0]
        with pytest.raises(OSError, match="the disk is away"):
            made.get(0, 1)
        assert made.get(0, 1)[0]["x"].tolist() == [0, 1]
        assert source.reads == [(0, 0), (0, 1), (0, 1)]


def test_a_source_that_was_away_for_a_while_fails_one_attempt_only():
    source = Source(at_0_0=OSError("away"), at_0_1=OSError("away"), at_10_0=OSError("away"))
    with prefetcher(source) as made:
        steps = [(0, (0, 1)), (10, (0, 1))]
        made.expect(steps)
        settle(made)
        with pytest.raises(OSError, match="away"):
            made.get(0, 0)
        made.expect(steps)
        for samples, run in steps:
            for shard in run:
                assert made.get(samples, shard)[0]["x"].tolist() == [samples, shard]


def test_an_error_nobody_asks_for_is_dropped():
    source = Source(at_10_0=OSError("the disk is away"))
    with prefetcher(source) as made:
        made.expect([(0, (0,)), (10, (0,))])
        settle(made)
        made.expect([(0, (0,)), (10, (1,))])
        settle(made)
        made.get(0, 0), made.get(10, 1)
        assert made.num_held == 0
        assert made.get(10, 0)[0]["x"].tolist() == [10, 0]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("is_expected", [True, False])
def test_an_exit_in_the_reader_is_an_ordinary_error(error: BaseException, is_expected: bool):
    source = Source(at_0_0=error)
    with prefetcher(source) as made:
        made.expect([(0, (0,))] if is_expected else [])
        settle(made)
        with pytest.raises(DataError, match="tried to exit the process") as caught:
            made.get(0, 0)
        assert caught.value.__cause__ is error
        assert made.get(0, 0)[0]["x"].tolist() == [0, 0]


def test_without_a_thread_an_exit_is_an_error_but_for_ctrl_c():
    with pytest.raises(DataError, match="tried to exit the process, with SystemExit"):
        Prefetcher(Source(at_0_0=SystemExit(3)), 0).get(0, 0)
    with pytest.raises(KeyboardInterrupt):
        Prefetcher(Source(at_0_0=KeyboardInterrupt()), 0).get(0, 0)


def test_everything_happens_in_one_thread_and_none_is_left():
    before = set(threading.enumerate())  # those of tests before this one may still be on their way out

    def new() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    source = Source()
    with prefetcher(source, depth=3) as made:
        for change in range(200):
            run = range(change % 4, change % 4 + 1 + change % 3)
            made.expect([(change * 8, run), (change * 8 + 8, run)])
            made.get(change * 8, run[0])
            assert made.call(threading.current_thread) in source.threads
            assert len(new()) == 1
        assert new() == source.threads
    assert not new()


def test_a_long_wait_says_for_what(monkeypatch: pytest.MonkeyPatch):
    is_reading, reported = threading.Event(), threading.Event()
    lines = []

    class Stream:
        def write(self, text: str) -> None:
            lines.append(text)
            if text.startswith("elastic_train: waiting"):
                reported.set()

        def flush(self) -> None:
            pass

    def read(samples: int, shard: int) -> Shard:
        is_reading.set()
        assert reported.wait(LIMIT_S)
        return shard_of(samples, shard)

    monkeypatch.setattr(prefetch, "REPORT_S", 0.01)
    monkeypatch.setattr(sys, "stderr", Stream())
    with prefetcher(read) as made:
        made.expect([(64, (3,))])
        assert is_reading.wait(LIMIT_S)
        made.get(64, 4)
    text = "".join(lines)
    assert "shard 4 of the batch at 64; the data source is still busy with shard 3 of the batch at 64" in text


def test_a_wait_ends_when_the_thread_has():
    with prefetcher(shard_of) as made:
        made.close()
        with pytest.raises(RuntimeError, match="has ended"):
            made.get(0, 0)


def test_close_while_a_read_is_under_way():
    may_read, is_reading = threading.Event(), threading.Event()

    def read(samples: int, shard: int) -> Shard:
        is_reading.set()
        assert may_read.wait(LIMIT_S)
        return shard_of(samples, shard)

    with prefetcher(read) as made:
        made.expect([(0, (0, 1, 2))])
        assert is_reading.wait(LIMIT_S)
        closing = threading.Thread(target=made.close)
        closing.start()
        may_read.set()
        closing.join(LIMIT_S)
        assert not closing.is_alive() and made.num_held == 0


def test_nothing_is_kept_of_what_was_handed_out():
    def read(samples: int, shard: int) -> Shard:
        value = np.zeros(3)
        if shard == 1:
            raise ValueError
        return {"x": value}, np.ones(1, np.float32)

    gc.disable()
    try:
        with prefetcher(read) as made:
            made.expect([(0, (0, 1))])
            settle(made)
            held = weakref.ref(made.get(0, 0)[0]["x"])
            assert held() is None
            try:
                made.get(0, 1)
            except ValueError as error:
                traceback = error.__traceback__
                while traceback.tb_next:
                    traceback = traceback.tb_next
                held = weakref.ref(traceback.tb_frame.f_locals["value"])
                del traceback
            assert held() is None
    finally:
        gc.enable()


def test_a_negative_depth_is_refused():
    with pytest.raises(ValueError, match="depth = -1"):
        Prefetcher(shard_of, -1)
