"""A job without processes: agents, workers and members around the roster, driven by a random schedule.

Messages wait in one queue per stream and direction, and any queue may be served next. Members use
`group.judge`, `agree` and `View` as the real ones do, around an idealised `live_devices` block: it ends when every
node of the view that has no tombstone has entered it, and, if somebody is dead, when everyone has been told
(a collective does not end by itself). Its outcome is fixed at one moment, but each member takes it over at a
time of its own. What each member does at its barriers is kept, and checked by `check_barriers`.

A state is a number that follows from the one before, by the step. It may be damaged (`flips`), gradients may be not
finite, and joiners may run other code (`edits`).
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_train.membership import execution, semantics
from elastic_train.membership.group import Commit, Differ, Identity, Retry, Shrink, Verdict, View, Vote, judge
from elastic_train.membership.reconcile import Standing, agree
from elastic_train.membership.roster import Limits, Roster, WorkerState, apply, refuse_drain
from elastic_train.membership.roster_events import (
    Abort,
    Action,
    AgentJoined,
    AgentLeaving,
    AgentLost,
    Announce,
    AskLeave,
    AskStop,
    DrainAsked,
    End,
    Event,
    Evict,
    Exited,
    Failed,
    Finished,
    Form,
    Hello,
    Kill,
    Note,
    Ready,
    RefuseWorker,
    ResizeAsked,
    SetTimer,
    Silent,
    Start,
    Started,
    Stepped,
    StopAsked,
    TimerOver,
    Tombstone,
    Unfit,
    Viewed,
    WorkerEvent,
)
from elastic_train.membership.roster_generations import refuse_resize

NO_GOAL = 10**9
ORDERS = ["drain", "resize", "resize", "send away"]


@dataclass
class Process:
    """One worker process, as it really is."""

    identity: Identity
    agent: str
    alive: bool = True
    phase: str = "starting"  # then warming, waiting, member, finished
    view: View | None = None
    told_dead: set[int] = field(default_factory=set)  # nodes of the present view
    outcome: tuple[str, View] | None = None  # of the block that has ended, not taken over yet
    answer: frozenset[int] = frozenset()  # the nodes that the barrier of that block has named
    barriers: list[execution.Event] = field(default_factory=list)
    num_blocks: int = 0  # of the present view
    candidates: tuple[Identity, ...] = ()
    asked_to_stop: bool = False
    wants_to_leave: bool = False
    drained: bool = False  # it was asked to leave, since its slot is to be empty
    doomed: bool = False  # fenced, or left: it exits next
    step: int = 0
    state: int = 0
    has_state: bool = False
    bad: bool = False  # its next gradient is not finite
    nonfinite: int = 0  # how many times in a row, as it knows
    schema: dict[str, str] = field(default_factory=dict)


class Cluster:
    """The roster, its surroundings, and the invariants, which are checked at every event."""

    def __init__(self, seed: int, limits: Limits, agents: dict[str, tuple[int, ...]]) -> None:
        self.random = random.Random(seed)
        self.roster = Roster(limits)
        self.agents = agents
        self.connected: set[str] = set()
        self.sent_away: set[str] = set()  # agents that were asked to leave
        self.returning: set[str] = set()  # lost agents whose loss was reported: they may join again
        self.processes: dict[int, Process] = {}
        self.tombstones: dict[int, int] = {}  # by node: after how many moves
        self.num_moves = 0
        self.up: dict[int | str, deque[Event]] = defaultdict(deque)
        self.down: dict[int | str, deque[Action]] = defaultdict(deque)
        self.timers: dict[str, float] = {}
        self.clock_s = 0.0
        self.goal = NO_GOAL
        self.end: End | None = None
        self.fails_at_start = False
        self.flips = self.edits = self.orders = False  # whether such faults occur, and orders are given
        self.max_skips = self.random.choice([0, 10**6])
        self.max_retries = 10**6
        self.schema: dict[str, str] = {"code/recipe.py": "as before"}
        self.num_differences = self.num_skipped = self.num_retried = 0
        self.log: list[object] = []
        self.largest_view_since_faults = 0
        for agent in agents:
            self.connect(agent)

    # The coordinator --------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        before = self.roster
        self.roster, actions = apply(before, event)
        self.log.append(event)
        if isinstance(event, WorkerEvent) and not before.is_living(event.identity):
            # What old incarnations say changes nothing, whatever it is and whenever it comes.
            assert (before.view, before.workers, before.agents) == (
                self.roster.view,
                self.roster.workers,
                self.roster.agents,
            )
            assert (before.finishing, before.stopping) == (self.roster.finishing, self.roster.stopping)
        assert before.view == self.roster.view or before.view.epoch < self.roster.view.epoch
        assert not (before.ended and actions)
        for action in actions:
            if not isinstance(action, Note):
                self.log.append(action)
                self.check(action, before, event)
                self.carry_out(action)
        if self.roster.members and self.roster.agents:
            self.largest_view_since_faults = max(self.largest_view_since_faults, len(self.roster.members))

    def check(self, action: Action, before: Roster, event: Event) -> None:
        after = self.roster
        member_nodes = {worker.identity.node for worker in after.members}
        assert self.end is None, "nothing follows the end"
        match action:
            case Start(agent, identity):
                assert agent in after.agents
                assert identity.node not in self.processes and 0 < identity.node < after.limits.num_nodes
                assert not (before.stopping or before.finishing or before.ended)
                for process in self.processes.values():
                    if process.identity.slot == identity.slot:
                        assert process.identity.incarnation < identity.incarnation
                        assert process.identity.node in self.tombstones
                        assert not (process.alive and process.agent in self.connected), "two living in a slot"
            case Tombstone(identity):
                process = self.processes.get(identity.node)
                lost = process is not None and process.agent not in after.agents
                assert process is None or lost or not process.alive, "the dead must be dead first"
            case Abort(dead, tell):
                assert dead.node in self.tombstones
                living = {w.identity.node for w in after.living if w.state is WorkerState.MEMBER}
                assert tell and set(tell) <= living
            case Announce(tell, joiners):
                assert set(tell) == member_nodes
                assert all(after.is_living(joiner) for joiner in joiners)
                assert self.schemas((*tell, *(joiner.node for joiner in joiners))) <= 1, "all candidates run the same"
                assert not (joiners and after.closing)
            case Form(view, tell):
                assert tell and set(tell) <= member_nodes & set(view.nodes)
                assert view == after.view and view.epoch > before.view.epoch
                if not isinstance(event, Viewed):
                    # The event may be the death of the last member.
                    assert not any(after.is_living(member.identity) for member in before.members)
                    assert len(view.members) >= after.limits.min_workers
                    assert all(after.is_living(member) for member in view.members)
                assert self.schemas(view.nodes) == 1, "all members run the same"
            case Evict(identity, _):
                assert not after.is_living(identity)
            case RefuseWorker(identity, _):
                assert after.is_living(identity) and identity not in after.view.members
            case Kill(_, identity, _):
                assert after.is_living(identity)

    def carry_out(self, action: Action) -> None:
        match action:
            case Start(agent) | Kill(agent):
                if agent in self.connected:
                    self.down[agent].append(action)
            case Tombstone(identity):
                self.tombstones.setdefault(identity.node, self.num_moves)
            case Abort(_, tell) | Announce(tell) | Form(_, tell) | AskStop(tell):
                for node in tell:
                    self.down[node].append(action)
            case Evict(identity) | RefuseWorker(identity) | AskLeave(identity):
                self.down[identity.node].append(action)
            case SetTimer(name, delay_s):
                self.timers[name] = self.clock_s + delay_s
            case End():
                self.end = action

    # Agents and workers -----------------------------------------------------------------------------------

    def connect(self, agent: str) -> None:
        """An agent that comes back has ended what it had started before."""
        for process in self.processes.values():
            if process.agent == agent and process.alive:
                self.end_process(process)
        self.returning.discard(agent)
        self.sent_away.discard(agent)
        self.connected.add(agent)
        self.up[agent] = deque([AgentJoined(agent, self.agents[agent])])
        self.down[agent] = deque()

    def end_process(self, process: Process) -> None:
        process.alive = False
        process.barriers.append(execution.Fail(self.num_moves))

    def die(self, process: Process, exit_code: int, traceback: str = "") -> None:
        self.end_process(process)
        if process.agent in self.connected:
            self.up[process.agent].append(Exited(process.identity, exit_code, traceback))

    def agent_does(self, agent: str, action: Action) -> None:
        if isinstance(action, Start):
            node = action.identity.node
            self.processes[node] = Process(action.identity, agent, schema=self.schema)
            self.up[agent].append(Started(action.identity, pid=1000 + node))
        elif isinstance(action, Kill):
            process = self.processes[action.identity.node]
            if process.alive:
                self.die(process, -9)

    def worker_hears(self, process: Process, action: Action) -> None:
        match action:
            case Abort(dead, _):
                if process.view is not None and dead.node in process.view.nodes:
                    process.told_dead.add(dead.node)
            case Announce(_, joiners):
                process.candidates = joiners
            case Form(view, _):
                assert process.phase == "waiting" and process.identity in view.members
                process.phase, process.view = "member", view
                self.enter(process)
            case AskLeave():
                process.drained = True
            case AskStop(_, now, _) if not now:
                process.asked_to_stop = True
            case AskStop() | Evict() | RefuseWorker():
                self.die(process, 0)

    def enter(self, process: Process) -> None:
        """It is in the next block of its view, and will arrive at its barrier."""
        assert process.view is not None
        barrier = (process.view, process.num_blocks)
        process.num_blocks += 1
        process.barriers.append(execution.Enter(self.num_moves, frozenset(process.view.nodes), barrier))

    def living(self, *phases: str) -> list[Process]:
        return [p for p in self.processes.values() if p.alive and p.phase in phases]

    # Moves: each returns whether there was anything to do -------------------------------------------------

    def serve_up(self) -> bool:
        queues = [queue for queue in self.up.values() if queue]
        if queues:
            event = self.random.choice(queues).popleft()
            self.feed(event)
            if isinstance(event, AgentLost):
                self.returning.add(event.agent)
        return bool(queues)

    def serve_down(self) -> bool:
        keys = [key for key, queue in self.down.items() if queue]
        if not keys:
            return False
        key = self.random.choice(keys)
        action = self.down[key].popleft()
        if isinstance(key, str):
            self.agent_does(key, action)
        elif self.processes[key].alive:
            self.worker_hears(self.processes[key], action)
        return True

    def warm_up(self) -> bool:
        waiting = self.living("starting", "warming")
        if not waiting:
            return False
        process = self.random.choice(waiting)
        queue = self.up[process.identity.node]
        if process.phase == "starting":
            process.phase = "warming"
            queue.append(Hello(process.identity, 1000 + process.identity.node, "host"))
        elif self.fails_at_start:
            queue.append(Failed(process.identity, 0, True, True, f"Traceback of slot {process.identity.slot}"))
            self.die(process, 1)
        else:
            process.phase = "waiting"
            queue.append(Ready(process.identity, process.schema))
        return True

    def end_block(self) -> bool:
        views = {p.view for p in self.living("member") if p.view is not None and p.outcome is None}
        due = [view for view in sorted(views, key=lambda view: view.epoch) if self.block_is_over(view)]
        if due:
            self.decide(self.random.choice(due))
        return bool(due)

    def block_is_over(self, view: View) -> bool:
        inside = [self.processes[node] for node in view.nodes if node not in self.tombstones]
        arrived = all(p.alive and p.view == view and p.outcome is None for p in inside)
        anyone_dead = len(inside) < len(view.members)
        return bool(inside) and arrived and (not anyone_dead or all(p.told_dead for p in inside))

    def decide(self, view: View, fenced: frozenset[int] = frozenset()) -> None:
        gone = {node for node in view.nodes if node in self.tombstones} | fenced
        inside = [self.processes[node] for node in view.nodes if node not in gone]
        for node in fenced:
            self.processes[node].doomed = True
        if not inside:
            return
        for process in inside:
            process.answer = frozenset(view.nodes) - gone
        if not gone and not all(process.has_state for process in inside) and not self.make_equal(inside):
            return
        verdict = self.verdict(view, inside, gone)
        match verdict:
            case Shrink():
                for process in inside:
                    process.outcome = ("changed", verdict.view)
            case Differ():
                self.num_differences += 1
                self.make_equal(inside)
            case Retry():
                assert verdict.nonfinite is not None
                self.num_retried += 1
                for process in inside:
                    process.nonfinite = verdict.nonfinite.in_a_row
                    if process.nonfinite > self.max_retries:
                        process.outcome = ("failed", view)
            case Commit():
                self.commit(view, inside, verdict)

    def verdict(self, view: View, inside: list[Process], gone: set[int]) -> Verdict:
        """What all who are inside conclude, which must be the same."""
        # One at a time and never the last: if all members ask to leave of themselves, that is a stop.
        leaver = next((process for process in inside[1:] if process.wants_to_leave), None)
        if self.orders and leaver is None and len(inside) > 1 and inside[0].wants_to_leave:
            leaver = inside[0]
        votes = None
        if not gone:
            votes = [
                Vote.unpack(
                    Vote(
                        process.step,
                        stop=process.asked_to_stop,
                        leave=process is leaver or process.drained,
                        drained=process is not leaver and process.drained,
                        checked=True,
                        nonfinite=process.nonfinite,
                        fingerprint=(process.state, 0),
                        num_bad=int(process.bad),
                        joiners=process.candidates,
                    ).pack()
                )
                for process in inside
            ]
        for process in inside:
            process.bad = False
        before = dict.fromkeys(view.nodes, 1)
        after = {node: 1 for node in view.nodes if node not in gone}
        verdicts = {judge(view, p.identity.node, before, after, votes, self.max_skips) for p in inside}
        (verdict,) = verdicts
        return verdict

    def make_equal(self, inside: list[Process]) -> bool:
        """The beginning of an epoch, or a repair. If nobody can say which state is right, the job gives up."""
        standings = [Standing(p.step, p.step, (p.state, 0), (0, 0), p.has_state) for p in inside]
        agreement = agree(standings)
        if agreement.undecided:
            for process in inside:
                assert process.view is not None
                process.outcome = ("gave_up", process.view)
            return False
        donor = inside[agreement.donors[0]]
        for process in inside:
            process.state, process.step, process.has_state = donor.state, donor.step, True
        return True

    def commit(self, view: View, inside: list[Process], commit: Commit) -> None:
        assert len({(process.step, process.state) for process in inside}) == 1, "never a mixed state"
        step = inside[0].step
        state = inside[0].state
        if len(view.members) >= self.roster.limits.min_workers:
            step += 1
            self.num_skipped += commit.skipped is not None
            if commit.skipped is None:
                state = (state * 48271 + step) % (2**31 - 1)
        for process in inside:
            process.step, process.state = step, state
            process.nonfinite = commit.skipped.in_a_row if commit.skipped else 0
            if commit.stop:
                process.outcome = ("stopped", view)
            elif step >= self.goal:
                process.outcome = ("done", view)
            elif process.identity in commit.leaving:
                process.doomed = True
            else:
                process.outcome = ("changed" if commit.view != view else "same", commit.view)

    def take_over(self) -> bool:
        """A member goes on with what its last block has decided."""
        due = [process for process in self.living("member") if process.outcome is not None]
        if not due:
            return False
        process = self.random.choice(due)
        assert process.outcome is not None
        kind, view = process.outcome
        process.outcome = None
        process.barriers.append(execution.Exit(self.num_moves, process.answer))
        queue = self.up[process.identity.node]
        queue.append(Stepped(process.identity, process.step))
        if kind == "changed":
            process.view, process.told_dead, process.num_blocks = view, set(), 0
            queue.append(Viewed(process.identity, view, process.step))
        if kind in ("changed", "same"):
            self.enter(process)
        else:
            process.phase = "finished"
            message = "nobody can say who is right" if kind == "gave_up" else ""
            queue.append(Finished(process.identity, kind, message))
        return True

    def exit_doomed(self) -> bool:
        """Fenced and leaving workers exit by themselves, zombies too once they notice."""
        doomed = [p for p in self.living("member") if p.doomed or p.identity.node in self.tombstones]
        if doomed:
            self.die(self.random.choice(doomed), 75)
        return bool(doomed)

    def fire_timer(self) -> bool:
        due = [name for name, at_s in self.timers.items() if at_s <= self.clock_s]
        if due:
            name = self.random.choice(due)
            del self.timers[name]
            self.feed(TimerOver(name))
        return bool(due)

    def move(self) -> None:
        """One random move. If there is none left, time passes until the next timer.

        Lost agents come back before the job would give up for the lack of members.
        """
        self.num_moves += 1
        self.clock_s += self.random.random() * 0.05
        moves = [
            self.serve_up,
            self.serve_down,
            self.serve_up,
            self.serve_down,
            self.warm_up,
            self.end_block,
            self.take_over,
            self.exit_doomed,
            self.fire_timer,
        ]
        self.random.shuffle(moves)
        if any(move() for move in moves):
            return
        self.check_quiet()
        assert self.timers, "nothing can happen any more, and the job has not ended"
        next_timer = min(self.timers, key=self.timers.__getitem__)
        if next_timer == "floor" and self.returning:
            self.connect(min(self.returning))
        elif next_timer == "floor" and self.sent_away & self.connected:
            self.lose_agent(min(self.sent_away & self.connected))
        else:
            self.clock_s = max(self.clock_s, self.timers[next_timer])

    def check_quiet(self) -> None:
        """All messages have arrived: every living member knows of every death in its view."""
        for process in self.living("member"):
            assert process.view is not None
            if process.identity.node not in self.tombstones:
                assert set(self.tombstones) & set(process.view.nodes) <= process.told_dead

    def check_barriers(self) -> None:
        """Every list that a member got is valid."""
        assert semantics.find_violation(self.histories()) is None

    def histories(self) -> list[execution.Process]:
        """What each worker did at barriers. What zombies do after their tombstone counts in none."""
        histories = []
        for node, process in self.processes.items():
            history = execution.Process(node, tuple(process.barriers))
            if node in self.tombstones:
                history = semantics.without_fenced(history, self.tombstones[node])
                if process.alive:
                    failure = execution.Fail(self.num_moves)
                    history = execution.Process(node, (*history.events, failure))
            histories.append(history)
        return histories

    def run(self, max_moves: int = 20_000) -> End:
        """Goes on until the job ends."""
        for _ in range(max_moves):
            if self.end is not None:
                self.check_barriers()
                return self.end
            self.move()
        raise AssertionError(f"no end after {max_moves} moves; the last ones: {self.log[-30:]}")

    # Faults -----------------------------------------------------------------------------------------------

    def fault(self) -> None:
        processes = [process for process in self.processes.values() if process.alive]
        kinds = [
            "kill",
            "kill",
            "kill",
            "silent",
            "unfit",
            "leave",
            "raise",
            "fence",
            "lose",
            "return",
            "stale",
            "stale",
        ]
        kinds.append("nonfinite")
        kind = self.random.choice([*kinds, *["flip"] * self.flips, *["edit"] * self.edits, *ORDERS * self.orders])
        if kind == "lose" and self.connected:
            self.lose_agent(self.random.choice(sorted(self.connected)))
        elif kind == "return" and self.returning:
            self.connect(self.random.choice(sorted(self.returning)))
        elif kind == "stale":
            self.say_again()
        elif kind in ORDERS:
            self.order(kind)
        elif processes:
            process = self.random.choice(processes)
            match kind:
                case "kill":
                    self.die(process, -9)
                case "silent":
                    self.up[process.identity.node].append(Silent(process.identity, "keepalive ran out"))
                case "unfit":  # comes from the coordinator itself, so it may concern a worker that is gone
                    self.feed(Unfit(process.identity, "stuck", "too long in 'data'"))
                case "leave":
                    process.wants_to_leave = True
                case "raise":
                    self.up[process.identity.node].append(Failed(process.identity, 3, False, False, "ValueError"))
                case "fence":
                    self.fence(process)
                case "nonfinite":
                    process.bad = True
                case "flip" if process.has_state:
                    process.state ^= 1 << self.random.randrange(31)
                case "edit":
                    self.schema = {"code/recipe.py": self.random.choice(["as before", "edited", "edited again"])}

    def order(self, kind: str) -> None:
        """What a person asks for, if it is not refused."""
        match kind:
            case "drain":
                slot = self.random.randrange(self.roster.limits.num_slots)
                if not self.roster.ended and not refuse_drain(self.roster, slot):
                    self.feed(DrainAsked(slot, "for repair"))
            case "resize":
                workers = self.random.randint(1, max(max(slots, default=0) for slots in self.agents.values()) + 1)
                if not refuse_resize(self.roster, workers):
                    self.feed(ResizeAsked(workers, "as asked"))
            case "send away" if len(self.connected) > 1:
                agent = self.random.choice(sorted(self.connected))
                self.up[agent].append(AgentLeaving(agent, "SIGTERM"))
                self.sent_away.add(agent)
                for process in self.processes.values():
                    process.wants_to_leave |= process.agent == agent

    def schemas(self, nodes: Iterable[int]) -> int:
        """How many different things these run."""
        return len({tuple(self.processes[node].schema.items()) for node in nodes if node in self.processes})

    def say_again(self) -> None:
        """Something that a worker said, whose slot has a newer one or none, arrives late, or for a second time."""
        said = [event for event in self.log if isinstance(event, WorkerEvent)]
        stale = [event for event in said if not self.roster.is_living(event.identity)]
        if stale:
            event = self.random.choice(stale)
            view = View.of(self.roster.view.epoch + 1, (event.identity,))
            self.up["stale"].append(
                self.random.choice([event, Viewed(event.identity, view, 7), Finished(event.identity, "done")])
            )

    def fence(self, process: Process) -> None:
        """JAX's service takes a living member for dead; the barrier names the others only."""
        view = process.view
        node = process.identity.node
        if view is None or len(view.members) == 1 or node in self.tombstones:
            return
        if process.outcome is None and self.block_is_over(view):
            self.decide(view, frozenset({node}))

    def lose_agent(self, agent: str) -> None:
        """Its stream ends. Its workers may die with it, or live on and not know that they count as dead."""
        self.connected.discard(agent)
        zombies = self.random.random() < 0.5
        for process in self.processes.values():
            if process.agent == agent and process.alive and not zombies:
                self.end_process(process)
        del self.down[agent]
        self.up[agent].append(AgentLost(agent))

    def heal(self) -> None:
        """From here on no faults. Unless there is a goal, the members finish three steps later."""
        if self.goal == NO_GOAL:
            self.goal = max((process.step for process in self.processes.values()), default=0) + 3
        self.largest_view_since_faults = 0
        for agent in sorted(self.sent_away & self.connected):  # its workers have had their time
            self.lose_agent(agent)
        while len(self.connected) < len(self.agents):
            while not self.returning:
                assert self.serve_up() or self.end
                if self.end is not None:
                    return
            for agent in sorted(self.returning):
                self.connect(agent)

    def ask_to_stop(self) -> None:
        self.feed(StopAsked(now=False, reason="SIGINT"))
