"""How often to speak of callers that are not ours: a flood of them must not become a flood of lines. Pure."""

from __future__ import annotations

QUIET_S = 60.0
"""Least time between two reports of one address."""

MAX_ADDRESSES = 64
"""So many addresses are told apart within that time; all further ones count as one, `OTHERS`."""

OTHERS = "other addresses"


class Rejections:
    """Counts rejected calls by address; says which are worth a report."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, int]] = {}  # when last reported, calls since

    def add(self, peer: str, now: float) -> tuple[str, int] | None:
        """One more call.

        Args:
          peer: as gRPC names it, "ipv4:10.0.0.7:4711".
          now: seconds.

        Returns:
          What to report now: the address without its port, and how many calls came from it since the last report.
          None if it was reported a short time ago.
        """
        address = address_of(peer)
        if address not in self._counts and len(self._counts) >= MAX_ADDRESSES:
            self._counts = {a: (t, n) for a, (t, n) in self._counts.items() if now - t < QUIET_S}
            if len(self._counts) >= MAX_ADDRESSES:
                address = OTHERS
        reported, count = self._counts.get(address, (-QUIET_S, 0))
        if address in self._counts and now - reported < QUIET_S:
            self._counts[address] = (reported, count + 1)
            return None
        self._counts[address] = (now, 0)
        return address, count + 1


def address_of(peer: str) -> str:
    """The host of a peer as gRPC names it.

    >>> address_of("ipv4:10.0.0.7:4711"), address_of("ipv6:%5B::1%5D:4711")
    ('10.0.0.7', '::1')
    """
    host = peer.partition(":")[2].rpartition(":")[0] or peer
    return host.replace("%5B", "").replace("%5D", "").strip("[]")
