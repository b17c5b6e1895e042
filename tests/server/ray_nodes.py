"""``python -m tests.server.ray_nodes FOLDER``: a Ray cluster of several nodes on this machine, while stdin is open.

A line ``add NAME CORES GPUS`` starts a node with a cache of its own, FOLDER/NAME, and ``kill NAME`` kills one with all
of its processes; each is answered with the cluster's address.
"""

import sys

from ray.cluster_utils import Cluster


def main(folder: str) -> None:
    cluster = Cluster(shutdown_at_exit=True)
    nodes = {}
    for line in sys.stdin:
        command, name, *numbers = line.split()
        if command == "add":
            cores, gpus = (int(number) for number in numbers)
            cache = {"LOSPMM_CACHE_DIR": f"{folder}/{name}"}
            # What only the first node understands, the others take no notice of.
            nodes[name] = cluster.add_node(num_cpus=cores, num_gpus=gpus, env_vars=cache, include_dashboard=False)
        else:
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
        print(cluster.address, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
