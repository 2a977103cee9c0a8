"""Only the sockets of the dead node's cliques are shut down; everything else stays open."""

import socket
from collections.abc import Iterator

import pytest

from elastic_train.membership.abort_cpu import GlooSockets


def connection() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


def is_open(near: socket.socket, far: socket.socket) -> bool:
    """Whether a byte gets through from one end to the other."""
    far.settimeout(5)
    try:
        near.sendall(b"x")
        return far.recv(1) == b"x"
    except OSError:
        return False


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    ends: list[socket.socket] = []
    yield ends
    for end in ends:
        end.close()


def test_sockets_of_the_clique_and_no_others_are_shut_down(opened):
    sockets = GlooSockets(keep=lambda local, remote: False)
    before = connection()
    with sockets.forming((1, 2)):
        clique = connection()
    after = connection()
    opened += [*before, *clique, *after]
    assert sockets.abort(2) == 2  # both ends are ours in this test
    assert not is_open(*clique)
    assert is_open(*before) and is_open(*after)


def test_cliques_without_the_dead_node_stay_usable(opened):
    sockets = GlooSockets(keep=lambda local, remote: False)
    with sockets.forming((1, 2)):
        first = connection()
    with sockets.forming((1, 2, 3)):
        second = connection()
    opened += [*first, *second]
    sockets.abort(3)
    assert is_open(*first) and not is_open(*second)


def test_a_clique_being_formed_is_shut_down_as_far_as_it_exists(opened):
    sockets = GlooSockets(keep=lambda local, remote: False)
    with sockets.forming((1, 2)):
        early = connection()
        assert sockets.abort(2) == 2
        late = connection()
        assert sockets.abort(2) >= 2  # the caller looks again while the clique is being formed
    opened += [*early, *late]
    assert not is_open(*early) and not is_open(*late)


def test_known_connections_are_kept_even_if_they_appear_meanwhile(opened):
    control = connection()
    port = control[0].getpeername()[1]
    control[0].close(), control[1].close()
    ports = {port}
    sockets = GlooSockets(keep=lambda local, remote: bool({local[1], remote[1]} & ports))
    with sockets.forming((1, 2)):
        known, gloo = connection(), connection()
        ports.add(known[0].getpeername()[1])
    opened += [*known, *gloo]
    sockets.abort(1)
    assert is_open(*known) and not is_open(*gloo)


def test_a_number_that_was_given_to_another_socket_is_left_alone(opened):
    sockets = GlooSockets(keep=lambda local, remote: False)
    with sockets.forming((1, 2)):
        clique = connection()
    numbers = {end.fileno() for end in clique}
    for end in clique:
        end.close()
    other = connection()
    opened += [*other]
    assert {end.fileno() for end in other} & numbers  # the kernel gives the lowest free numbers
    assert sockets.abort(1) == 0
    assert is_open(*other)


def test_nothing_happens_for_a_node_in_no_clique(opened):
    sockets = GlooSockets(keep=lambda local, remote: False)
    with sockets.forming((1, 2)):
        clique = connection()
    opened += [*clique]
    assert sockets.abort(9) == 0
    assert is_open(*clique)
