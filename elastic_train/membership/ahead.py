"""What is made ahead of time, in the background, for keys that may be asked for: programs for likely next members."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class Ahead(Generic[Key, Made]):
    """Makes one thing after the other, in a thread of its own. One other thread calls it.

    Nothing depends on it: whoever takes what is not there makes it.

    Args:
      make: gives the thing for a key; may take long.
    """

    def __init__(self, make: Callable[[Key], Made]) -> None:
        self._make = make
        # Guards all below, and tells of changes.
        self._changed = threading.Condition()
        self._wanted: tuple[Key, ...] = ()
        self._made: dict[Key, Made] = {}
        self._failed: set[Key] = set()
        self._making: Key | None = None
        self._thread: threading.Thread | None = None

    def want(self, keys: Sequence[Key]) -> None:
        """Says what may be asked for, the most urgent first, in place of all that was said before. What was made for
        another key is let go."""
        with self._changed:
            self._wanted = tuple(keys)
            self._made = {key: made for key, made in self._made.items() if key in self._wanted}
            self._failed &= set(self._wanted)
            self._changed.notify_all()
            if self._thread is None and keys:
                self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
                self._thread.start()

    def settled(self, key: Key) -> bool:
        """Whether the thing is there, or will not be, since making it failed."""
        with self._changed:
            return key in self._made or key in self._failed

    def take(self, key: Key) -> Made | None:
        """The thing, if it is there, or as soon as it is if it is just being made. All else is let go."""
        with self._changed:
            while self._making == key and key in self._wanted:
                self._changed.wait()  # as long as making it takes, which the caller would have to wait as well
            made = self._made.get(key)
            self._wanted, self._made, self._failed = (), {}, set()
            return made

    def _run(self) -> None:
        while True:
            with self._changed:
                while (key := self._next()) is None:
                    self._changed.wait()  # a daemon thread: ends with the process
                self._making = key
            made, error = None, ""
            try:
                made = self._make(key)
            except Exception:
                # Whoever needs it makes it again, and meets the error where it can be dealt with.
                error = traceback.format_exc()
                print(f"elastic_train: could not be compiled ahead of time: {error}", file=sys.stderr, flush=True)
            with self._changed:
                self._making = None
                if key in self._wanted and made is not None:
                    self._made[key] = made
                elif error:
                    self._failed.add(key)
                self._changed.notify_all()
            del made

    def _next(self) -> Key | None:
        return next((key for key in self._wanted if key not in self._made and key not in self._failed), None)
