"""A coordinator process of `test_control.py` that never decides anything. Argument: the secret.

Says its address; at each line of input it says `RSS_BYTES JAX_IMPORTED`; ends at end of input.
"""

import sys
from collections.abc import Mapping, Sequence

import psutil

from elastic_train.coordinator.service import Coordinator, Endpoint
from elastic_train.membership.roster import Limits


class NoRecords:
    flushed_step = 0
    gap = None

    def event(self, name: str, /, **fields: object) -> None: ...
    def commit(self, record: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
        return ()

    def skip_gap(self) -> Sequence[Mapping[str, object]]:
        return ()


def main() -> None:
    coordinator = Coordinator(
        Limits(num_slots=4),
        NoRecords(),
        Endpoint(secret=sys.argv[1]),
        apply=lambda roster, event: (roster, ()),
    )
    print(coordinator.address, flush=True)
    for _ in sys.stdin:
        print(psutil.Process().memory_info().rss, "jax" in sys.modules, flush=True)
    coordinator.close()


if __name__ == "__main__":
    main()
