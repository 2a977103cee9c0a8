"""Elastic training for Flax models on multi-controller JAX."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_train.checkpoint.weights import load_model as load_model
    from elastic_train.checkpoint.weights import load_params as load_params
    from elastic_train.config import CheckpointConfig as CheckpointConfig
    from elastic_train.config import Config as Config
    from elastic_train.config import FaultConfig as FaultConfig
    from elastic_train.data.grain_source import from_grain as from_grain
    from elastic_train.data.source import ArraySource as ArraySource
    from elastic_train.data.source import DataSource as DataSource
    from elastic_train.data.source import TokenSource as TokenSource
    from elastic_train.plain import main as main
    from elastic_train.state import TrainState as TrainState
    from elastic_train.step.mathematics import WeightedSum as WeightedSum
    from elastic_train.trainer import MembersChanged as MembersChanged
    from elastic_train.trainer import Recovered as Recovered
    from elastic_train.trainer import StepCommitted as StepCommitted
    from elastic_train.trainer import Trainer as Trainer

_HOMES = {
    "CheckpointConfig": "config",
    "Config": "config",
    "FaultConfig": "config",
    "ArraySource": "data.source",
    "DataSource": "data.source",
    "TokenSource": "data.source",
    "from_grain": "data.grain_source",
    "load_model": "checkpoint.weights",
    "load_params": "checkpoint.weights",
    "main": "plain",
    "TrainState": "state",
    "WeightedSum": "step.mathematics",
    "MembersChanged": "trainer",
    "Recovered": "trainer",
    "StepCommitted": "trainer",
    "Trainer": "trainer",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    # Late: the agent and the coordinator import this package too, and must not import jax.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
