"""Elastic training for Flax models on multi-controller JAX."""

from elastic_train.config import Config as Config
from elastic_train.config import FaultConfig as FaultConfig
from elastic_train.data.source import ArraySource as ArraySource
from elastic_train.data.source import DataSource as DataSource
from elastic_train.data.source import TokenSource as TokenSource
from elastic_train.plain import main as main
from elastic_train.step.local import WeightedSum as WeightedSum
from elastic_train.trainer import MembersChanged as MembersChanged
from elastic_train.trainer import Recovered as Recovered
from elastic_train.trainer import StepCommitted as StepCommitted
from elastic_train.trainer import Trainer as Trainer
