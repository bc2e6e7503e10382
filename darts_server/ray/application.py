"""The deployments of an application."""

import os
from collections.abc import Sequence

import ray
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp

from darts_server.exceptions import InvalidSetting
from darts_server.ingress.command import compile_group_pattern
from darts_server.ingress.settings import IngressSettings
from darts_server.ray.directory import Directory
from darts_server.ray.gateway import Gateway, list_through
from darts_server.ray.server import STOP_SECONDS, ServerReplica
from darts_server.ray.settings import ApplicationSpec, ServerSpec, gpus_of, value_of

DIRECTORY, SERVER, GATEWAY = "Directory", "Server", "Gateway"
HEALTH_SECONDS = 2.0
"""Between two health checks of a server's replica. After three that fail in a row Ray Serve replaces it."""
MANY = 1_000_000
"""Requests at a time. How many a server takes is its own setting."""
QUIET = {"enable_access_log": False}
"""The servers log requests, and the directory is called by each replica every two seconds."""
ANY_ADDRESS = "0.0.0.0"
"""Where Ray Serve's proxy may listen: a deployment does not know it."""


def build(spec: ApplicationSpec) -> Application:
    """Build an application with an ingress that is reached through Ray Serve's own proxy."""
    settings = ingress_settings(spec, ANY_ADDRESS)

    def make_gateway() -> ASGIApp:
        name = serve.get_replica_context().app_name
        return Gateway(list_through(serve.get_deployment_handle(DIRECTORY, name)), settings)

    gateway = serve.deployment(
        serve.ingress(make_gateway)(),
        name=GATEWAY,
        num_replicas=1,  # single requests of a group meet in one
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
        graceful_shutdown_timeout_s=spec.server.grace + STOP_SECONDS,
    )
    return gateway.bind(build_servers(spec))


def build_servers(spec: ApplicationSpec) -> Application:
    """Build an application of servers alone, for an ingress outside of it."""
    server = spec.server
    directory = serve.deployment(
        Directory,
        name=DIRECTORY,
        num_replicas=1,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
    )
    servers = serve.deployment(
        ServerReplica,
        name=SERVER,
        num_replicas=spec.replicas,
        ray_actor_options={"num_cpus": server.resources.cpus, "num_gpus": _gpus(server)},
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=server.grace + 2 * STOP_SECONDS,
    )
    return servers.bind(server, directory.bind())


def ingress_settings(spec: ApplicationSpec, host: str, port: int = 0, origins: Sequence[str] = ()) -> IngressSettings:
    """Return the settings of an ingress in front of the servers, on this address.

    Raises:
        InvalidSetting
    """
    given = spec.settings
    return IngressSettings(
        (),
        host,
        port,
        group_pattern=compile_group_pattern(given.group_pattern),
        grace_seconds=int(spec.server.grace),
        max_body_bytes=given.max_body_bytes,
        allowed_hosts=[host.strip() for host in given.allowed_hosts.split(",") if host.strip()],
        allowed_origins=origins,
        allow_unauthenticated=given.allow_unauthenticated,
        admin_key=_admin_key(spec),
    )


def _admin_key(spec: ApplicationSpec) -> str:
    """Return the key with which the servers accept updates; empty if they need none.

    Raises:
        InvalidSetting
    """
    given = spec.settings
    if given.admin_api_key is not None:
        return given.admin_api_key.get_secret_value()
    keys = value_of(spec.server.arguments, "--api-key") or os.environ.get("VLLM_API_KEY", "")
    for file in (given.admin_api_key_file, given.api_key_file):
        if file is not None:
            try:
                lines = [line.strip() for line in file.read_text().splitlines()]
            except OSError as error:
                raise InvalidSetting(f"{file} with API keys cannot be read: {error.strerror}") from error
            return next((line for line in lines if line and not line.startswith("#")), keys)
    return keys


def _gpus(server: ServerSpec) -> float:
    if (gpus := server.resources.gpus) is not None:
        return gpus
    return gpus_of(server.arguments) if ray.cluster_resources().get("GPU") else 0.0
