"""The programs that cross the members of one list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import TypeVar

from elastic_train.membership.group import VOTE_SIZE
from elastic_train.membership.reconcile import STANDING_SIZE
from elastic_train.state import Device
from elastic_train.step.flat import Layout
from elastic_train.step.plan import finish
from elastic_train.step.reduce import Exchange, Gather, Meeting, Spread

Compiled = TypeVar("Compiled")
WIDTH = VOTE_SIZE + STANDING_SIZE
"""Of the rows that members gather when an epoch begins."""


class Programs:
    """What a list of members needs, compiled in the background or at once. Nothing is sent.

    Args:
      devices: one device per member, in the view's order.
      mine: this worker's device.
      num_shards: V for this number of members.
      layout: of one partial sum.

    Attributes:
      plan: who sums what.
      meeting: the members' devices.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        mine: Device,
        num_shards: int,
        layout: Layout,
    ) -> None:
        self.plan = finish(num_shards, len(devices))
        self.meeting = Meeting(devices, mine)
        self._make_exchange: Callable[[], Exchange] = lambda: Exchange(self.meeting, self.plan, layout)
        self._exchange: Future[Exchange] | None = None
        self._spread: Future[Spread] | None = None
        self._gathers: dict[int, Gather] = {}

    def compile(self, stripe: int | None) -> None:
        """Compiles all of it now. `stripe`: as for `start`."""
        self.gather_of(WIDTH)
        if stripe:
            self._spread = _done(Spread(self.meeting, stripe))
        self._exchange = _done(self._make_exchange())

    def start(self, compiler: Executor, stripe: int | None) -> None:
        """Has compiled by `compiler` what is not yet, but for gathers.

        Args:
          stripe: size of the stripes in bytes, if a transfer of the state is to be expected.
        """
        if stripe:
            self.spread(compiler, stripe)
        if self._exchange is None:
            self._exchange = compiler.submit(self._make_exchange)

    def gather_of(self, width: int) -> Gather:
        """The gather of rows of this width; compiled once."""
        if width not in self._gathers:
            self._gathers[width] = Gather(self.meeting, width)
        return self._gathers[width]

    @property
    def exchange(self) -> Future[Exchange]:
        """The step's exchange, once it was started."""
        assert self._exchange is not None
        return self._exchange

    def spread(self, compiler: Executor, stripe: int) -> Future[Spread]:
        """The transfer of stripes of this size."""
        if self._spread is None:
            self._spread = compiler.submit(Spread, self.meeting, stripe)
        return self._spread

    def wait(self) -> None:
        """Waits for what was started."""
        for program in (self._spread, self._exchange):
            if program is not None:
                program.result()


def _done(value: Compiled) -> Future[Compiled]:
    future: Future[Compiled] = Future()
    future.set_result(value)
    return future
