"""Carries out what the roster asks for: messages, tombstones, timers, events. From the event loop's thread only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from elastic_train.coordinator import control_pb2, wire
from elastic_train.coordinator.commits import Records
from elastic_train.coordinator.connections import Connections
from elastic_train.coordinator.jax_service import JaxService
from elastic_train.coordinator.loop import EventLoop
from elastic_train.coordinator.watch import Note
from elastic_train.membership import roster_events as r
from elastic_train.membership.group import MAX_JOINERS_PER_STEP, Identity, View

SECONDS_PER_NEWS = 2e-4
"""What to tell one member of joiners may take. While hundreds get ready one after the other, all members are told once
in that time for each: the list replaces the one before, and a step admits only so many."""


class Actions:
    """Carries out actions, in order.

    Args:
      connections, records, jax, loop: as in `service.Coordinator`.
      view: the roster's, as it is after the actions.
      note: an event, and a line for the display.
      timer_over, end, next_generation: called with what the roster asks the coordinator itself for.
    """

    def __init__(
        self,
        connections: Connections,
        records: Records,
        jax: JaxService,
        loop: EventLoop,
        *,
        view: Callable[[], View],
        note: Note,
        timer_over: Callable[[str], None],
        end: Callable[[r.End], None],
        next_generation: Callable[[str], None],
    ) -> None:
        self._connections, self._records, self._jax, self._loop = connections, records, jax, loop
        self._view, self._note = view, note
        self._timer_over, self._end, self._next_generation = timer_over, end, next_generation
        self._untold: r.Announce | None = None

    def carry_out(self, actions: Iterable[r.Action], source: Mapping[str, object]) -> None:
        """`source` is added to the notes among them."""
        for told, together in itertools.groupby(actions, _told_of_deaths):
            if told is None:
                for action in together:
                    self._carry_out(action, source)
            else:
                self._abort(told, [action.dead for action in together if isinstance(action, r.Abort)])

    def _carry_out(self, action: r.Action, source: Mapping[str, object]) -> None:
        tell = self._connections.tell
        match action:
            case r.Tombstone(identity):
                self._bury(identity)
            case r.Announce():
                self._untold = action
                if not self._loop.waits_for("announce"):
                    self._announce()
            case r.Form(view, nodes):
                tell(nodes, control_pb2.ToWorker(form=control_pb2.Form(view=wire.view_message(view))))
            case r.AskLeave(identity):
                tell((identity.node,), control_pb2.ToWorker(leave=control_pb2.Leave()))
            case r.Evict(identity, reason) | r.RefuseWorker(identity, reason):
                self._connections.evict(identity, reason)
            case r.AskStop(nodes, now, reason):
                tell(nodes, control_pb2.ToWorker(stop=control_pb2.Stop(now=now, reason=reason)))
            case r.Start() | r.Kill() | r.Refuse():
                self._connections.tell_agent(action.agent, _agent_message(action))
            case r.SetTimer(name, delay_s):
                self._loop.after(f"roster {name}", delay_s, lambda: self._timer_over(name))
            case r.Note(event, fields, show):
                self._note(event, show, **{**source, **fields})
            case r.End():
                self._end(action)
            case r.NextGeneration(reason):
                self._next_generation(reason)
            case _:
                raise TypeError(f"the roster asked for something unknown: {action!r}")

    def _abort(self, told: tuple[int, ...], dead: Sequence[Identity]) -> None:
        """One message for all who die at once, as when a host is lost."""
        abort = control_pb2.Abort(nodes=[identity.node for identity in dead])
        self._connections.tell(told, control_pb2.ToWorker(abort=abort))
        for identity in dead:
            self._records.event("abort_sent", **identity._asdict(), told=list(told))

    def _announce(self) -> None:
        news, self._untold = self._untold, None
        if news is None:
            return
        tell, joiners = news.tell, news.joiners
        candidates = control_pb2.Candidates(joiners=wire.identity_messages(joiners))
        self._connections.tell(tell, control_pb2.ToWorker(candidates=candidates))
        if joiners:
            next_ones = joiners[:MAX_JOINERS_PER_STEP]
            view = wire.view_message(self._view().next((), next_ones))
            expect = control_pb2.ToWorker(expect=control_pb2.Expect(view=view))
            self._connections.tell((joiner.node for joiner in next_ones), expect)
        self._loop.after("announce", SECONDS_PER_NEWS * len(tell), self._announce)

    def _bury(self, identity: Identity) -> None:
        try:
            self._jax.tombstone(identity.node)
        except RuntimeError as error:
            # Members still learn of the death from the Abort, and the barrier from JAX's heartbeat.
            self._note(
                "tombstone_failed",
                f"JAX's service would not let go of slot {identity.slot}'s dead worker, node"
                f" {identity.node}: {error}. The others wait until its heartbeat times out.",
                **identity._asdict(),
                error=str(error),
            )


def _told_of_deaths(action: r.Action) -> tuple[int, ...] | None:
    """Who is told of a death; None of any other action."""
    return action.tell if isinstance(action, r.Abort) else None


def _agent_message(action: r.Start | r.Kill | r.Refuse) -> control_pb2.ToAgent:
    match action:
        case r.Start(_, identity, restore):
            start = control_pb2.StartWorker(identity=wire.identity_message(identity), restore=restore)
            return control_pb2.ToAgent(start=start)
        case r.Kill(_, identity, reason, dump_stacks):
            kill = control_pb2.KillWorker(
                identity=wire.identity_message(identity), reason=reason, dump_stacks=dump_stacks
            )
            return control_pb2.ToAgent(kill=kill)
        case r.Refuse(_, slots, reason):
            return control_pb2.ToAgent(refused=control_pb2.SlotsRefused(slots=slots, reason=reason))
