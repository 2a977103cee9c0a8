"""What a run's records and a person are told of saves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_SAVED = ("step", "path", "num_bytes", "seconds", "stall_s", "deleted", "left_out")


def tell(save: Mapping[str, Any], event: Callable[..., Any], show: Callable[[str], None], **who: Any) -> None:
    """Notes how a save ended.

    Args:
      save: fields of `checkpoint.saves.Save`.
      event: writes an event.
      show: shows a line to a person; nothing is shown of a save that went well by itself.
      who: the member that saved, for the event.
    """
    step = save["step"]
    if save["error"]:
        event("checkpoint_failed", **who, step=step, error=save["error"])
        goes_on = "the run ends without it" if save["is_last"] else "training goes on, and it is tried again"
        show(f"step {step} could not be saved: {save['error']}; {goes_on}")
        return
    event("checkpoint_saved", **who, **{name: save[name] for name in _SAVED})
    if save["trouble"]:
        show(f"step {step} is saved; {save['trouble']}")
    elif save["request"]:
        show(f"step {step} is saved: {save['path']}")
