"""Between the job and its workers: orders to strike, and the word of who has struck. Files in the run directory.

The job appends orders to `orders.jsonl`; workers read them at every place at which a fault may strike. Before a
worker carries one out it leaves a file in `struck/`, whole and for good at once: so it is on record even if the
worker dies from it, and one order strikes one worker.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from elastic_train.chaos.faults import Fault
from elastic_train.membership.group import Identity


@dataclass(frozen=True)
class Order:
    """A fault that is due from now on.

    Attributes:
      number: its number among all of the run.
      fault: what is to be done.
      alone: not by a worker that another order has struck in the same step; it waits for a later one.
    """

    number: int
    fault: Fault
    alone: bool = False


class Strike(NamedTuple):
    """An order that was carried out: by whom, after how many completed steps, and when (Unix time)."""

    number: int
    identity: Identity
    step: int
    time: float


class Orders:
    """The files, seen from either end.

    Args:
      path: `chaos/` in the run directory.
    """

    def __init__(self, path: Path) -> None:
        self._file, self._struck = path / "orders.jsonl", path / "struck"
        self._size = 0
        self._rest = ""
        self._orders: list[Order] = []

    # The job's end.

    def create(self) -> None:
        """Makes the directory; that of an earlier start of the run is kept, as `chaos.1` or so. Raises OSError."""
        directory = self._file.parent
        if directory.exists():
            number = 1
            while (kept := directory.with_name(f"{directory.name}.{number}")).exists():
                number += 1
            directory.rename(kept)
        self._struck.mkdir(parents=True)
        self._file.touch()

    def give(self, order: Order) -> None:
        """Tells the workers."""
        line = json.dumps({"number": order.number, "fault": order.fault.as_table(), "alone": order.alone})
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def strikes(self, known: Mapping[str, Strike]) -> dict[str, Strike]:
        """What was carried out and is not `known`, by the name of its file."""
        found = {}
        for path in sorted(self._struck.glob("*.json")):
            if path.name not in known:
                told = json.loads(path.read_text(encoding="utf-8"))
                found[path.name] = Strike(told["number"], Identity(*told["identity"]), told["step"], told["time"])
        return found

    # A worker's end.

    def read(self) -> list[Order]:
        """All orders so far. Costs one question to the kernel while there is nothing new."""
        size = os.stat(self._file).st_size
        if size != self._size:
            with self._file.open(encoding="utf-8") as file:
                file.seek(self._size)
                text = self._rest + file.read(size - self._size)
            self._size = size
            *lines, self._rest = text.split("\n")
            self._orders += [_order(json.loads(line)) for line in lines]
        return self._orders

    def claim(self, strike: Strike, name: str) -> bool:
        """Whether this worker is to strike: it is, if nobody has claimed `name` before."""
        path = self._struck / f"{name}.json"
        draft = self._struck / f".{name}-{strike.identity.node}"
        draft.write_text(json.dumps(strike._asdict()), encoding="utf-8")
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def is_claimed(self, name: str) -> bool:
        return (self._struck / f"{name}.json").exists()


def _order(told: Mapping[str, Any]) -> Order:
    return Order(told["number"], Fault(**told["fault"]), told["alone"])
