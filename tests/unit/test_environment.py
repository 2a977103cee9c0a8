"""What a worker is told, and which devices it gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.coordinator.security import PLAIN
from elastic_train.errors import UsageError
from elastic_train.launch import devices
from elastic_train.launch.environment import (
    JaxRuntime,
    JobSettings,
    WorkerSettings,
    fixed_differences,
    spare_environment,
    told_later,
    with_shared_memory,
    worker_environment,
)
from elastic_train.membership.group import Identity


def job(platform: str = "cpu") -> JobSettings:
    return JobSettings(
        coordinator="127.0.0.1:9000",
        secret="s3cret",
        run_dir=Path("/runs/a b"),
        recipe="recipes.linear",
        config_file=Path("/runs/a b/config.toml"),
        platform=platform,
        keepalive_s=2.5,
        heartbeat_timeout_s=60.0,
        min_workers=1,
        deterministic=False,
        tls=PLAIN.dump(),
    )


def environment(
    environ: dict[str, str], platform: str = "cpu", device: str | None = None, host_id: str = ""
) -> dict[str, str]:
    return worker_environment(
        environ,
        Identity(slot=2, incarnation=3, node=17),
        job(platform),
        device=device,
        jax=JaxRuntime("127.0.0.1:9001", 256, False),
        host_address="10.0.0.7",
        agent_pid=4321,
        host_id=host_id,
    )


def test_worker_reads_what_the_agent_wrote() -> None:
    settings = WorkerSettings.read(environment({}))
    assert settings.job == job()
    assert settings.identity == Identity(2, 3, 17)
    assert settings.jax == JaxRuntime("127.0.0.1:9001", 256, False)
    assert (settings.host_address, settings.agent_pid) == ("10.0.0.7", 4321)
    assert not settings.leave_requested.is_set()


def test_faults_cannot_be_asked_for_from_outside() -> None:
    assert WorkerSettings.read(environment({"ELASTIC_TRAIN_CHAOS": "/somewhere"})).job.chaos == ""


def test_names_of_the_variables() -> None:
    environ = environment({})
    assert environ["ELASTIC_TRAIN_SLOT"] == "2"
    assert environ["ELASTIC_TRAIN_INCARNATION"] == "3"
    assert environ["ELASTIC_TRAIN_NODE"] == "17"
    assert environ["ELASTIC_TRAIN_AGENT_PID"] == "4321"
    assert environ["PYTHONUNBUFFERED"] == environ["PYTHONFAULTHANDLER"] == "1"


def test_missing_setting_is_an_error() -> None:
    environ = environment({})
    del environ["ELASTIC_TRAIN_NODE"]
    with pytest.raises(KeyError, match="ELASTIC_TRAIN_NODE"):
        WorkerSettings.read(environ)


def test_cpu_leaves_gpu_settings_alone() -> None:
    environ = environment({"XLA_FLAGS": "--xla_dump_to=/d", "JAX_PLATFORMS": "cpu,cuda"})
    assert environ["JAX_PLATFORMS"] == "cpu"
    assert environ["XLA_FLAGS"] == "--xla_dump_to=/d"
    assert "CUDA_VISIBLE_DEVICES" not in environ


def test_gpu_gets_its_device_and_the_flags_that_abort_needs() -> None:
    environ = environment(
        {"XLA_FLAGS": "--xla_dump_to=/d  --xla_gpu_nccl_async_execution=false", "NCCL_NVLS_ENABLE": "0"},
        platform="cuda",
        device="3",
    )
    assert environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert environ["XLA_FLAGS"].split() == [
        "--xla_dump_to=/d",
        "--xla_gpu_nccl_async_execution=false",
        "--xla_gpu_nccl_async_execution=true",
        "--xla_gpu_nccl_blocking_communicators=false",
        "--xla_gpu_shard_autotuning=false",
    ]
    assert environ["XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE"] == "1"
    assert environ["NCCL_NVLS_ENABLE"] == "0"
    assert "JAX_PLATFORMS" not in environ


@pytest.mark.parametrize(("given", "told"), [("cuda", "cuda,cpu"), ("cpu,cuda", "cpu,cuda"), ("gpu", "gpu,cpu")])
def test_gpu_workers_have_a_cpu_too(given: str, told: str) -> None:
    assert environment({"JAX_PLATFORMS": given}, platform="cuda", device="0")["JAX_PLATFORMS"] == told


def test_gpu_without_device_is_an_error() -> None:
    with pytest.raises(ValueError, match="slot 2"):
        environment({}, platform="cuda")


@pytest.mark.parametrize(("platform", "device"), [("cpu", None), ("cuda", "3")])
def test_a_spare_can_be_told_what_makes_it_a_worker(platform: str, device: str | None) -> None:
    environ = {"HOME": "/h", "XLA_FLAGS": "--xla_dump_to=/d", "JAX_ENABLE_X64": "1", "CUDA_VISIBLE_DEVICES": "3,4"}
    spare = spare_environment(environ, job(platform), agent_pid=4321)
    worker = environment(environ, platform, device)
    assert fixed_differences(spare, worker) == []
    # Nothing of the spare's own is left, but for what says that it is one.
    assert {**spare, **told_later(worker)} == {**worker, "ELASTIC_TRAIN_SPARE": "1"}


def test_a_spare_sees_no_gpu_and_knows_no_secret() -> None:
    spare = spare_environment({"CUDA_VISIBLE_DEVICES": "3"}, job("cuda"), agent_pid=4321)
    assert spare["CUDA_VISIBLE_DEVICES"] == ""
    assert "s3cret" not in spare.values()


def test_what_is_read_when_jax_is_imported_cannot_be_told_later() -> None:
    worker = environment({}, "cuda", "0")
    for name in ("XLA_FLAGS", "JAX_ENABLE_X64", "XLA_PYTHON_CLIENT_MEM_FRACTION", "PYTHONPATH"):
        assert fixed_differences(spare_environment({}, job("cuda"), 1), {**worker, name: "other"}) == [name]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_count_gpus", lambda: 4)
    monkeypatch.setattr(devices, "has_cuda_plugin", lambda: True)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,0", ["2", "0"]),
        (" 1 , 3 ", ["1", "3"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["1"]),
        ("1,9,2", ["1"]),
        ("GPU-8f3a,MIG-1b", ["GPU-8f3a", "MIG-1b"]),
        ("0,0,1", ["0", "0", "1"]),
    ],
)
def test_visible_gpus(four_gpus: None, visible: str | None, expected: list[str]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert devices.visible_gpus(environ) == expected


def test_platform(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.pick_platform({}) == "cuda"
    assert devices.pick_platform({"JAX_PLATFORMS": "cpu"}) == "cpu"
    assert devices.pick_platform({"JAX_PLATFORMS": "gpu"}) == "cuda"
    assert devices.pick_platform({"CUDA_VISIBLE_DEVICES": ""}) == "cpu"
    with pytest.raises(UsageError, match="JAX_PLATFORMS=tpu"):
        devices.pick_platform({"JAX_PLATFORMS": "tpu"})
    monkeypatch.setattr(devices, "has_cuda_plugin", lambda: False)
    assert devices.pick_platform({}) == "cpu"


def test_devices_of_slots(four_gpus: None) -> None:
    assert devices.assign_devices("cpu", range(9), {}) == dict.fromkeys(range(9))
    assert devices.assign_devices("cuda", [4, 5], {"CUDA_VISIBLE_DEVICES": "3,1,0"}) == {4: "3", 5: "1"}
    assert devices.assign_devices("cuda", [0, 1], {"CUDA_VISIBLE_DEVICES": "2,2"}) == {0: "2", 1: "2"}
    with pytest.raises(UsageError, match=r"5 workers need 5 GPUs, one each; 4 found"):
        devices.assign_devices("cuda", range(5), {})
    with pytest.raises(UsageError, match=r"2 found here \(CUDA_VISIBLE_DEVICES=0,1\)"):
        devices.assign_devices("cuda", range(3), {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_devices_of_slots_that_come_later(four_gpus: None) -> None:
    several = devices.Devices("cuda", [0, 1], {"CUDA_VISIBLE_DEVICES": "2,2,2,1"})
    assert (several.num_spare, several.sharing) == (2, 3)
    assert [several.of(slot) for slot in (0, 1, 2, 3)] == ["2", "2", "2", "1"]
    with pytest.raises(OSError, match="slot 4: all GPUs"):
        several.of(4)
    assert devices.Devices("cuda", [0], {}).sharing == devices.Devices("cpu", [0], {}).sharing == 1


def test_workers_that_share_a_gpu_share_its_memory_and_are_hosts_to_nccl() -> None:
    assert with_shared_memory({"A": "b"}, 1) == {"A": "b"}
    assert with_shared_memory({"A": "b"}, 4) == {"A": "b", "XLA_CLIENT_MEM_FRACTION": "0.200"}
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):  # jax refuses to be given both
        assert with_shared_memory({name: "0.4"}, 2) == {name: "0.4"}
    assert "NCCL_HOSTID" not in environment({}, "cuda", "0")
    shares = environment({}, "cuda", "0", host_id="here-2")
    assert shares["NCCL_HOSTID"] == "here-2"
    assert fixed_differences(spare_environment({}, job("cuda"), 1), shares) == []
