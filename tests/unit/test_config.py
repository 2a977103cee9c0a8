"""Defaults, then a TOML file, then --set, then flags; and every mistake gets a message that helps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config import Config, ConfigError, FaultConfig, report_interval_s, require, shards_note
from elastic_train.config_files import config_digest, resolve, to_toml


class Schedule(StrEnum):
    COSINE = "cosine"
    CONSTANT = "constant"


class Level(Enum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True, kw_only=True)
class Decay:
    rate: float = 0.1
    at: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SlowDecay(Decay):
    wait: int = 5


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(Config):
    learning_rate: float = 1e-3
    widths: tuple[int, ...] = (64, 64)
    kernel: tuple[int, float] = (3, 0.5)
    names: tuple[str, ...] = ()
    schedule: Schedule = Schedule.COSINE
    level: Level = Level.LOW
    dtype: Literal["float32", "bfloat16"] = "float32"
    mode: Literal["", "fast", "small"] = ""
    bits: Literal[8, 16] = 8
    nesterov: bool = False
    text: str = ""
    clip: float | None = None
    note: str | None = None
    decay: Decay = field(default_factory=SlowDecay)
    warm: Decay | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.widths) > 0, "widths", self.widths, "give at least one width")


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    return file


def error_of(*arguments, **keywords) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(RecipeConfig, *arguments, **keywords)
    return str(caught.value)


def test_defaults():
    assert resolve(RecipeConfig) == RecipeConfig()


def test_later_sources_win(tmp_path):
    file = write(tmp_path, "steps = 5\nseed = 6\nbatch_size = 32\n[faults]\nkeepalive_s = 1\nmax_restarts = 2\n")
    config = resolve(RecipeConfig, file, ["seed=7", "steps=8", "faults.keepalive_s=2"], {"steps": 9, "seed": None})
    assert (config.steps, config.seed, config.batch_size) == (9, 7, 32)
    assert config.faults == FaultConfig(keepalive_s=2.0, max_restarts=2)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("learning_rate=1e-4", "learning_rate", 1e-4),
        ("learning_rate=2", "learning_rate", 2.0),
        ("widths=8,16, 32", "widths", (8, 16, 32)),
        ("widths=[8, 16]", "widths", (8, 16)),
        ("widths=8", "widths", (8,)),
        ("names=", "names", ()),
        ("kernel=5,1", "kernel", (5, 1.0)),
        ("schedule=constant", "schedule", Schedule.CONSTANT),
        ("level=HIGH", "level", Level.HIGH),
        ("dtype=bfloat16", "dtype", "bfloat16"),
        ("bits=16", "bits", 16),
        ("nesterov=true", "nesterov", True),
        ("text=a = b", "text", "a = b"),
        ("clip=1.5", "clip", 1.5),
        ("clip=none", "clip", None),
        ("decay.wait=9", "decay", SlowDecay(wait=9)),
        ("decay.at=1,2", "decay", SlowDecay(at=(1, 2))),
        ("warm.rate=1", "warm", Decay(rate=1.0)),
    ],
)
def test_overrides_are_typed_by_the_field(override, name, value):
    result = getattr(resolve(RecipeConfig, overrides=[override]), name)
    assert result == value
    assert type(result) is type(value)


def test_a_group_can_be_taken_back():
    assert resolve(RecipeConfig, overrides=["warm.rate=1", "warm=none"]).warm is None
    assert resolve(RecipeConfig, overrides=["warm=none", "warm.rate=1"]).warm == Decay(rate=1.0)


def test_an_empty_table_opens_a_group_and_takes_nothing_back(tmp_path):
    assert resolve(RecipeConfig, write(tmp_path, "[warm]\n")).warm == Decay()
    assert resolve(RecipeConfig, write(tmp_path, "[faults]\n")).faults == FaultConfig()


def test_values_are_checked_once_all_sources_are_known(tmp_path):
    file = write(tmp_path, "shards = 128\n")
    assert resolve(RecipeConfig, file, ["batch_size=256"]).shards == 128
    assert "batch_size = 64" in error_of(file)


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("stpes=3", "'steps'"),
        ("keepalive_s=3", "'faults.keepalive_s'"),
        ("faults.keepalive=3", "'faults.keepalive_s'"),
        ("steps.x=3", "'steps'"),
    ],
)
def test_unknown_key_names_a_near_one_and_all_others(override, suggestion):
    message = error_of(overrides=[override])
    assert override.partition("=")[0] in message
    assert f"Did you mean {suggestion}?" in message
    assert "decay.wait" in message and "RecipeConfig" in message


def test_all_wrong_settings_are_told_at_once(tmp_path):
    file = write(tmp_path, "widhts = [3]\n")
    assert error_of(file, ["stpes=3", "learning_rate=0.5", "faults.keepalive=3"]).splitlines()[:3] == [
        f"unknown setting 'widhts' ({file}). Did you mean 'widths'?",
        "unknown setting 'stpes' (--set). Did you mean 'steps'?",
        "unknown setting 'faults.keepalive' (--set). Did you mean 'faults.keepalive_s'?",
    ]
    whole = error_of(overrides=["stpes=3", "faults.keepalive=3"])
    assert len(whole.splitlines()) == 3 and whole.count("RecipeConfig knows: ") == 1 and "faults.node_ids" in whole
    assert error_of(overrides=["steps", "seed=1", "=3"]).startswith("--set 'steps', '=3': expected key=value")
    wrong = error_of(overrides=["steps=many", "faults.keepalive_s=x", "faults.max_restarts=y", "nesterov=yes"])
    assert sorted(line.split(" ")[0] for line in wrong.splitlines()) == [
        "faults.keepalive_s",
        "faults.max_restarts",
        "nesterov",
        "steps",
    ]


def test_mistakes_of_all_kinds_are_told_at_once(tmp_path):
    file = write(tmp_path, 'batch_size = "big"\nclpi = 1.0\n[decay]\nrate = "fast"\n')
    overrides = ["stpes=3", "seed", "shards=0", "log_every=0", "widths=", "faults.keepalive_s=-1", "faults.node_ids=x"]
    *told, last = error_of(file, [*overrides, "faults.max_evictions=-1", "nesterov=no"]).splitlines()
    assert [line.partition(":")[0].partition("(")[0].strip() for line in told] == [
        "unknown setting 'clpi'",
        "unknown setting 'stpes'",
        "--set 'seed'",
        "batch_size = 'big'",
        "faults.node_ids = 'x'",
        "faults.max_evictions = -1",
        "faults.keepalive_s = -1.0",
        "nesterov = 'no'",
        "decay.rate = 'fast'",
        "shards = 0",
        "log_every = 0",
        "widths =",
    ]
    assert last.startswith("RecipeConfig knows: ")
    assert error_of(overrides=["stpes=3", "seed=-1"]).count("\n") == 2


def test_nothing_is_said_of_what_depends_on_a_setting_that_is_wrong(tmp_path):
    """Whatever was meant by it: a default in its place may not fit the others."""
    assert error_of(overrides=["shards=many", "batch_size=4"]).count("\n") == 0
    assert error_of(overrides=["shards=0", "batch_size=4"]) == "shards = 0: use at least one shard"
    assert error_of(overrides=["batch_size=many", "shards=128"]).startswith("batch_size = 'many'")
    timeouts = ["faults.doubt_timeout_s=x", "faults.step_timeout_s=15", "faults.keepalive_s=0", "seed=-1"]
    assert [line.split()[0] for line in error_of(overrides=timeouts).splitlines()] == [
        "faults.doubt_timeout_s",
        "faults.keepalive_s",
        "seed",
    ]
    # A default that does not fit what was given is nothing that can be replaced by a default; the rest is told.
    assert [line.split()[0] for line in error_of(overrides=["shards=128", "nesterov=no", "seed=-1"]).splitlines()] == [
        "nesterov",
        "batch_size",
    ]
    missing, text = tmp_path / "missing.toml", "--set steps=10"
    first, second = error_of(missing, ["steps=x", "batch_size=1"]).splitlines()  # the file may have had shards = 1
    assert "does not exist" in first and second.endswith(text)


def test_code_of_a_config_that_cannot_stand_a_wrong_value_hides_no_mistake():
    @dataclass(frozen=True, kw_only=True)
    class Divides(Config):
        path: str
        heads: int = 4
        width: int = 64

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.width == 13:
                raise ValueError("no width at all")
            require(self.width % self.heads == 0, "width", self.width, f"must be a multiple of heads ({self.heads})")

    with pytest.raises(ZeroDivisionError):
        resolve(Divides, overrides=["path=x", "heads=0"])
    with pytest.raises(ConfigError) as caught:
        resolve(Divides, overrides=["path=x", "heads=0", "seed=x"])
    assert str(caught.value).startswith("seed = 'x'") and "\n" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        resolve(Divides, overrides=["heads=x", "width=3"])
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["path:", "heads"]
    with pytest.raises(ValueError, match="no width at all"):
        resolve(Divides, overrides=["path=x", "width=13"])


def test_unknown_table_in_a_file(tmp_path):
    message = error_of(write(tmp_path, "[fault]\nkeepalive_s = 1\n"))
    assert "'fault.keepalive_s'" in message and "run.toml" in message and "'faults.keepalive_s'" in message
    assert "'nothing'" in error_of(write(tmp_path, "[nothing]\n"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=many", "a whole number; write for example --set steps=10"),
        ("steps=1e3", "a whole number"),
        ("learning_rate=fast", "a number"),
        ("nesterov=yes", "true or false"),
        ("schedule=linear", "one of cosine, constant"),
        ("level=1", "one of LOW, HIGH"),
        ("dtype=float64", "one of float32, bfloat16"),
        ("exchange_dtype=float32", 'expected bfloat16, or empty; write for example --set exchange_dtype="bfloat16"'),
        ("mode=x", 'expected one of fast, small, or empty; write for example --set mode="fast"'),
        ("widths=8,x", "a list, each item a whole number; write for example --set widths=[10, 10]"),
        ("kernel=1", "a list of 2: a whole number, a number"),
        ("widths=[1, ", "a list"),
        ("clip=x", 'a number or "none"'),
        ("faults=3", "faults is a group of settings; set its parts, for example faults.max_restarts"),
        ("decay=none", "decay is a group"),
    ],
)
def test_wrong_type_says_field_value_expectation_and_fix(override, expected):
    key, _, value = override.partition("=")
    message = error_of(overrides=[override])
    assert message.startswith(f"{key} = {value!r} (--set): ")
    assert expected in message


@pytest.mark.parametrize("line", ['steps = "3"', "steps = 3.0", "steps = true", "learning_rate = false", "text = 3"])
def test_toml_values_are_not_converted_silently(tmp_path, line):
    message = error_of(write(tmp_path, line))
    assert message.startswith(line.split(" ")[0])
    assert "run.toml" in message and "expected" in message


def test_range_errors_come_from_the_config_itself():
    assert error_of(overrides=["steps=0"]) == "steps = 0: train at least one step"
    assert error_of(overrides=["faults.keepalive_s=-1"]).startswith("faults.keepalive_s = -1.0")
    assert error_of(overrides=["widths="]).startswith("widths = ()")


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        (("doubt_timeout_s=130",), "step_timeout_s = 120.0: must exceed faults.doubt_timeout_s (130.0)"),
        (("step_timeout_s=700",), "first_step_timeout_s = 600.0: must be at least faults.step_timeout_s (700.0)"),
        (
            ("keepalive_s=0.2", "doubt_timeout_s=0.5", "step_timeout_s=0.75"),
            "step_timeout_s = 0.75: use at least 1 seconds",
        ),
        (("step_timeout_factor=1",), "step_timeout_factor = 1.0: use a number above 1"),
        (("straggler_factor=0.5",), "straggler_factor = 0.5: use a number above 1"),
        (("max_evictions=-1",), "max_evictions = -1"),
        (("jax_heartbeat_timeout_s=inf",), "jax_heartbeat_timeout_s = inf: use at most 1000000 seconds"),
        (("keepalive_s=nan",), "keepalive_s = nan: use a positive number"),
    ],
)
def test_time_limits_in_the_wrong_order(settings, wrong):
    message = error_of(overrides=[f"faults.{setting}" for setting in settings])
    assert message.startswith(f"faults.{wrong}")


@pytest.mark.parametrize(("text", "line"), [("steps = 3\nseed = = 4\n", 2), ("steps = 3\nseed =", 2)])
def test_toml_syntax_errors_name_file_and_line(tmp_path, text, line):
    message = error_of(write(tmp_path, text))
    assert f"run.toml, line {line}: not valid TOML" in message


@pytest.mark.parametrize("text", ["steps = " + "[" * 3000 + "]" * 3000, "a" + ".a" * 3000 + " = 1"])
def test_settings_that_are_nested_too_deeply(tmp_path, text):
    assert "nested too deeply" in error_of(write(tmp_path, text))


def test_unreadable_files(tmp_path):
    assert "does not exist" in error_of(tmp_path / "missing.toml")
    assert "cannot be read" in error_of(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "cannot be read" in error_of(binary)


@pytest.mark.parametrize("override", ["steps", "=3", ""])
def test_override_without_key_or_value(override):
    assert "expected key=value" in error_of(overrides=[override])


@pytest.mark.parametrize("path", ["s3://bucket/run", "file:///tmp/run", "memory://run"])
def test_checkpoints_go_to_no_url_that_orbax_cannot_write_to(path: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.path = .*://.*gs://BUCKET/"):
        resolve(Config, overrides=[f"checkpoint.path={path}"])
    for good in ("gs://b/run", "gs://b"):
        assert resolve(Config, overrides=[f"checkpoint.path={good}"]).checkpoint.path == good


@pytest.mark.parametrize("path", ["gs://", "gs:///run"])
def test_checkpoints_in_an_object_store_are_in_a_bucket(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"checkpoint.path = '{path}': name the bucket: gs://BUCKET/"):
        resolve(Config, overrides=[f"checkpoint.path={path}"])


def test_a_setting_without_default_must_be_given():
    @dataclass(frozen=True, kw_only=True)
    class Needs(Config):
        path: str

    with pytest.raises(ConfigError, match="path: has no default"):
        resolve(Needs)
    assert resolve(Needs, overrides=["path=x"]).path == "x"


def test_an_annotation_that_no_setting_can_have_is_the_recipes_error():
    @dataclass(frozen=True, kw_only=True)
    class Odd(Config):
        table: dict = field(default_factory=dict)

    with pytest.raises(TypeError, match="table: a setting cannot be annotated with"):
        resolve(Odd, overrides=["table=3"])


def test_the_word_none_cannot_be_an_optional_text():
    with pytest.raises(ConfigError, match="note = 'none'"):
        to_toml(RecipeConfig(note="none"))


numbers = st.floats(allow_nan=False)
decays = st.builds(Decay, rate=numbers, at=st.lists(st.integers()).map(tuple))
configs = st.builds(
    RecipeConfig,
    steps=st.integers(1, 10**9),
    seed=st.integers(0, 2**32 - 1),
    learning_rate=numbers,
    widths=st.lists(st.integers(), min_size=1).map(tuple),
    kernel=st.tuples(st.integers(), numbers),
    names=st.lists(st.text()).map(tuple),
    schedule=st.sampled_from(Schedule),
    level=st.sampled_from(Level),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    bits=st.sampled_from([8, 16]),
    nesterov=st.booleans(),
    text=st.text(),
    clip=st.none() | numbers,
    note=st.none() | st.text().filter(lambda text: text != "none"),
    decay=st.builds(SlowDecay, rate=numbers, wait=st.integers()),
    warm=st.none() | decays,
    faults=st.builds(FaultConfig, keepalive_s=st.floats(1e-6, 9), max_restarts=st.integers(0)),
)


@given(configs)
def test_toml_round_trip(tmp_path_factory, config):
    file = tmp_path_factory.getbasetemp() / "round_trip.toml"
    file.write_text(to_toml(config), encoding="utf-8", newline="")
    again = resolve(RecipeConfig, file)
    assert again == config
    assert config_digest(again) == config_digest(config)


@given(st.integers(), numbers, st.text())
def test_overrides_round_trip(whole, number, text):
    config = resolve(RecipeConfig, overrides=[f"decay.wait={whole}", f"clip={number!r}", f"text={text}"])
    assert (config.decay.wait, config.clip, config.text) == (whole, number, text)  # type: ignore[attr-defined]


def test_digest_tells_configs_and_classes_apart():
    class Other(RecipeConfig):
        pass

    digests = {config_digest(c) for c in (RecipeConfig(), RecipeConfig(seed=1), Other(), Config())}
    assert len(digests) == 4
    assert config_digest(RecipeConfig(learning_rate=1)) == config_digest(RecipeConfig(learning_rate=1.0))


def test_nan_can_be_written(tmp_path):
    config = resolve(RecipeConfig, write(tmp_path, to_toml(RecipeConfig(learning_rate=math.nan))))
    assert math.isnan(config.learning_rate)


def test_prefetch_is_checked():
    assert Config(prefetch=0).prefetch == 0
    with pytest.raises(ConfigError, match="prefetch = -1: use 0"):
        Config(prefetch=-1)


@pytest.mark.parametrize(("shards", "workers", "each"), [(8, 4, 2), (8, 3, 3), (8, 1, 8)])
def test_more_shards_than_gpus_are_worth_a_note(shards: int, workers: int, each: int):
    note = shards_note(shards, workers)
    assert note and f"each computes up to {each} slices" in note and f"shards={workers} is the fastest" in note
    assert shards_note(workers, workers) is None


def test_reports_are_bounded_in_number_and_come_often_enough_for_the_watchdog() -> None:
    assert [report_interval_s(120.0, workers) for workers in (1, 250, 1000, 20_000)] == [0.5, 0.5, 2.0, 15.0]
    assert report_interval_s(1.0, 1000) == 0.125
