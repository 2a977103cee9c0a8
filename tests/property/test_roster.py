"""The roster in a thousand random schedules, or thousands (`examples.py`).

The invariants are checked by the cluster, at every event.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config import FaultConfig
from elastic_train.membership.execution import Enter, Exit, Process
from elastic_train.membership.roster import Limits
from elastic_train.membership.roster_events import Exited, Failed, Start
from elastic_train.membership.semantics import find_violation
from tests.property.cluster import Cluster
from tests.property.examples import examples

seeds = st.integers(0, 2**32 - 1)
sizes = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))


def cluster_of(
    seed: int,
    size: tuple[int, int, int],
    max_restarts: int = 10**6,
    start_grace_s: float = 2.0,
    num_nodes: int = 10**6,
) -> Cluster:
    """`size` is (slots, min_workers, agents); slots are dealt out to the agents."""
    num_slots, min_workers, num_agents = size
    faults = FaultConfig(max_restarts=max_restarts, start_grace_s=start_grace_s)
    agents = {f"agent{i}": tuple(range(i, num_slots, num_agents)) for i in range(min(num_agents, num_slots))}
    return Cluster(seed, Limits(num_slots, min(min_workers, num_slots), faults, num_nodes=num_nodes), agents)


def disturb(cluster: Cluster, num_moves: int, fault_share: float) -> None:
    for _ in range(num_moves):
        if cluster.end is not None:
            return
        if cluster.random.random() < fault_share:
            cluster.fault()
        else:
            cluster.move()


@given(seeds, sizes, st.integers(0, 300), st.sampled_from([0.01, 0.05, 0.2]))
@examples(1200)
def test_once_faults_stop_the_job_gets_done(
    seed: int, size: tuple[int, int, int], num_moves: int, fault_share: float
) -> None:
    cluster = cluster_of(seed, size)
    disturb(cluster, num_moves, fault_share)
    cluster.heal()
    end = cluster.run()
    assert (end.exit_code, end.status) == (0, "done")
    assert cluster.largest_view_since_faults >= cluster.roster.limits.min_workers


def went_on_after(history: Process, barrier: object) -> bool:
    """Whether it got a list of this barrier, and entered another one later."""
    entered = [index for index, each in enumerate(history.events) if isinstance(each, Enter)]
    return any(history.events[i].barrier == barrier for i in entered[:-1])  # type: ignore[union-attr]


@given(seeds, st.integers(2, 5), st.integers(100, 400))
@examples(150)
def test_a_list_that_leaves_out_a_member_that_goes_on_is_found_out(seed: int, num_slots: int, num_moves: int) -> None:
    """Negative control of the check that ends every schedule: one barrier forgets one member, everywhere."""
    cluster = cluster_of(seed, (num_slots, 1, 2))
    disturb(cluster, num_moves, 0.02)
    histories = cluster.histories()
    assert find_violation(histories) is None
    lists = {
        (entry.barrier, reply.members)
        for history in histories
        for entry, reply in itertools.pairwise(history.events)
        if isinstance(entry, Enter) and isinstance(reply, Exit)
    }
    went_on = [
        (barrier, members, history.name)
        for barrier, members in sorted(lists, key=str)
        for history in histories
        if history.name in members and went_on_after(history, barrier)
    ]
    if not went_on:
        return
    barrier, members, name = cluster.random.choice(went_on)
    broken = []
    for history in histories:
        events = list(history.events)
        for number, (entry, _) in enumerate(itertools.pairwise(history.events), start=1):
            if isinstance(entry, Enter) and entry.barrier == barrier and isinstance(events[number], Exit):
                events[number] = Exit(events[number].time, members - {name})
        broken.append(Process(history.name, tuple(events)))
    found = find_violation(broken)
    assert found is not None and found.barrier == barrier


@given(seeds, st.integers(3, 5), st.integers(1, 6))
@examples(300)
def test_a_damaged_state_is_repaired_by_the_majority(seed: int, num_slots: int, num_flips: int) -> None:
    """One at a time, and nobody dies: the members end with the state of a run without damage."""
    cluster, undisturbed = (cluster_of(seed, (num_slots, num_slots, 1)) for _ in range(2))
    cluster.goal = undisturbed.goal = 3 * num_flips + 5
    for number in range(num_flips):
        while cluster.end is None and max((p.step for p in cluster.processes.values()), default=0) < 3 * number + 1:
            cluster.move()
        members = [process for process in cluster.living("member") if process.has_state]
        cluster.random.choice(members).state ^= 1 << cluster.random.randrange(31)
        while cluster.num_differences <= number:
            cluster.move()
    assert cluster.run().exit_code == undisturbed.run().exit_code == 0
    states = {process.state for process in cluster.processes.values()}
    assert states == {process.state for process in undisturbed.processes.values()}
    assert cluster.num_differences == num_flips


@given(seeds, sizes, st.integers(0, 300), st.sampled_from([0.05, 0.2]))
@examples(500)
def test_with_orders_in_between_the_job_gets_done_too(
    seed: int, size: tuple[int, int, int], num_moves: int, fault_share: float
) -> None:
    """Slots are drained, their number changes, hosts are sent away: nothing of it ends a job, or blocks it."""
    num_slots, min_workers, num_agents = size
    cluster = cluster_of(seed, (5, min_workers, num_agents))
    limits = replace(cluster.roster.limits, num_slots=max(num_slots, cluster.roster.limits.min_workers))
    cluster.roster = replace(cluster.roster, limits=limits)
    cluster.orders = True
    disturb(cluster, num_moves, fault_share)
    cluster.heal()
    end = cluster.run()
    assert (end.exit_code, end.status) == (0, "done"), end
    assert cluster.largest_view_since_faults >= cluster.roster.limits.min_workers


@given(seeds, sizes, st.integers(0, 300), st.sampled_from([0.05, 0.2]))
@examples(500)
def test_with_damaged_states_and_other_code_nothing_mixed_is_ever_committed(
    seed: int, size: tuple[int, int, int], num_moves: int, fault_share: float
) -> None:
    """The cluster checks it at every commit. The job ends well, or gives up where nobody can tell who is right."""
    cluster = cluster_of(seed, size, max_restarts=20)
    cluster.flips = cluster.edits = True
    disturb(cluster, num_moves, fault_share)
    cluster.heal()
    assert cluster.run().status in ("done", "gave_up")


@given(seeds, sizes, st.sampled_from(["retry", "skip"]), st.integers(1, 4))
@examples(300)
def test_gradients_that_are_never_finite_end_the_job(
    seed: int, size: tuple[int, int, int], policy: str, budget: int
) -> None:
    cluster = cluster_of(seed, size)
    cluster.max_retries = budget if policy == "retry" else 0
    cluster.max_skips = budget if policy == "skip" else 0
    cluster.goal = 10**6
    for _ in range(20_000):
        if cluster.end is not None:
            break
        for process in cluster.living("member"):
            process.bad = True
        cluster.move()
    assert cluster.end is not None
    assert (cluster.end.exit_code, cluster.end.status) == (3, "failed")
    assert (cluster.num_retried, cluster.num_skipped) == ((budget + 1, 0) if policy == "retry" else (1, budget))


@given(seeds, sizes, st.integers(0, 10))
@examples(600)
def test_faults_while_finishing_do_not_block_the_end(seed: int, size: tuple[int, int, int], faults: int) -> None:
    cluster = cluster_of(seed, size)
    cluster.goal = 5
    for _ in range(faults):
        disturb(cluster, 40, 0.0)
        if cluster.end is None:
            cluster.fault()
    cluster.heal()
    assert cluster.run().exit_code == 0


@given(seeds, sizes, st.integers(0, 200), st.integers(0, 60))
@examples(600)
def test_a_stop_is_always_reached(seed: int, size: tuple[int, int, int], before: int, after: int) -> None:
    cluster = cluster_of(seed, size)
    disturb(cluster, before, 0.03)
    cluster.ask_to_stop()
    disturb(cluster, after, 0.05)
    cluster.goal = 10**8  # the members would train on
    cluster.heal()
    end = cluster.run()
    assert (end.exit_code, end.status) == (130, "stopped")


@given(seeds, sizes, st.integers(0, 3))
@examples(300)
def test_a_spent_budget_ends_the_job(seed: int, size: tuple[int, int, int], max_restarts: int) -> None:
    """Each worker dies as soon as it is ready or later, so no one makes enough steps to be forgiven."""
    cluster = cluster_of(seed, size, max_restarts=max_restarts)
    for _ in range(20_000):
        if cluster.end is not None:
            break
        cluster.move()
        for process in cluster.living("waiting", "member"):
            if cluster.random.random() < 0.3:
                cluster.die(process, -11, "Traceback: boom")
    assert cluster.end is not None
    assert (cluster.end.exit_code, cluster.end.status) == (4, "gave_up")
    assert "exit code -11" in cluster.end.message
    assert "boom" in cluster.end.message
    starts = [action.identity for action in cluster.log if isinstance(action, Start)]
    assert all(identity.incarnation <= max_restarts for identity in starts)


@given(seeds, sizes, st.integers(0, 300), st.integers(0, 4))
@examples(500)
def test_with_a_small_budget_it_ends_either_way(
    seed: int, size: tuple[int, int, int], num_moves: int, max_restarts: int
) -> None:
    cluster = cluster_of(seed, size, max_restarts=max_restarts, num_nodes=40)
    disturb(cluster, num_moves, 0.1)
    cluster.heal()
    assert cluster.run().status in ("done", "gave_up")


@given(seeds, sizes)
@examples(200)
def test_a_bug_at_start_up_ends_the_job_after_one_failure_per_slot(seed: int, size: tuple[int, int, int]) -> None:
    cluster = cluster_of(seed, size)
    cluster.fails_at_start = True
    end = cluster.run()
    assert (end.exit_code, end.status) == (3, "failed")
    assert "Traceback of slot" in end.message
    failed = [event.identity.slot for event in cluster.log if isinstance(event, Failed)]
    started = {action.identity.slot for action in cluster.log if isinstance(action, Start)}
    assert set(failed) == started
    # The last failure heard of was the first of its slot: the job did not wait for one more.
    assert failed.count(failed[-1]) == 1


@given(seeds, sizes)
@examples(150)
def test_without_a_fault_nobody_is_restarted(seed: int, size: tuple[int, int, int]) -> None:
    cluster = cluster_of(seed, size, start_grace_s=1e6)
    cluster.heal()
    assert cluster.run().exit_code == 0
    assert not any(isinstance(event, Exited) for event in cluster.log)
    assert cluster.roster.next_node == size[0] + 1
    assert cluster.roster.view.epoch == 1
