"""Where a run goes on, as it is told. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from elastic_train.config import CheckpointConfig

Mode = Literal["never", "auto", "must"]
"""Whether a run that is there is gone on with: never, if there is one, or nothing else."""


NAME = "checkpoints"
"""The checkpoint directory's name in a run directory."""


def checkpoint_directory(run_dir: Path, config: CheckpointConfig) -> str:
    """Where a run's checkpoints are."""
    return config.path or str(run_dir / NAME)


@dataclass(frozen=True)
class Resume:
    """A run goes on.

    Attributes:
      step, samples: where; 0 if there is no checkpoint, so that it begins again.
      path: the checkpoint; empty if there is none.
      records: see `RunDirectory`.
      damaged: what was found damaged and set aside, in words.
      differences: what is done differently from now on, one line for each setting.
    """

    step: int = 0
    samples: int = 0
    path: str = ""
    records: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Resume:
        """Inverse of `dataclasses.asdict`, where JSON has made lists of tuples."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**fields)

    @property
    def message(self) -> str:
        """What a person is told."""
        lines = list(self.damaged)
        if self.path:
            lines.append(f"resuming from {self.path}: step {self.step}, {self.samples} samples seen")
        else:
            lines.append("there is no checkpoint to resume from: the run begins again at step 0")
        if self.differences:
            lines.append("settings that differ from the saved ones:")
            lines += [f"  {line}" for line in self.differences]
        return "\n".join(lines)

    def tell(self, event: Callable[..., Any], show: Callable[[str], None]) -> None:
        """Says so in the run's events and to a person."""
        for text in self.damaged:
            event("checkpoint_damaged", text=text)
        about = {"step": self.step, "samples": self.samples, "path": self.path}
        event("run_resumed", **about, differences=list(self.differences))
        show(self.message)
