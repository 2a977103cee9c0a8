"""What can be wrong before any worker starts: one message, exit code 2, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from elastic_train import cli
from elastic_train.errors import UsageError
from elastic_train.launch import host, job
from elastic_train.launch.check import CheckFailed
from elastic_train.launch.host import without_secret
from elastic_train.launch.options import JobOptions, address_towards
from elastic_train.launch.signals import Signals
from elastic_train.launch.supervisor import JobEnd
from elastic_train.telemetry.records import RunDirectory

RECIPE = "recipes/linear.py"


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.fixture(autouse=True)
def no_check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most errors must be found before the recipe's own process is started."""

    def refuse(*_: object) -> None:
        raise AssertionError("the check must not have been started")

    monkeypatch.setattr(job, "check", refuse)
    monkeypatch.setattr(host, "check", refuse)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs a command that must be refused; returns its message."""
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("elastic-train: ")
    assert not psutil.Process().children()
    return captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "--workers 0: train with at least one worker"),
        (["--workers", "-1"], "--workers -1"),
        (["--min-workers", "0"], "--min-workers 0: use at least 1"),
        (["--workers", "2", "--min-workers", "3"], "--min-workers 3 exceeds --workers 2"),
        (["--workers", "2", "--slots", "1-2"], "--slots names slot 2"),
        (["--slots", "a"], "--slots a: write slots as"),
        (["--slots", "1,1"], "--slots 1,1: name each slot once"),
        (["--slots", "\N{SUPERSCRIPT TWO}"], "write slots as"),
        (["--slots", "0-99999999999"], "a job has at most 65536 workers"),
        (["--workers", "99999999999"], "a job has at most 65536 workers"),
        (["--workers", "2", "--coordinator", "host"], "--coordinator: 'host' is no address"),
        (["--workers", "2", "--coordinator", "host:x"], "--coordinator: 'host:x' is no address"),
        (["--bind", "9000"], "--bind 9000: write HOST:PORT"),
        (["--bind", "127.0.0.1:70000"], "write HOST:PORT"),
        (["--coordinator", "127.0.0.1:1"], "--coordinator needs --workers"),
    ],
)
def test_numbers_and_addresses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], message: str
) -> None:
    run_dir = tmp_path / "run"
    assert message in refused(capsys, "run", RECIPE, "--run-dir", str(run_dir), *options)
    assert not run_dir.exists()


@pytest.mark.parametrize("where", [[], ["--coordinator", "127.0.0.1:1"]])
@pytest.mark.parametrize("secret", ["geh\N{LATIN SMALL LETTER E WITH ACUTE}im", "secret\n"])
def test_a_secret_that_no_call_can_carry(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: list[str], secret: str
) -> None:
    monkeypatch.setenv("ELASTIC_TRAIN_SECRET", secret)
    message = refused(capsys, "run", RECIPE, "--workers", "2", "--run-dir", str(tmp_path / "run"), *where)
    assert "ELASTIC_TRAIN_SECRET holds what no call can carry" in message and secret not in message


def test_set_without_a_value_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "digits_mlp", "--set"]) == 2
    assert "--set: expected key=value" in capsys.readouterr().err


def test_verify_faults_says_before_it_begins_that_the_steps_are_too_few(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "runs"
    message = refused(capsys, "verify-faults", RECIPE, "--steps", "14", "--run-dir", str(run_dir))
    assert "--steps 14: too few for the 5 faults" in message
    assert not run_dir.exists()


def test_port_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        run_dir = tmp_path / "run"
        message = refused(capsys, "run", RECIPE, "--bind", address, "--run-dir", str(run_dir))
    assert f"--bind {address}: cannot listen there (Address already in use" in message
    assert not run_dir.exists()


def test_run_directory_that_is_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    assert str(path) in refused(capsys, "run", RECIPE, "--run-dir", str(path))
    assert str(path) in refused(capsys, "run", RECIPE, "--run-dir", str(path / "below"))
    assert path.read_text() == "x"


def test_run_directory_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "run", RECIPE, "--run-dir", "/proc/no_such_place")
    assert "/proc/no_such_place" in message and "--run-dir" in message


def test_run_directory_that_holds_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    options = ("--run-dir", str(tmp_path), "--resume", "never")
    assert "holds a run already, and --resume never was given" in refused(capsys, "run", RECIPE, *options)


def test_run_directory_that_another_job_is_writing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as records:
        records.write_job({"address": None})
        assert "another job is writing" in refused(capsys, "run", RECIPE, "--run-dir", str(tmp_path))


@pytest.mark.parametrize("order", [["stop"], ["save"], ["drain", "--worker", "0"]])
def test_orders_to_no_job(capsys: pytest.CaptureFixture[str], tmp_path: Path, order: list[str]) -> None:
    assert "no run directory" in refused(capsys, *order, str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "job.json").write_text(json.dumps({"address": address}))
    (tmp_path / "secret").write_text("x")
    assert "no job runs in" in refused(capsys, *order, str(tmp_path))
    (tmp_path / "job.json").write_text(json.dumps({"address": None}))
    assert "one plain process" in refused(capsys, *order, str(tmp_path))
    (tmp_path / "job.json").write_text("[]")
    assert "cannot read what leads to the job" in refused(capsys, *order, str(tmp_path))


def test_more_workers_than_gpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for options in (["--workers", "3"], []):
        message = refused(capsys, "run", RECIPE, "--run-dir", str(tmp_path / "run"), *options)
        assert re.search(r"need \d GPUs, one each; 0 found here", message)


def test_a_refused_recipe_leaves_no_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CheckFailed(2)

    monkeypatch.setattr(job, "check", refuse)
    run_dir = tmp_path / "run"
    assert cli.main(["run", RECIPE, "--run-dir", str(run_dir)]) == 2
    assert capsys.readouterr().err == ""  # the process that checks has said it
    assert not run_dir.exists()


def test_agent_without_a_secret(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(host.SECRET_VARIABLE, raising=False)
    monkeypatch.setattr(host, "check", lambda *_: None)
    argv = ["run", RECIPE, "--coordinator", "127.0.0.1:1", "--workers", "2", "--run-dir", str(tmp_path / "x")]
    assert "ELASTIC_TRAIN_SECRET" in refused(capsys, *argv)
    assert not (tmp_path / "x").exists()


def test_an_error_gives_the_terminal_no_orders(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no\\x1b[2Jrun is no run directory" in refused(capsys, "status", "no\x1b[2Jrun")


def test_status_of_no_run_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert str(tmp_path) in refused(capsys, "status", str(tmp_path))


@pytest.mark.parametrize(
    "argv",
    [[], ["run"], ["run", RECIPE, "--no-such-option"], ["run", RECIPE, "--workers", "many"], ["walk"]],
)
def test_wrong_options_end_with_2(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2


@pytest.mark.parametrize(
    "argv",
    [
        ["run", RECIPE, "--workers", "two"],
        ["run", RECIPE, "--min-workers", "two"],
        ["run", RECIPE, "--steps", "1e3"],
        ["run", RECIPE, "--seed", "None"],
        ["verify-faults", RECIPE, "--workers", "two"],
        ["resize", "runs/x", "--workers", "two"],
        ["drain", "runs/x", "--worker", "two"],
        ["checkpoint", "diff", "runs/x", "--other-step", "last"],
    ],
)
def test_a_number_that_is_none_is_told_in_one_line(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    option, text = argv[-2:]
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    line = f"elastic-train: {option} {text}: not a whole number; write digits, as in {option} 4\n"
    assert capsys.readouterr().err == line


def test_a_number_of_a_plain_run_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.parse_plain(["--steps", "ten"], prog="recipes/linear.py")
    assert end.value.code == 2
    assert capsys.readouterr().err == "elastic-train: --steps ten: not a whole number; write digits, as in --steps 4\n"


def test_options_reach_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(job, "run_job", lambda options, environ: seen.append(options) or 0)
    argv = ["run", RECIPE, "--workers", "3", "--steps", "7", "--seed", "5", "--slots", "0-1"]
    argv += ["--set", "width=3", "faults.keepalive_s=2", "--set", "batch_size=8", "--config", "a.toml"]
    assert cli.main(argv) == 0
    (options,) = seen
    assert options.overrides == ("width=3", "faults.keepalive_s=2", "batch_size=8")
    assert (options.workers, options.min_workers, options.slots) == (3, 1, (0, 1))
    assert re.fullmatch(r"runs/linear-\d{8}-\d{6}", str(options.run_dir))
    request = options.check_request(3)
    assert request.flags == {"steps": 7, "seed": 5} and request.config == "a.toml"


def test_plain_options() -> None:
    plain = cli.parse_plain(["--steps", "4", "--set", "a=1", "b=2", "--set", "c=3"], prog="recipes/linear.py")
    assert (plain.steps, plain.run_dir, plain.seed, plain.config) == (4, None, None, None)
    assert plain.set == ("a=1", "b=2", "c=3")
    assert cli.parse_plain([], prog="x").set == ()


def test_stacks_asked_of_a_coordinator_without_workers_do_not_end_the_job() -> None:
    """SIGUSR1 is no request to stop, and there is no agent here to hand it to."""
    supervisor = SimpleNamespace(end=None)
    supervisor.tick = lambda: setattr(supervisor, "end", JobEnd(0, "all steps done"))
    signals = SimpleNamespace(wait=lambda _: [signal.SIGUSR1], num_stops=0)
    assert job._watch(supervisor, None, SimpleNamespace(), signals, None).exit_code == 0  # type: ignore[arg-type]


def test_ctrl_z_does_not_stop_the_process_that_the_workers_need() -> None:
    ends, shown = iter([None, JobEnd(0, "all steps done")]), []
    supervisor = SimpleNamespace(end=None)
    supervisor.tick = lambda: setattr(supervisor, "end", next(ends))
    display = SimpleNamespace(note=shown.append)
    with Signals(signal.SIGTSTP) as signals:
        os.kill(os.getpid(), signal.SIGTSTP)
        assert job._watch(supervisor, None, display, signals, None).exit_code == 0  # type: ignore[arg-type]
    assert len(shown) == 1 and "Ctrl-Z" in shown[0]


def test_slots() -> None:
    assert cli.parse_slots(None) is None
    assert cli.parse_slots("0-2,7, 5") == (0, 1, 2, 5, 7)
    for text in ("", "3-1", "1-2,2"):
        with pytest.raises(UsageError):
            cli.parse_slots(text)


def test_the_job_process_imports_no_jax() -> None:
    code = (
        "import elastic_train.cli, elastic_train.launch.job, elastic_train.launch.host, sys, json;"
        "print(json.dumps(sorted(name for name in sys.modules if name.split('.')[0] in ('jax', 'flax'))))"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=os.environ)
    assert json.loads(printed.stdout) == []


def test_a_wrong_chaos_file_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chaos, run_dir = tmp_path / "chaos.toml", tmp_path / "run"
    run = ("run", "recipes.linear", "--workers", "2", "--run-dir", str(run_dir), "--chaos", str(chaos))
    assert "cannot be read" in refused(capsys, *run)
    chaos.write_text('[[fault]]\nkind = "kil"\nstep = 1\n')
    assert "Did you mean 'kill'?" in refused(capsys, *run)
    chaos.write_text('[[fault]]\nkind = "kill"\nstep = 1\nslot = 2\n')
    monkeypatch.setattr(job, "check", lambda *_: SimpleNamespace(steps=100))
    assert "fault 1: slot = 2: the job has slots 0 to 1" in refused(capsys, *run)
    assert not run_dir.exists()
    assert "leave --coordinator away" in refused(capsys, *run, "--coordinator", "127.0.0.1:1")
    assert "leave --slots away" in refused(capsys, *run, "--slots", "0")


def test_faults_cannot_be_verified_with_one_worker(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    verify = ("verify-faults", "recipes.linear", "--workers", "1", "--run-dir", str(tmp_path / "run"))
    assert "nobody would be left" in refused(capsys, *verify)


def options(bind: str, address: str = "") -> JobOptions:
    """The options of a job with nothing special but these."""
    nothing = {"config": None, "overrides": (), "workers": 2, "slots": None, "steps": None, "seed": None}
    return JobOptions(recipe="linear", min_workers=1, run_dir=Path("x"), bind=bind, address=address, **nothing)


def test_what_other_hosts_know_the_coordinator_by() -> None:
    assert options("10.0.0.1:9000").coordinator_host == "10.0.0.1"
    assert options("10.0.0.1:9000", "10.0.1.1").coordinator_host == "10.0.0.1"  # workers have a network of their own
    assert options("0.0.0.0:9000", "10.0.0.1").coordinator_host == "10.0.0.1"
    with pytest.raises(UsageError, match="is every address of this host: give --address"):
        _ = options("0.0.0.0:9000").coordinator_host


def test_the_own_address_is_the_one_on_the_way_to_the_coordinator() -> None:
    assert address_towards("127.0.0.1:9000") == "127.0.0.1"
    assert address_towards("localhost:9000") in ("127.0.0.1", "::1")
    with pytest.raises(OSError):
        address_towards("no-such-host.invalid:9000")


def test_user_code_is_not_handed_the_secret() -> None:
    assert without_secret({"ELASTIC_TRAIN_SECRET": "x", "HOME": "/"}) == {"HOME": "/"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_row_19_a_signal_before_the_job_has_begun_ends_the_command_with_130(
    tmp_path: Path, number: signal.Signals
) -> None:
    recipe = tmp_path / "slow.py"
    recipe.write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-m", "elastic_train", "run", str(recipe), "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(30) == 130
    checking = int((tmp_path / "pid").read_text())
    while psutil.pid_exists(checking):
        assert time.monotonic() < end
        time.sleep(0.01)
