"""Finding the first traceback in what a worker printed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from elastic_train.errors import as_utf8
from elastic_train.launch.tracebacks import first_traceback, first_traceback_in


def output_of(code: str) -> str:
    """What Python itself prints for `code`, with other output before and after."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
    return f"step 1\n{printed}\nlater\n"


def test_none() -> None:
    assert first_traceback_in("") == ""
    assert first_traceback_in("step 1\nKilled\n") == ""
    assert first_traceback_in("it says 'Traceback (most recent call last):' in the middle") == ""


def test_simple() -> None:
    found = first_traceback_in(output_of("def f():\n    raise ValueError('no')\nf()"))
    assert found.splitlines()[0] == "Traceback (most recent call last):"
    assert found.splitlines()[-1] == "ValueError: no"


@pytest.mark.parametrize("how", ["", " from error"])
def test_chained_to_the_last(how: str) -> None:
    text = output_of(f"try: 1 / 0\nexcept ZeroDivisionError as error: raise ValueError('a\\nb'){how}")
    found = first_traceback_in(text)
    assert "ZeroDivisionError: division by zero" in found
    assert found.endswith("ValueError: a\nb")


def test_the_first_of_two() -> None:
    text = output_of("import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\nint('x')")
    assert first_traceback_in(text).endswith("ZeroDivisionError: division by zero")


def test_message_of_an_inner_exception_may_hold_empty_lines() -> None:
    found = first_traceback_in(
        output_of("try: raise KeyError('k')\nexcept KeyError as e: raise RuntimeError('x\\n\\ny') from e")
    )
    assert found.endswith("RuntimeError: x")
    found = first_traceback_in(
        output_of("try: raise RuntimeError('x\\n\\ny')\nexcept RuntimeError as e: raise KeyError('k') from e")
    )
    assert found.endswith("KeyError: 'k'")


def test_exception_group() -> None:
    found = first_traceback_in(output_of("raise ExceptionGroup('g', [ValueError('a'), KeyError('b')])"))
    assert "ValueError: a" in found and "KeyError: 'b'" in found


def test_log_with_other_bytes(tmp_path: Path) -> None:
    log = tmp_path / "0-0.log"
    log.write_bytes(b"\xff\xfe\nTraceback (most recent call last):\n  File\nValueError: \xff\n")
    assert first_traceback(log).startswith("Traceback")


def test_text_that_utf8_cannot_hold_can_be_sent_and_written() -> None:
    assert as_utf8("no file a\udcff, ä") == "no file a\\udcff, ä"
