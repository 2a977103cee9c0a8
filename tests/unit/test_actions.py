"""How the coordinator carries out what concerns many workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.coordinator.actions import SECONDS_PER_NEWS, Actions
from elastic_train.coordinator.connections import Connections
from elastic_train.membership import roster_events as r
from elastic_train.membership.group import Identity, View

A, B, C, D, E = (Identity(slot, 0, slot + 1) for slot in range(5))


class Scene:
    """Members A and B and three more workers, with streams that only keep what is sent."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.timers: dict[str, tuple[float, Any]] = {}
        self.buried: list[int] = []
        self.connections = Connections()
        self.sent: dict[int, list[Any]] = {}
        for identity in (A, B, C, D, E):
            sent = self.sent[identity.node] = []
            self.connections.workers[identity.node] = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
        self.actions = Actions(
            self.connections,
            SimpleNamespace(event=lambda name, **fields: self.events.append((name, fields))),  # type: ignore[arg-type]
            SimpleNamespace(tombstone=self.buried.append),  # type: ignore[arg-type]
            SimpleNamespace(  # type: ignore[arg-type]
                after=lambda name, delay_s, call: self.timers.update({name: (delay_s, call)}),
                waits_for=self.timers.__contains__,
            ),
            view=lambda: View(1, (A, B)),
            note=lambda *_, **__: None,
            timer_over=lambda _: None,
            end=lambda _: None,
            next_generation=lambda _: None,
        )

    def announce(self, *joiners: Identity) -> None:
        self.actions.carry_out([r.Announce((A.node, B.node), joiners)], {})

    def candidates(self, node: int) -> list[list[int]]:
        """The lists that a member got."""
        return [[joiner.node for joiner in message.candidates.joiners] for message in self.sent[node]]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_several_deaths_at_once_are_one_message(scene: Scene) -> None:
    told = (A.node, B.node)
    scene.actions.carry_out(
        [r.Tombstone(C), r.Tombstone(D), r.Abort(C, told), r.Abort(D, told), r.Abort(E, (A.node,))], {}
    )
    assert scene.buried == [C.node, D.node]
    assert [list(message.abort.nodes) for message in scene.sent[A.node]] == [[C.node, D.node], [E.node]]
    assert [list(message.abort.nodes) for message in scene.sent[B.node]] == [[C.node, D.node]]
    assert [(name, fields["node"]) for name, fields in scene.events] == [
        ("abort_sent", C.node),
        ("abort_sent", D.node),
        ("abort_sent", E.node),
    ]


def test_news_of_joiners_come_at_once_and_further_ones_together(scene: Scene) -> None:
    scene.announce(C)
    assert scene.candidates(A.node) == [[C.node]]
    scene.announce(C, D)
    scene.announce(C, D, E)
    assert scene.candidates(A.node) == [[C.node]]
    delay_s, call = scene.timers.pop("announce")
    assert delay_s == 2 * SECONDS_PER_NEWS
    call()
    assert scene.candidates(A.node) == scene.candidates(B.node) == [[C.node], [C.node, D.node, E.node]]
    # Each joiner was told what it may become a member of.
    assert [list(m.expect.view.members)[-1].node for m in scene.sent[D.node]] == [E.node]
    scene.timers.pop("announce")[1]()
    assert (len(scene.sent[A.node]), scene.timers) == (2, {})
    scene.announce()
    assert scene.candidates(A.node)[-1] == []
