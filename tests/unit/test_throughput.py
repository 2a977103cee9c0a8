"""What throughput kept means, on runs made up for it."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_train.chaos.throughput import calm_step_times, throughput_kept


def run(*spans: tuple[int, int, float, int], start: float = 100.0) -> list[dict[str, Any]]:
    """Commits of (number of steps, members, seconds a step, epoch)."""
    commits, time = [], start
    for number, members, took, epoch in spans:
        for _ in range(number):
            time += took
            workers = list(range(members))
            commits.append(
                {"step": len(commits) + 1, "time": time, "step_time_s": took, "workers": workers, "epoch": epoch}
            )
    return commits


def test_a_fault_free_run_keeps_everything() -> None:
    commits = run((50, 4, 0.1, 1))
    kept = throughput_kept(commits, calm_step_times([], commits))
    assert kept.share == pytest.approx(1.0)
    assert kept.num_steps == {4: 49}
    assert kept.estimated == ()


def test_fewer_members_are_no_loss_but_waiting_is() -> None:
    """10 s with four members, 1 s in which nothing happens, 9 s with three that take 0.15 s a step."""
    commits = run((101, 4, 0.1, 1), (1, 3, 1.15, 2), (59, 3, 0.15, 2))
    kept = throughput_kept(commits, {4: 0.1, 3: 0.15})
    assert kept.wall_s == pytest.approx(20.0)
    assert kept.share == pytest.approx(19 / 20)


def test_the_start_of_the_job_does_not_count() -> None:
    commits = run((1, 4, 60.0, 1), (100, 4, 0.1, 1))
    assert throughput_kept(commits, {4: 0.1}).share == pytest.approx(1.0)


def test_steps_slowed_down_by_a_starting_worker_count_as_loss_and_are_not_calm() -> None:
    commits = run((100, 3, 0.1, 1), (100, 3, 0.2, 1))
    began = commits[99]["time"] + 0.01
    about = {"slot": 3, "incarnation": 1}
    events = [
        {"event": "worker_starting", "time": began, **about},
        {"event": "worker_ready", "time": commits[-1]["time"] + 0.01, **about},
    ]
    calm = calm_step_times(events, commits)
    assert calm == {3: pytest.approx(0.1)}
    assert throughput_kept(commits, calm).share == pytest.approx(199 / 299)


def test_the_first_steps_of_an_epoch_and_retries_are_not_calm() -> None:
    commits = run((10, 2, 0.1, 1), (3, 1, 5.0, 2), (5, 1, 0.3, 2))
    commits[8]["step_time_s"] = 3.0
    events = [{"event": "user_code_failed", "time": 0.0, "step": 8}]
    assert calm_step_times(events, commits) == {1: pytest.approx(0.3), 2: pytest.approx(0.1)}


def test_a_single_calm_step_stands_for_nothing() -> None:
    """A worker starts while all others train; the one step after it is ready waits for it."""
    commits = run((20, 3, 0.1, 1), (100, 2, 0.1, 2), (1, 2, 4.0, 2))
    about = {"slot": 2, "incarnation": 1}
    events = [
        {"event": "worker_starting", "time": commits[20]["time"] - 0.05, **about},
        {"event": "worker_ready", "time": commits[-2]["time"] - 0.05, **about},
    ]
    calm = calm_step_times(events, commits)
    assert calm == {3: pytest.approx(0.1)}
    kept = throughput_kept(commits, calm)
    assert kept.estimated == (2,) and kept.share is not None and kept.share < 1


def test_a_number_of_members_never_seen_calm_is_told() -> None:
    commits = run((10, 4, 0.1, 1), (10, 2, 0.2, 2))
    kept = throughput_kept(commits, {4: 0.1, 3: 0.2})
    assert kept.estimated == (2,)
    assert kept.ideal_s == pytest.approx(9 * 0.1 + 10 * 0.2)


def test_without_steps_there_is_no_share() -> None:
    assert throughput_kept([], {}).share is None
    assert throughput_kept(run((1, 1, 0.1, 1)), {1: 0.1}).share is None
