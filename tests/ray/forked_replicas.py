"""``python -m tests.ray.forked_replicas MODEL --replicas N ...``: ``darts-server serve ...`` with forked servers."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from darts_server.ray.settings import prepare_cluster


def main(argv: Sequence[str]) -> int:
    prepare_cluster()
    from darts_server.ray import command

    options, arguments = command.parse_arguments(argv)
    settings, spec = command.read_settings(options, arguments)
    forked = replace(spec, server=replace(spec.server, child="tests.ray.forked"))
    with command.cluster(None):
        return command.serve_replicas(options.ray_app, settings, forked)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
