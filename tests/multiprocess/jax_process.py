"""A worker process of `test_jax_service.py`: JAX on 8 virtual CPU devices, under a fresh node id.

Arguments: address, number of nodes, node id. Says `devices TOTAL LOCAL_IDS` when the backend is up; answers
each line `live NODES` on stdin with `live NODES`, those that JAX's barrier names; ends at `exit`. `meet NODES` begins a
collective of these nodes and says `met` or `not met` when it is over; `died NODES NODE` is what a member does when it
hears that one of them has died, and says `heard`.
"""

import sys
import threading
import time


def say(line: str) -> None:
    """Two threads speak: each line is written at once, its end included."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def meet(nodes: list[int], node: int) -> None:
    """The first collective of `nodes`, on each one's first device."""
    from elastic_train.step.reduce import Gather, Meeting

    devices = [device(member) for member in nodes]
    gather = Gather(Meeting(devices, device(node)), 4)
    say("meeting")
    try:
        gather([1] * 4)
    except Exception as error:
        print(error, file=sys.stderr, flush=True)
        say("not met")
    else:
        say("met")


def device(node: int):
    """The first device of a node."""
    import jax

    return min((each for each in jax.devices() if each.process_index == node), key=lambda each: each.id)


def main() -> None:
    address, num_nodes, node = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    import jax
    from jax._src import distributed
    from jaxlib import _jax

    from elastic_train.jax_private import fail_gloo_meeting

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    state = distributed.global_state
    state.coordinator_address, state.process_id, state.num_processes = address, node, num_nodes
    state.client = client = _jax.get_distributed_runtime_client(address, node, init_timeout=60, heartbeat_timeout=60)
    client.connect()
    local = ",".join(str(device.id) for device in jax.local_devices())
    say(f"devices {len(jax.devices())} {local}")
    for line in sys.stdin:
        match line.split():
            case ["live", nodes]:
                alive = client.get_live_nodes([int(number) for number in nodes.split(",")])
                say("live " + ",".join(map(str, sorted(alive))))
            case ["meet", nodes]:
                members = [int(number) for number in nodes.split(",")]
                threading.Thread(target=meet, args=(members, node), daemon=True).start()
            case ["died", nodes, absent]:
                members = [int(number) for number in nodes.split(",")]
                ids = [device(member).id for member in members]
                while not fail_gloo_meeting(ids, members.index(int(absent)), members.index(node)):
                    time.sleep(0.01)
                say("heard")
            case ["exit"]:
                break
    client.shutdown()


if __name__ == "__main__":
    main()
