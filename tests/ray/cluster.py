"""``python -m tests.ray.cluster PORT N``: ``serve --replicas N --port PORT``, with small servers in place of others."""

import sys

from darts_server.ingress.settings import IngressSettings
from darts_server.ray.settings import ApplicationSpec, Resources, ServerSpec, prepare_cluster
from darts_server.settings import load


def main(port: int, replicas: int) -> int:
    prepare_cluster()
    from darts_server.ray import command

    server = ServerSpec(["model"], "127.0.0.1", Resources(0, 0), grace=5.0, child="tests.ray.child")
    spec = ApplicationSpec(server, replicas, load({}, None))
    with command.cluster(None):
        return command.serve_replicas("small", IngressSettings((), port=port, poll_interval=0.5), spec)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
