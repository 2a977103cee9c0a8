"""The members, and how to run one block with them: JAX's `live_devices`, and the verdict on what it meant."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, Protocol

import numpy as np

from elastic_train.config import FaultConfig
from elastic_train.errors import EXIT_REJOIN
from elastic_train.jax_private import BarrierRefused, BarrierTrace, LiveDevices, fail_gloo_meeting
from elastic_train.membership.abort_cpu import GlooSockets
from elastic_train.membership.ahead import Ahead
from elastic_train.membership.group import (
    Agreed,
    Commit,
    Fenced,
    Identity,
    Shrink,
    View,
    Vote,
    judge,
    likely,
)
from elastic_train.membership.programs import WIDTH, Compiled, Programs
from elastic_train.state import Device
from elastic_train.step.flat import Layout
from elastic_train.step.reduce import DamagedError, Exchange, Gather, Spread

SETTLED_STEPS = 10
"""After so many steps of an epoch the programs for the next one are compiled."""

ADMISSION_WAIT_S = 5.0
"""How long candidates wait at most for the members to compile what their epoch needs."""


class News(Protocol):
    """What a member hears from the coordinator (`coordinator.client.Link`)."""

    def phase(self, name: str, step: int) -> None: ...
    def wait_dead(self, nodes: frozenset[int], timeout: float) -> bool: ...


class Trace(BarrierTrace, Protocol):
    """Where a member writes what it does at barriers (`telemetry.blocks.BlockTrace`)."""

    def begin(self, view: View) -> None: ...
    def concluded(self, verdict: str, following: View | None, step: int | None) -> None: ...


class Untraced:
    """Writes nothing."""

    def begin(self, view: View) -> None:
        pass

    def enter(self) -> None:
        pass

    def exit(self, nodes: Collection[int] | None) -> None:
        pass

    def concluded(self, verdict: str, following: View | None, step: int | None) -> None:
        pass


class MembersGone(Exception):
    """Raised inside a block that cannot succeed, to get to its exit barrier without delay."""


class Block(Protocol):
    """Something that runs a body between two barriers; see `jax_private.LiveDevices`."""

    @property
    def incarnations(self) -> dict[int, int]: ...
    def run(self, body: Callable[[dict[int, int]], Any]) -> Any: ...


class Alone:
    """The block of a plain process without a launcher: nobody else, no barrier."""

    @property
    def incarnations(self) -> dict[int, int]:
        return {0: 0}

    def run(self, body: Callable[[dict[int, int]], Any]) -> Any:
        return body(self.incarnations)


class Group:
    """The current members. One thread calls everything but `on_dead`.

    Args:
      me: this worker's identity.
      devices: one device per node id.
      layout: of one partial sum, for the exchange program.
      num_shards: V for a number of members.
      news: what the coordinator tells.
      faults: time limits.
      sockets: this worker's gloo sockets on CPU; None where XLA cancels collectives itself.
      make_block: the block for a list of devices.
      trace: told of every barrier, and of what is concluded from it.

    Attributes:
      view: the members; nobody before `prepare`.
      plan, meeting, gather: of this epoch: who sums what, the members' devices, and the gather for comparing states.
    """

    def __init__(
        self,
        me: Identity,
        devices: Mapping[int, Device],
        layout: Layout,
        num_shards: Callable[[int], int],
        news: News,
        faults: FaultConfig,
        sockets: GlooSockets | None,
        make_block: Callable[[list[Device], BarrierTrace], Block] = LiveDevices,
        trace: Trace | None = None,
    ) -> None:
        self.me = me
        self.view = View(0, ())
        self._devices, self._layout, self._num_shards = devices, layout, num_shards
        self._max_skips = faults.max_skipped_steps if faults.nonfinite == "skip" else 0
        self._news, self._faults, self._sockets, self._make_block = news, faults, sockets, make_block
        self._trace = trace or Untraced()
        self._dead: set[int] = set()
        self._in_block = threading.Event()
        self._met = False
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._ahead = Ahead(self._make_ahead)
        self._foreseen: tuple[tuple[int, ...], bool] = (), False
        self._num_commits, self._stripe, self._asked_at = 0, 0, 0.0

    @property
    def rank(self) -> int:
        return self.view.rank(self.me.node)

    @property
    def is_first(self) -> bool:
        """Whether this member speaks for the group: it reports steps and asks for admissions."""
        return self.rank == 0

    def prepare(self, view: View, stripe: int | None = None) -> None:
        """Compiles the programs that cross `view`'s members. Nothing is sent: peers may be minutes apart here.

        Only the gather, which is used first, is waited for. The others are compiled while the members meet.

        Args:
          view: the members of the epoch that begins.
          stripe: size of the stripes in bytes, if a transfer of the state is to be expected.
        """
        self.view, self._stripe = view, stripe or self._stripe
        self._foreseen, self._num_commits = (view.nodes, False), 0
        self._programs = self._ahead.take(view.nodes) or self._programs_of(view.nodes)
        self._programs.start(self._compiler, stripe)
        self.plan, self.meeting = self._programs.plan, self._programs.meeting
        self.gather = self.gather_of(WIDTH)
        self._trace.begin(view)
        self._block = self._make_block([self._devices[node] for node in view.nodes], self._trace)
        self._met = False

    def _programs_of(self, nodes: Sequence[int]) -> Programs:
        devices, mine = [self._devices[node] for node in nodes], self._devices[self.me.node]
        return Programs(devices, mine, self._num_shards(len(devices)), self._layout)

    def gather_of(self, width: int) -> Gather:
        """The gather of rows of this width; compiled once in an epoch."""
        return self._programs.gather_of(width)

    def finish_compiling(self) -> None:
        """Waits for what `prepare` compiles in the background."""
        self._programs.wait()

    @property
    def exchange(self) -> Exchange:
        """The step's exchange between the members of this epoch."""
        return self._compiled(self._programs.exchange)

    def spread(self, stripe: int) -> Spread:
        """The transfer of stripes between the members of this epoch."""
        return self._compiled(self._programs.spread(self._compiler, stripe))

    def foresee(self, candidates: Sequence[Identity]) -> bool:
        """Has the programs for the likely next members compiled in the background. Call it before each step.

        Returns whether the candidates may be admitted: what their epoch needs is compiled here, or that takes too long.
        """
        joined = self.view.next((), candidates).nodes if candidates else self.view.nodes
        is_settled = self._num_commits >= SETTLED_STEPS
        if (joined, is_settled) != self._foreseen:
            self._foreseen = joined, is_settled
            limit = self._faults.compile_ahead
            self._ahead.want(likely(self.view.nodes, self.me.node, joined, is_settled, limit))
            self._asked_at = time.monotonic()
        if joined == self.view.nodes or not self._faults.compile_ahead:
            return True
        return self._ahead.settled(joined) or time.monotonic() - self._asked_at > ADMISSION_WAIT_S

    def expect(self, view: View) -> None:
        """Has compiled what `view` needs, in the background. For a joiner, from any thread, before its first view."""
        if self._faults.compile_ahead and self.me in view.members:
            self._ahead.want([view.nodes])

    def _make_ahead(self, nodes: tuple[int, ...]) -> Programs:
        programs = self._programs_of(nodes)
        programs.compile(self._stripe if set(nodes) - set(self.view.nodes) else None)
        return programs

    def _compiled(self, program: Future[Compiled]) -> Compiled:
        if not program.done():
            self._news.phase("compile", -1)
        return program.result()

    def attempt(self, body: Callable[[], tuple[Any, np.ndarray]], step: int | None = None) -> tuple[Agreed, Any]:
        """Runs `body` in a block with all members.

        Args:
          body: returns (result, rows); each row begins with a member's control vector. It must block until the rows
            are there, and must not raise for reasons of the user's code (vote instead).
          step: the step that is committed if the verdict is so; None if the block is for something else.

        Returns:
          The verdict, and the result (None unless everybody took part).

        Raises BarrierRefused: this worker was declared dead.
        """
        before: dict[int, int] = {}
        outcome: list[Any] = []
        # All members count alike: they run the same blocks.
        self.meeting.block = self.view.epoch, self.meeting.block[1] + 1

        def guarded(incarnations: dict[int, int]) -> None:
            before.update(incarnations)
            nodes = set(self.view.nodes)
            if set(incarnations) != nodes or self._dead & nodes:
                raise MembersGone
            try:
                result, rows = self._first_meeting(body)
                outcome.extend((result, [Vote.unpack(row) for row in rows]))
            except Exception as error:
                if len(nodes) > 1:
                    self._await_a_death(error)
                raise
            except BaseException as error:
                # Nobody may wait at the barrier for members that wait for this one in the exchange.
                if len(nodes) > 1:
                    print(traceback.format_exc(), file=sys.stderr, flush=True)
                    leave(f"slot {self.me.slot}: {error!r} cannot be voted on")
                raise
            finally:
                self._news.phase("barrier", -1)

        self._in_block.set()
        error = None
        try:
            self._block.run(guarded)
        except BarrierRefused:
            self._trace.concluded("fenced", None, step)
            raise
        except Exception as raised:
            error = raised
        finally:
            self._in_block.clear()
        try:
            return self._conclude(before, outcome, error, step)
        finally:
            error = None  # its traceback leads here, and to all that the attempt has computed: both would stay

    def _conclude(
        self, before: dict[int, int], outcome: list[Any], error: Exception | None, step: int | None
    ) -> tuple[Agreed, Any]:
        """What follows from the two barriers and from what the body gave or raised; see `attempt`."""
        votes = outcome[1] if outcome else None
        if error is not None and len(self.view.members) == 1:
            raise error  # nobody else can be the reason
        verdict = judge(self.view, self.me.node, before, self._block.incarnations, votes, self._max_skips)
        if isinstance(verdict, Fenced):
            self._trace.concluded("fenced", None, step)
            leave(f"slot {self.me.slot}: the others go on without this worker (node {self.me.node})")
        if error is not None and not isinstance(verdict, Shrink):
            raise error
        self._num_commits += isinstance(verdict, Commit) and step is not None
        self._trace.concluded(type(verdict).__name__.lower(), getattr(verdict, "view", None), step)
        return verdict, outcome[0] if outcome else None

    def _first_meeting(self, body: Callable[[], Any]) -> Any:
        if self._met or self._sockets is None or len(self.view.members) == 1:
            return body()
        with self._sockets.forming(self.view.nodes):
            result = body()
        self._met = True
        return result

    def _await_a_death(self, error: Exception) -> None:
        """My exchange failed, most likely because a member died. Returns once the coordinator has said so.

        Until then this worker does not arrive at the barrier, so nobody can commit. If nobody has died, the fault
        is here (or everywhere): this worker leaves, which the others see as a death. Members wait for different
        times, so that not all of them leave if all failed.
        """
        if isinstance(error, DamagedError):
            print(f"elastic_train: {error}; waiting to hear who died", file=sys.stderr, flush=True)
        self._news.phase("doubt", -1)
        limit_s = self._faults.doubt_timeout_s + self.rank
        if not self._news.wait_dead(frozenset(self.view.nodes), limit_s):
            leave(f"slot {self.me.slot}: an exchange failed here, and no member died within {limit_s:g} s: {error!r}")

    def on_dead(self, node: int) -> None:
        """The coordinator says that `node` is dead. Called from the control plane's thread, at once."""
        self._dead.add(node)
        if self._sockets is not None:
            self._sockets.abort(node)
            if node in self.view.nodes and self._in_block.is_set():
                threading.Thread(target=self._keep_aborting, args=(node,), name="abort", daemon=True).start()

    def _keep_aborting(self, node: int) -> None:
        """A clique that is just being formed opens sockets one after the other: close them as they come.

        Members also wait for the address of the dead one there, which it may not have told before it died.
        """
        assert self._sockets is not None
        view, has_failed = self.view, False
        ids = [self._devices[member].id for member in view.nodes]
        while view is self.view and self._in_block.is_set():
            self._sockets.abort(node)
            if self._sockets.is_forming and not has_failed:
                has_failed = fail_gloo_meeting(ids, view.rank(node), view.rank(self.me.node))
            time.sleep(0.02)


def leave(reason: str) -> NoReturn:
    """Ends this process at once; the agent starts it again as new."""
    print(f"elastic_train: leaving: {reason}", file=sys.stderr, flush=True)
    os._exit(EXIT_REJOIN)
