"""How often a caller that is not ours is spoken of."""

import pytest

from elastic_train.coordinator.rejections import MAX_ADDRESSES, OTHERS, QUIET_S, Rejections, address_of


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:10.0.0.7:4711", "10.0.0.7"), ("ipv6:%5B::1%5D:4711", "::1"), ("unix:", "unix:"), ("odd", "odd")],
)
def test_addresses(peer: str, address: str) -> None:
    assert address_of(peer) == address


def test_a_flood_is_one_report_a_minute() -> None:
    rejections = Rejections()
    assert rejections.add("ipv4:10.0.0.7:1", 5.0) == ("10.0.0.7", 1)
    assert {rejections.add(f"ipv4:10.0.0.7:{port}", 6.0) for port in range(1000)} == {None}
    assert rejections.add("ipv4:10.0.0.8:1", 6.0) == ("10.0.0.8", 1)
    assert rejections.add("ipv4:10.0.0.7:1", 5.0 + QUIET_S) == ("10.0.0.7", 1001)


def test_many_addresses_become_one() -> None:
    rejections = Rejections()
    found = [rejections.add(f"ipv4:10.0.{n // 256}.{n % 256}:1", 0.0) for n in range(10 * MAX_ADDRESSES)]
    reported = [report for report in found if report]
    assert len(reported) == MAX_ADDRESSES + 1 and reported[-1] == (OTHERS, 1)
    assert rejections.add("ipv4:10.9.9.9:1", QUIET_S) == ("10.9.9.9", 1)
    assert len(rejections._counts) == 1
