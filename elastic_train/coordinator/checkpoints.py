"""What the coordinator knows of saves, and who waits for one. Used from the event loop's thread only."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future

from elastic_train.coordinator import control_pb2
from elastic_train.membership.group import Identity
from elastic_train.telemetry import saves


class Checkpoints:
    """Hands requests to the members, and what became of them back.

    Args:
      tell_all: sends a message to all workers.
      event: writes an event.
      show: shows a line to the person who watches.
      has_checkpoints: the run goes on from one.
      saved_step: the newest that is known to be saved.
    """

    def __init__(
        self,
        tell_all: Callable[[control_pb2.ToWorker], object],
        event: Callable[..., object],
        show: Callable[[str], None],
        has_checkpoints: bool,
        saved_step: int = 0,
    ) -> None:
        self._tell_all, self._event, self._show = tell_all, event, show
        self._state = control_pb2.SaveState(has_checkpoints=has_checkpoints, saved_step=saved_step)
        self._asked = 0
        self._waiting: list[tuple[int, Future[control_pb2.SaveReply]]] = []

    @property
    def saved_step(self) -> int:
        """The newest step that is saved."""
        return self._state.saved_step

    def welcome(self) -> control_pb2.Welcome:
        """What a new worker is told."""
        return control_pb2.Welcome(save_state=self._state, save_asked=control_pb2.SaveAsked(number=self._asked))

    def ask(self, reply: Future[control_pb2.SaveReply]) -> None:
        """Somebody wants a save; `reply` is given when it has ended."""
        self._asked += 1
        self._waiting.append((self._asked, reply))
        self._tell_all(control_pb2.ToWorker(save_asked=control_pb2.SaveAsked(number=self._asked)))

    def saved(self, identity: Identity, message: control_pb2.Saved) -> None:
        """A member reports how a save ended."""
        save = json.loads(message.json)
        saves.tell(save, self._event, self._show, **identity._asdict())
        state = self._state
        if not save["error"]:
            state.saved_step = max(state.saved_step, message.step)
            state.has_checkpoints = True
        if save["is_last"]:
            state.ended_step = message.step
        state.answered = max(state.answered, save["request"])
        self._tell_all(control_pb2.ToWorker(save_state=state))
        reply = control_pb2.SaveReply(step=message.step, path=save["path"], error=save["error"])
        for _, future in [waiting for waiting in self._waiting if waiting[0] <= state.answered]:
            future.set_result(reply)
        self._waiting = [waiting for waiting in self._waiting if waiting[0] > state.answered]

    def loaded(self, identity: Identity, message: control_pb2.Loaded) -> None:
        """A member has begun with a checkpoint's state; with the seed's, if all were damaged."""
        self._state.saved_step = message.step
        self._tell_all(control_pb2.ToWorker(save_state=self._state))
        about = {"step": message.step, "samples": message.samples, "path": message.path, "seconds": message.seconds}
        self._event("checkpoint_loaded", **identity._asdict(), **about)

    def set_aside(self, message: control_pb2.SetAside) -> None:
        """A member has found a checkpoint damaged."""
        self._event("checkpoint_damaged", text=message.text)
        self._show(message.text)

    def close(self) -> None:
        """Nothing is saved any more: whoever waits is told."""
        for _, future in self._waiting:
            future.set_result(control_pb2.SaveReply(error="the job has ended without another save"))
        self._waiting = []
