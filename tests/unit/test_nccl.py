"""What is said when NCCL cannot be started ahead of time; that it can is shown by `tests/gpu`."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from elastic_train.membership import nccl

SYSTEM_ERROR = 2


class FakeFunction:
    def __init__(self, result: object) -> None:
        self.result, self.calls, self.restype = result, 0, None

    def __call__(self, *_: object) -> object:
        self.calls += 1
        return self.result


def fake_library(code: int) -> SimpleNamespace:
    return SimpleNamespace(
        ncclCommInitAll=FakeFunction(code),
        ncclCommDestroy=FakeFunction(0),
        ncclGetErrorString=FakeFunction(b"unhandled system error"),
    )


def test_the_communicator_is_let_go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    library = fake_library(0)
    monkeypatch.setattr(nccl, "_library", lambda: library)
    nccl.start_nccl()
    assert library.ncclCommInitAll.calls == library.ncclCommDestroy.calls == 1
    assert capsys.readouterr().err == ""


def test_a_failure_is_told_and_no_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    library = fake_library(SYSTEM_ERROR)
    monkeypatch.setattr(nccl, "_library", lambda: library)
    nccl.start_nccl()
    assert library.ncclCommDestroy.calls == 0
    assert "NCCL could not be started ahead of time: unhandled system error" in capsys.readouterr().err


def test_without_nccl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nowhere(*_: object, **__: object) -> ctypes.CDLL:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", nowhere)
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: None)
    nccl.start_nccl()
    assert "no libnccl.so.2 found" in capsys.readouterr().err
