"""Who writes compiled programs, and who takes over from a writer that is gone."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from elastic_train import jax_private, member
from elastic_train.member import CompiledPrograms
from elastic_train.membership.group import Identity

PATIENCE_S = 20.0


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that were made to write."""
    found: list[str] = []
    monkeypatch.setattr(jax_private, "write_compilation_cache", lambda: found.append(threading.current_thread().name))
    monkeypatch.setattr(member.jax.config, "update", lambda *_: None)
    return found


def programs(directory: Path, slot: int) -> CompiledPrograms:
    return CompiledPrograms(directory, Identity(slot, 0, slot + 1))


def waiting(each: CompiledPrograms, name: str) -> threading.Thread:
    thread = threading.Thread(target=each.share, kwargs={"wait": True}, name=name, daemon=True)
    thread.start()
    return thread


def test_one_writes_and_the_others_wait_until_it_has_compiled(tmp_path: Path, writers: list[str]) -> None:
    first = programs(tmp_path, 2)
    first.share(wait=True)
    second = programs(tmp_path, 0)
    reader = waiting(second, "second")
    reader.join(0.3)
    assert reader.is_alive() and second._writer() == "slot 2's worker"
    first.complete()
    reader.join(PATIENCE_S)
    assert not reader.is_alive() and writers == ["MainThread"]
    second.complete()


def test_another_slot_takes_over_from_a_writer_that_is_gone(tmp_path: Path, writers: list[str]) -> None:
    first = programs(tmp_path, 0)
    first.share(wait=True)
    second = programs(tmp_path, 1)
    reader = waiting(second, "second")
    os.close(first._lock)  # as the kernel does when a process is gone
    reader.join(PATIENCE_S)
    assert not reader.is_alive() and writers == ["MainThread", "second"]
    third = waiting(programs(tmp_path, 2), "third")
    second.complete()
    third.join(PATIENCE_S)
    assert not third.is_alive() and writers == ["MainThread", "second"]


def test_nobody_waits_unless_all_must_run_the_same(tmp_path: Path, writers: list[str]) -> None:
    first, second = programs(tmp_path, 0), programs(tmp_path, 1)
    first.share(wait=False)
    second.share(wait=False)
    assert writers == ["MainThread"]


def test_without_locks_slot_0_writes(tmp_path: Path, writers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    programs(tmp_path, 1).share(wait=False)
    assert writers == []
    programs(tmp_path, 0).share(wait=True)
    assert writers == ["MainThread"]
