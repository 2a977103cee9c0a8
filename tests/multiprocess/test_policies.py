"""User code that raises, and gradients that are not finite: rows 8 to 11 of the catalogue of faults."""

import pytest
from job import FAULTY, plain_run
from test_faults import STEPS, assert_exact, fault, kinds, run, undisturbed

from elastic_train.data.batches import batches

__all__ = ["undisturbed"]  # a fixture

pytestmark = pytest.mark.timeout(300)

BAD_SAMPLE = ("--set", "bad_sample=7")
SKIP = ("--set", "faults.nonfinite=skip")


def test_row_08_code_that_raises_once_is_retried_by_all(tmp_path, undisturbed):
    """In reading data, in a hook, in an evaluation, at the end, and with exceptions that mean an exit."""
    faults = (
        fault(1, "data", step=10, what="raise"),
        fault(0, "hook", step=20, what="raise"),
        fault(2, "data", step=30, what="exit"),
        fault(1, "evaluate", step=40, what="raise"),
        fault(0, "hook", step=int(STEPS), what="raise"),
    )
    with run(tmp_path, *faults, options=("--set", "eval_every=40")) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        failures = job.events("user_code_failed")
        assert [(event["slot"], event["step"]) for event in failures] == [(1, 10), (0, 20), (2, 30), (1, 40), (0, 60)]
        assert not any(event["fatal"] for event in failures)
        assert [fault for fault in kinds(job)[:3]] == [("raised", 1), ("raised", 0), ("raised", 2)]
        assert "in on_step, after step 20" in failures[1]["traceback"]
        assert "in the evaluation after step 40" in failures[3]["traceback"]
        assert len(job.events("worker_started")) == 3


@pytest.mark.parametrize(
    ("ahead", "update"),
    [
        (True, "always"),
        pytest.param(True, "never", marks=pytest.mark.soak),
        pytest.param(False, "always", marks=pytest.mark.soak),
    ],
)
def test_row_08_a_callback_that_raises_on_the_device_is_voted_on(tmp_path, undisturbed, monkeypatch, ahead, update):
    """On accelerators the exchange is queued behind it already, and the update."""
    if ahead:
        monkeypatch.setenv("QUEUE_AHEAD", "1")
    faults = (fault(1, "shard", step=10, what="callback"), fault(0, "shard", step=20, what="callback"))
    with run(tmp_path, *faults, workers=2, options=("--set", f"early_update={update}")) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        failures = job.events("user_code_failed")
        assert [(event["slot"], event["step"]) for event in failures] == [(1, 10), (0, 20)]
        assert all("division" in event["traceback"] for event in failures)
        assert len(job.events("worker_started")) == 2


@pytest.mark.soak
def test_row_08_an_interrupt_in_user_code_costs_that_worker_only(tmp_path, undisturbed):
    with run(tmp_path, fault(1, "data", step=5, what="interrupt")) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)


def test_row_09_code_that_always_raises_on_one_worker_costs_that_worker(tmp_path, undisturbed):
    """The worker that follows it raises while it starts."""
    faults = (
        fault(1, "data", step=9, what="raise", always=True),
        fault(1, "data", what="raise", always=True, incarnation=1),
    )
    with run(tmp_path, *faults, options=("--set", "faults.max_restarts=1")) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert job.lines("ledger.jsonl")[-1]["workers"] == [0, 2]
        attempts = [event["fatal"] for event in job.events("user_code_failed") if event["incarnation"] == 0]
        assert attempts == [False, False, True]  # faults.max_step_failures
        shown = job.output
        assert "worker 1 (incarnation 0): user code raised at step 10:\nTraceback" in shown
        assert f'{FAULTY}", line ' in shown and "planned failure in data at step 9 on slot 1" in shown
        assert "for the last time that faults.max_step_failures allows" in shown
        assert "gave up slot 1" in shown or len(job.events("worker_started")) == 4  # or the job was over before


@pytest.mark.soak
def test_row_09_a_hook_that_always_raises_on_one_worker_costs_that_worker(tmp_path, undisturbed):
    """Each step is committed at the second try, so the tries of one step would never add up."""
    always = fault(1, "hook", what="raise", always=True, incarnation=-1)
    with run(tmp_path, always, options=("--set", "faults.max_restarts=0")) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert job.lines("ledger.jsonl")[-1]["workers"] == [0, 2]
        failures = job.events("user_code_failed")
        assert [event["step"] for event in failures] == [1, 2, 3]
        assert [event["fatal"] for event in failures] == [False, False, True]


@pytest.mark.soak
def test_row_09_all_but_one_raise_and_the_one_goes_on(tmp_path, undisturbed):
    """Different exceptions, each shown once in full."""
    faults = (
        fault(0, "data", step=9, what="raise", always=True, incarnation=-1),
        fault(2, "data", step=9, what="other", always=True, incarnation=-1),
    )
    with run(tmp_path, *faults) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert job.output.count("RuntimeError: planned failure in data at step 9 on slot 0\n") >= 1
        assert "LookupError: planned other failure on slot 2, with no UTF-8: \\udcff\n" in job.output
        assert [line["workers"] for line in job.lines("ledger.jsonl")][9] == [1]


def test_row_10_code_that_raises_on_all_workers_ends_the_job_with_the_traceback(tmp_path):
    with run(tmp_path, fault(-1, "data", step=5, what="raise", always=True), workers=2) as job:
        assert job.finish() == 3, job.logs()
        assert "planned failure in data at step 5" in job.output
        summary = job.summary
        assert summary["status"] == "failed" and "failed on every worker at step 6" in summary["message"]
        assert "Traceback" in summary["traceback"] and str(FAULTY) in summary["traceback"]
        assert len(job.events("worker_started")) == 2
        assert job.processes_left() == []


@pytest.mark.soak
def test_row_10_a_sample_that_nobody_can_read_is_not_tried_for_ever(tmp_path):
    """Whoever has its shard leaves, and the next one has it then. The floor wants all of them back: a restart loop."""
    sample = str(batches("fixed", 1000, 48, 8, 0).shard_ids(48 * 5, 0)[0][0])
    options = ("--min-workers", "2", "--set", f"raising_sample={sample}")
    with run(tmp_path, workers=2, options=options) as job:
        assert job.finish() == 3, job.logs()
        assert "failed on every worker at step 6" in job.summary["message"]
        assert f"sample {sample} is broken" in job.summary["message"]
        assert job.events("below_floor")
        assert len(job.events("worker_started")) <= 4
        assert [line["step"] for line in job.lines("ledger.jsonl")] == [1, 2, 3, 4, 5]
        assert job.processes_left() == []


@pytest.mark.soak
def test_row_10_sys_exit_on_all_workers_ends_the_job_like_any_failure(tmp_path):
    with run(tmp_path, fault(-1, "data", step=5, what="exit", always=True)) as job:
        assert job.finish() == 3, job.logs()
        assert "SystemExit: planned exit" in job.output


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("start", "raise"),
        pytest.param("start", "exit", marks=pytest.mark.soak),
        pytest.param("length", "raise", marks=pytest.mark.soak),
    ],
)
def test_row_10_at_start_up_on_all_workers(tmp_path, where, what):
    with run(tmp_path, fault(-1, where, what=what, always=True, incarnation=-1), workers=2) as job:
        assert job.finish() == 3, job.logs()
        assert f"planned failure in {where}" in job.output or "SystemExit: planned exit" in job.output
        assert job.lines("ledger.jsonl") == []
        assert len(job.events("worker_started")) <= 4
        assert job.processes_left() == []


@pytest.mark.soak
def test_row_11_retry_finds_a_passing_fault(tmp_path, undisturbed):
    with run(tmp_path, fault(1, "data", step=20, what="nan")) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert kinds(job) == [("nonfinite", 1)]
        (event,) = job.events("gradient_not_finite")
        assert (event["step"], event["slots"], event["shards"], event["action"]) == (20, [1], [3], "retry")
        assert event["num_shards"] == 1 and event["loss"] is None
        assert "step 21: not finite is the gradient or the loss of shard 3 on slot 1" in job.output
        assert "the step again (1 of 2 times)" in job.output


@pytest.mark.soak
def test_row_11_retry_ends_the_job_if_it_is_no_passing_fault(tmp_path):
    with run(tmp_path, options=BAD_SAMPLE) as job:
        assert job.finish() == 3, job.logs()
        events = job.events("gradient_not_finite")
        assert [event["action"] for event in events] == ["retry", "retry", "stop"]
        assert len({event["step"] for event in events}) == 1
        summary = job.summary
        assert summary["status"] == "failed" and summary["traceback"] == ""
        assert "It was so 3 times in a row" in summary["message"] and "on slot" in summary["message"]
        assert [line["step"] for line in job.lines("ledger.jsonl")] == list(range(1, events[0]["step"] + 1))
        assert job.processes_left() == []


def test_row_11_skip_is_the_same_in_a_disturbed_job_and_in_a_plain_process(tmp_path):
    alone = plain_run(tmp_path / "alone", int(STEPS), *BAD_SAMPLE, *SKIP)
    with run(tmp_path, fault(0, "exchange", step=30), options=(*BAD_SAMPLE, *SKIP)) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, alone)
        skipped = [line["step"] for line in job.lines("ledger.jsonl") if line.get("skipped")]
        assert len(skipped) >= 2  # one in each pass over 1000 samples, 48 to a step
        assert [event["step"] + 1 for event in job.events("gradient_not_finite")] == skipped
        assert [line["step"] for line in job.lines("metrics.jsonl") if line.get("skipped")] == skipped
        assert [kind for kind, _ in kinds(job)].count("nonfinite") == len(skipped)


@pytest.mark.soak
def test_row_11_stop(tmp_path):
    """In a job at once; in a plain process with the same words."""
    options = ("--set", "faults.nonfinite=stop")
    with run(tmp_path, fault(1, "data", step=20, what="nan"), workers=2, options=options) as job:
        assert job.finish() == 3, job.logs()
        assert "step 21: not finite is the gradient or the loss of shard 4 on slot 1" in job.summary["message"]
        assert job.lines("ledger.jsonl")[-1]["step"] == 20
    alone = plain_run(tmp_path / "alone", int(STEPS), *options, *BAD_SAMPLE, exit_code=3)
    assert "on slot 0" in alone["message"] and "Nothing of this step was applied" in alone["message"]
