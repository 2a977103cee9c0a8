"""A worker process of `test_jax_service.py`: JAX on 8 virtual CPU devices, under a fresh node id.

Arguments: address, number of nodes, node id. Says `devices TOTAL LOCAL_IDS` when the backend is up; answers
each line `live NODES` on stdin with `live NODES`, those that JAX's barrier names; ends at `exit`.
"""

import sys


def main() -> None:
    address, num_nodes, node = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    import jax
    from jax._src import distributed
    from jaxlib import _jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    state = distributed.global_state
    state.coordinator_address, state.process_id, state.num_processes = address, node, num_nodes
    state.client = client = _jax.get_distributed_runtime_client(address, node, init_timeout=60, heartbeat_timeout=60)
    client.connect()
    local = ",".join(str(device.id) for device in jax.local_devices())
    print("devices", len(jax.devices()), local, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["live", nodes]:
                alive = client.get_live_nodes([int(number) for number in nodes.split(",")])
                print("live", ",".join(map(str, sorted(alive))), flush=True)
            case ["exit"]:
                break
    client.shutdown()


if __name__ == "__main__":
    main()
