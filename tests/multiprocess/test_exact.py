"""The weights do not notice: one digest for any number of workers and whatever died on the way."""

import random
import signal
from pathlib import Path

import pytest
from job import FAULTY, ROOT, UNSAVED, Job, plain_run, undisturbed_after

pytestmark = pytest.mark.timeout(900)

RECIPES = {name: ROOT / "recipes" / f"{name}.py" for name in ("digits_mlp", "digits_cnn", "byte_lm")}
STEPS = 300
FEW_STEPS = 60
"""Of the default run: five passes and a bit."""
NUM_KILLS = 6


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Summary of an undisturbed run in one plain process, by recipe and steps; made once each."""
    made: dict[tuple[str, int], dict] = {}

    def summary(name: str, steps: int = STEPS) -> dict:
        if (name, steps) not in made:
            made[name, steps] = plain_run(tmp_path_factory.mktemp(name) / "alone", steps, recipe=RECIPES[name])
        return made[name, steps]

    return summary


def assert_same(job: Job, expected: dict) -> None:
    assert job.summary["status"] == "done", job.logs()
    assert job.summary["params_sha256"] == expected["params_sha256"], job.logs()
    assert job.summary["state_sha256"] == expected["state_sha256"]
    assert job.events("digests_differ") == []
    assert [line["step"] for line in job.lines("ledger.jsonl")] == list(range(1, expected["step"] + 1))
    assert job.processes_left() == []


def disturb(job: Job, seed: int) -> None:
    """Kills six workers at seeded steps, slot 0 among them, every one of them while it is a member."""
    generator = random.Random(seed)
    slots = [0, *(generator.randrange(3) for _ in range(NUM_KILLS - 1))]
    generator.shuffle(slots)
    steps = sorted(generator.sample(range(5, STEPS - 40), NUM_KILLS))
    for slot, step in zip(slots, steps, strict=True):
        job.wait_step(step)
        job.wait_for(f"slot {slot} to be a member", lambda: slot in job.lines("ledger.jsonl")[-1]["workers"])  # noqa: B023
        job.kill(slot, signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "workers", "steps"),
    [
        ("digits_mlp", 3, FEW_STEPS),
        *(pytest.param("digits_mlp", workers, STEPS, marks=pytest.mark.soak) for workers in (1, 2, 3, 5)),
        *(pytest.param("byte_lm", workers, STEPS, marks=pytest.mark.soak) for workers in (1, 2, 3, 5)),
        pytest.param("digits_cnn", 3, STEPS, marks=pytest.mark.soak),
    ],
)
def test_any_number_of_workers(tmp_path: Path, alone, name, workers, steps):
    """Without any fault, and none is told of."""
    with Job(tmp_path / "run", RECIPES[name], "--steps", str(steps), *UNSAVED, workers=workers) as job:
        assert job.finish(300) == 0, job.logs()
        assert_same(job, alone(name, steps))
        assert job.summary["faults"] == []


@pytest.mark.soak
@pytest.mark.parametrize("name", list(RECIPES))
def test_six_kills_and_rejoins(tmp_path: Path, alone, name):
    """Below two members the job pauses, so that the killed come back within the 300 steps."""
    options = ("--steps", str(STEPS), "--min-workers", "2", "--set", "faults.first_backoff_s=0.1")
    with Job(tmp_path / "run", RECIPES[name], *options, workers=3) as job:
        disturb(job, seed=7)
        assert job.finish(300) == 0, job.logs()
        assert_same(job, alone(name))
        assert len(job.summary["faults"]) >= NUM_KILLS
        assert {fault["slot"] for fault in job.summary["faults"]} >= {0}


def fault(slot: int, where: str, step: int) -> dict:
    return {"slot": slot, "where": where, "step": step, "what": "kill"}


LAST = 41
"""A run of 41 steps of 48 samples, on 1000: the 21st step crosses the boundary of a pass, the 41st is the last."""


@pytest.mark.parametrize(
    "faults",
    [
        [fault(1, "exchange", 0), fault(2, "data", 20)],
        pytest.param([fault(1, "data", 5), fault(2, "exchange", 9)], marks=pytest.mark.soak),
        pytest.param([fault(0, "exchange", LAST - 1), fault(1, "hook", LAST)], marks=pytest.mark.soak),
    ],
    ids=["first step, pass boundary", "twice in one pass", "last step, after the last commit"],
)
def test_kills_at_the_edges_of_runs_and_passes(tmp_path: Path, faults):
    expected = undisturbed_after(LAST)
    with Job(tmp_path / "run", FAULTY, "--steps", str(LAST), *UNSAVED, workers=3, faults=faults) as job:
        assert job.finish() == 0, job.logs()
        assert_same(job, expected)


def test_gradients_of_16_bits_come_to_the_same_whatever_dies(tmp_path: Path):
    options = ("--set", "exchange_dtype=bfloat16")
    expected = plain_run(tmp_path / "alone", LAST, *options)
    faults = [fault(1, "exchange", 10), fault(0, "barrier", 20)]
    with Job(tmp_path / "run", FAULTY, "--steps", str(LAST), *options, workers=3, faults=faults) as job:
        assert job.finish() == 0, job.logs()
        assert_same(job, expected)
    assert expected["params_sha256"] != plain_run(tmp_path / "32 bits", LAST)["params_sha256"]
