"""``darts-server serve MODEL --replicas N``."""

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import ray
from ray import serve

from darts_server import logs
from darts_server.exceptions import InvalidSetting
from darts_server.ingress import process
from darts_server.ingress.settings import IngressSettings
from darts_server.ray.application import DIRECTORY, build_servers, ingress_settings
from darts_server.ray.gateway import list_through
from darts_server.ray.server import STOP_SECONDS
from darts_server.ray.settings import ApplicationSpec, Resources, number_of, read_application, replicas_of

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
HERE = "local"
"""Ray's name for a cluster that it starts."""
INTERRUPTED = 130
DELETE_POLL_SECONDS = 0.5

DESCRIPTION = """\
Run N servers as a Ray Serve application, and one address in front of them: trainers and clients use it as one server.
Ray Serve starts the servers, restarts those that die, and stops them in order; whole groups go to one server each, a
batch is divided, new weights go to all. Without --ray-address a Ray cluster is started on this machine, and ends with
this command.
"""

EPILOG = """\
All other flags are those of darts-server serve, and go to every server (darts-server serve --help). Each server has
its own tensor and pipeline parallelism; with --state-dir each has a folder in it.

examples:
  darts-server serve MODEL --replicas 8                                        eight GPUs of this machine
  darts-server serve MODEL --replicas 4 --tensor-parallel-size 2               two for each server
  darts-server serve MODEL --replicas 2 --gpus-per-replica 0.5 --gpu-memory-utilization 0.4      two on one GPU
  darts-server serve MODEL --replicas 16 --ray-address auto --api-key KEY      over the nodes of a cluster
  serve run darts_server.ray:app model=MODEL replicas=16 flags="--api-key KEY"     the same behind Ray Serve's proxy
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code.

    Raises:
        InvalidSetting
    """
    options, arguments = parse_arguments(argv)
    settings, spec = read_settings(options, arguments)
    logs.set_up(spec.settings.log_format, spec.settings.log_level)
    try:
        with cluster(options.ray_address):
            return serve_replicas(options.ray_app, settings, spec)
    except KeyboardInterrupt:
        return INTERRUPTED


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this command's flags, and the arguments of each server."""
    parser = argparse.ArgumentParser(
        "darts-server serve MODEL --replicas N",
        usage="%(prog)s [options] [any flag of darts-server serve]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    usual = IngressSettings(())
    add = parser.add_argument
    add("--replicas", required=True, metavar="N", help="number of servers")
    add("--ray-address", metavar="ADDRESS", help="of a Ray cluster that runs: auto, or HOST:PORT of its head")
    add(
        "--ray-app",
        default="darts-server",
        metavar="NAME",
        help="of the application, one for each model that the cluster serves (default: %(default)s)",
    )
    add(
        "--gpus-per-replica",
        metavar="N",
        help="that Ray reserves for each server, on one node (default: as many as the model is divided over, none "
        "where the cluster has none or with --distributed-executor-backend ray, which reserves them itself)",
    )
    add("--cpus-per-replica", default="1", metavar="N", help="that Ray reserves for each server (default: %(default)s)")
    add("--host", default=usual.host, help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=usual.port, help="port to listen on (default: %(default)s)")
    add(
        "--allowed-origins",
        type=json.loads,
        default=[],
        metavar="JSON",
        help="web pages that may call it, such as '[\"https://example.com\"]'",
    )
    return parser.parse_known_args(argv)


def read_settings(options: argparse.Namespace, arguments: Sequence[str]) -> tuple[IngressSettings, ApplicationSpec]:
    """Check the flags.

    Raises:
        InvalidSetting
    """
    gpus = options.gpus_per_replica
    resources = Resources(
        None if gpus is None else number_of("--gpus-per-replica", gpus),
        number_of("--cpus-per-replica", options.cpus_per_replica),
    )
    host = None if options.ray_address else LOOPBACK
    spec = read_application(arguments, replicas_of("--replicas", options.replicas), host, resources)
    return ingress_settings(spec, options.host, options.port, options.allowed_origins), spec


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Connect to a cluster, or start one that ends with the block.

    Raises:
        InvalidSetting: there is none.
    """
    try:
        ray.init(address=address or HERE, include_dashboard=False if address is None else None)
    except Exception as error:  # it raises exceptions of no common class
        where = "could not be started on this machine" if address is None else f"at {address} could not be reached"
        raise InvalidSetting(f"a Ray cluster {where}: {error}") from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        ray.shutdown()


def serve_replicas(name: str, settings: IngressSettings, spec: ApplicationSpec) -> int:
    """Serve until a signal."""
    serve.start(proxy_location="Disabled")  # the ingress is this process; Ray Serve's proxy would take port 8000
    try:
        try:
            serve.run(build_servers(spec), name=name, route_prefix=None)
        except RuntimeError as error:
            print(f"darts-server: the servers did not start: {error}", file=sys.stderr)
            return 1
        directory = serve.get_deployment_handle(DIRECTORY, name)
        asyncio.run(process.serve(settings, list_through(directory)))
        return 0
    finally:
        _delete(name, spec.server.grace + 3 * STOP_SECONDS)


def _delete(name: str, seconds: float) -> None:
    """Stop an application's servers in order, within so many seconds."""
    logger.info("the servers are stopped")
    serve.delete(name, _blocking=False)
    end = time.monotonic() + seconds
    with suppress(KeyboardInterrupt):  # a second signal does not wait
        while name in serve.status().applications and time.monotonic() < end:
            time.sleep(DELETE_POLL_SECONDS)
