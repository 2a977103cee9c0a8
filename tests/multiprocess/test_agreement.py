"""Members that hold another state than the others, and joiners that run something else: rows 21 and 22."""

import shutil

import pytest
from job import FAULTY, Job, undisturbed_after
from test_faults import STEPS, assert_exact, endless, fault, healed, kinds, run, stop_and_compare

pytestmark = pytest.mark.timeout(300)

EVERY_STEP = ("--set", "faults.fingerprint_every=1")


def test_row_21_a_leaf_damaged_in_transfer_is_fetched_again_or_its_worker_evicted(tmp_path):
    """The first joiner receives a damaged leaf every time, the second one once."""
    faults = (
        fault(1, "healed", what="flip", incarnation=1, always=True),
        fault(1, "healed", what="flip", incarnation=2),
    )
    with endless(tmp_path, *faults) as job:
        job.wait_step(10)
        killed = job.kill(1)
        job.wait_event("worker_died", slot=1, incarnation=1)
        back = healed(job, 1, after=killed)
        job.wait_step(back["step"] + 5)
        stop_and_compare(job)
        differ = job.events("state_differs")
        assert [event["why"] for event in differ] == ["transfer"] * 4
        assert all(event["slots"] == [1] and event["num_key_paths"] == 1 for event in differ)
        assert all(event["key_paths"] == ["params/inner/bias"] for event in differ)
        died = [event["incarnation"] for event in job.events("worker_died")]
        assert died == [0, 1]
        assert "the state still differs after 3 transfers" in job.logs()


def refusal_of(job: Job, key: str) -> dict | None:
    return next((event for event in job.events("worker_refused") if key in event["differences"]), None)


def test_row_21_a_joiner_with_another_config_dtype_or_code_is_refused(tmp_path):
    """The files are edited while the job runs, and put right again."""
    recipe = tmp_path / "recipe.py"
    shutil.copy(FAULTY, recipe)
    options = ("--steps", "1000000", "--set", "faults.first_backoff_s=0.1")
    with Job(tmp_path / "run", recipe, *options, pace_s=0.03) as job:
        job.wait_step(10)
        config = job.run_dir / "config.toml"
        right = config.read_text()
        config.write_text(right.replace("width = 32", "width = 16"))
        job.kill(1)
        refused = job.wait_event("worker_refused", slot=1)
        source = recipe.read_text()
        recipe.write_text(source.replace("clip_by_global_norm(1.0)", "clip_by_global_norm(2.0)"))
        changed = job.wait_for("a refusal of other code", lambda: refusal_of(job, "code/recipe.py"))
        config.write_text(right)
        recipe.write_text("# A comment is no other code.\n" + source)
        back = healed(job, 1, after=changed["time"])
        job.wait_step(back["step"] + 5)
        stop_and_compare(job)
        assert refused["differences"]["config/width"] == ["32", "16"]
        assert refused["differences"]["state/params/inner/kernel"] == ["float32[8,32]", "float32[8,16]"]
        assert refused["num_differences"] > len(refused["differences"])
        assert "undo the change to config.toml" in job.output
        assert {fault["cause"] for fault in job.summary["faults"]} == {None, "refused"}
        assert "A file of the recipe has another content than when the members started" in job.output


@pytest.mark.soak
def test_row_22_a_flipped_bit_is_found_and_healed_from_the_majority(tmp_path):
    alone = undisturbed_after(int(STEPS))
    with run(tmp_path, fault(1, "update", step=20, what="flip"), options=EVERY_STEP) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, alone)
        (differ,) = job.events("state_differs")
        assert (differ["step"], differ["slots"], differ["undecided"]) == (21, [1], False)
        assert differ["key_paths"] == ["params/inner/bias"]
        (repaired,) = job.events("state_repaired")
        assert (repaired["step"], repaired["slots"]) == (21, [1])
        assert kinds(job) == [("differs", 1)]
        assert len(job.events("worker_started")) == 3
        assert "the state after step 21 differs between slots 0, 2 and slot 1, in params/inner/bias" in job.output


@pytest.mark.soak
def test_row_22_two_members_cannot_tell_who_is_right(tmp_path):
    with run(tmp_path, fault(1, "update", step=20, what="flip"), workers=2, options=EVERY_STEP) as job:
        assert job.finish() == 4, job.logs()
        assert job.summary["status"] == "gave_up"
        assert "as many members hold the one as the other" in job.summary["message"]
        assert job.lines("ledger.jsonl")[-1]["step"] == 21
        assert job.processes_left() == []


@pytest.mark.soak
def test_row_22_the_oldest_member_may_decide(tmp_path):
    alone = undisturbed_after(int(STEPS))
    options = (*EVERY_STEP, "--set", "faults.undecided=oldest")
    with run(tmp_path, fault(1, "update", step=20, what="flip"), workers=2, options=options) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, alone)
        assert kinds(job) == [("differs", 1)]
