"""A worker process of `test_control.py` that only says hello. Arguments: address, secret, node, keepalive.

Says `connected` when it is welcome and `lost REASON` when the connection breaks; ends at end of input.
"""

import sys

from elastic_train.coordinator.client import Link
from elastic_train.membership.group import Identity


def main() -> None:
    address, secret, node, keepalive_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    loaded = {"jax", "jaxlib", "numpy"} & set(sys.modules)
    if loaded:
        raise SystemExit(f"the client must not import {loaded}")
    link = Link(address, secret, Identity(node, 0, node), keepalive_s)
    link.on_lost = lambda reason: print("lost", reason, flush=True)
    link.hello(1, "here", "versions")
    print("connected", flush=True)
    sys.stdin.read()
    link.close()


if __name__ == "__main__":
    main()
