"""The first Python traceback in a worker's log."""

from __future__ import annotations

import re
from pathlib import Path

MAX_LOG_BYTES = 4 << 20
"""How far into a log a traceback is looked for. The first one matters, and exits are reported quickly."""

MAX_MESSAGE_LINES = 40
"""How many lines of an exception's message are kept."""

_HEADER = re.compile(r"^[ |+]*(Exception Group )?Traceback \(most recent call last\):$")
_CONNECTORS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


def first_traceback(log: Path) -> str:
    """The first traceback in the file, or "" if there is none, see `first_traceback_in`.

    Raises:
      OSError: the log cannot be read.
    """
    with log.open("rb") as file:
        head = file.read(MAX_LOG_BYTES)
    return first_traceback_in(head.decode(errors="replace"))


def first_traceback_in(text: str) -> str:
    """The first traceback in `text`, from its header to the last line of the last exception chained to it.

    A message of several lines ends at the first empty line: beyond it a log gives no sign of its end.

    >>> first_traceback_in("hi\\nTraceback (most recent call last):\\n  File x\\nValueError: no\\n\\nbye\\n")
    'Traceback (most recent call last):\\n  File x\\nValueError: no'
    """
    if "Traceback (most recent call last):" not in text:
        return ""
    lines = text.splitlines()
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    if not headers:
        return ""
    last = headers[0]
    for header in headers[1:]:
        before = [line for line in lines[last:header] if line.strip()]
        if before[-1].strip(" |") not in _CONNECTORS:
            break
        last = header
    return "\n".join(lines[headers[0] : _end(lines, last)])


def _end(lines: list[str], header: int) -> int:
    """The number of the line after the traceback that begins at `header`."""
    end = header + 1
    while end < len(lines) and lines[end].startswith(" "):  # frames; in an exception group everything
        end += 1
    limit = min(len(lines), end + MAX_MESSAGE_LINES)
    while end < limit and lines[end].strip() and not _HEADER.match(lines[end]):
        end += 1
    return end
