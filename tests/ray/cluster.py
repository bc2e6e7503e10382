"""``python -m tests.ray.cluster PORT N [ADDRESS]``: ``serve --replicas N --port PORT``, with small servers.

``ADDRESS``: of a cluster that runs, on which each server takes a core of its node.
"""

import sys

from darts_server.ingress.settings import IngressSettings
from darts_server.ray.settings import ApplicationSpec, Resources, ServerSpec, prepare_cluster
from darts_server.settings import load

LOOPBACK = "127.0.0.1"


def main(port: int, replicas: int, address: str | None = None) -> int:
    prepare_cluster()
    from darts_server.ray import command

    host, resources = (None, Resources(0, 1)) if address else (LOOPBACK, Resources(0, 0))
    server = ServerSpec(["model"], host, resources, grace=5.0, child="tests.ray.child")
    spec = ApplicationSpec(server, replicas, load({}, None))
    with command.cluster(address):
        return command.serve_replicas("small", IngressSettings((), port=port, poll_interval=0.5), spec)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
