"""``python -m tests.ray.nodes``: a Ray cluster with nodes on this machine, each with room for one server.

It prints its address. For each line of its input it adds a node, or kills the one that it has added last, and then
prints the number of its nodes; it ends with the input. In a process of its own, as Ray reads how it is to authenticate
when it is imported.
"""

import sys

ADD, KILL = "add", "kill"
ONE_SERVER = {"num_cpus": 1}


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**ONE_SERVER, "include_dashboard": False})
    print(cluster.address, flush=True)
    added = []
    for line in sys.stdin:
        if line.strip() == ADD:
            added.append(cluster.add_node(**ONE_SERVER))
        else:
            cluster.remove_node(added.pop(), allow_graceful=False)
        print(1 + len(added), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
