"""What people read on a terminal passes through here: a terminal takes some characters for orders.

Texts of user code, file names, events and checkpoints may hold any character, by accident or not.
"""

from __future__ import annotations

import re
from typing import TextIO

# All control characters but tab and newline, and what Python makes of bytes that are no UTF-8, which cannot be printed.
_ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def harmless(text: object) -> str:
    """`text` with whatever is more than a character to show written as Python writes it in a string. Tabs and newlines
    stay.

    >>> harmless("\\x1b[31mred\\x1b[0m\\tand a bell\\x07\\n")
    '\\\\x1b[31mred\\\\x1b[0m\\tand a bell\\\\x07\\n'
    """
    return _ORDERS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), str(text))


def say(text: object, stream: TextIO | None = None) -> None:
    """Prints `text`, made harmless, and a newline at once, to stdout or to `stream`."""
    print(harmless(text), file=stream, flush=True)
