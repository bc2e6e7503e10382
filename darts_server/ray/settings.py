"""What an application consists of."""

import argparse
import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from darts_server import settings
from darts_server.exceptions import InvalidSetting
from darts_server.settings import Settings

GRACE_SECONDS = 30.0
"""As ``serve`` has it."""
PARALLEL = {
    "--tensor-parallel-size": "-tp",
    "--pipeline-parallel-size": "-pp",
    "--data-parallel-size": "-dp",
}
"""vLLM's flags whose product is the number of GPUs of a server, and their short forms."""
EXECUTOR = "--distributed-executor-backend"
RAY_EXECUTOR = "ray"
CONFIG = "--config"
"""vLLM's file of flags."""
NO_TLS = "replicas are reached over HTTP; put a proxy with TLS in front of the ingress"
REFUSED = {"--uds": "replicas are reached over TCP", "--ssl-keyfile": NO_TLS, "--ssl-certfile": NO_TLS}
ARGUMENTS = ("model", "replicas", "flags", "gpus", "cpus", "host")


@dataclass(frozen=True, slots=True)
class Resources:
    """What Ray reserves for a server, on one node. ``gpus``: ``None`` for `gpus_of` it where the cluster has GPUs."""

    gpus: float | None = None
    cpus: float = 1.0


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server.

    ``arguments``: of ``darts-server serve``, without address. ``host``: address that it listens on; ``None`` for that
    of its node. ``state_dir``: folder in which each server has one for its state. ``grace``: seconds that running
    requests may take when it is stopped. ``child``: the module that is run.
    """

    arguments: Sequence[str]
    host: str | None = None
    resources: Resources = Resources()
    state_dir: str | None = None
    grace: float = GRACE_SECONDS
    child: str = "darts_server.ray.child"

    def arguments_of(self, number: int) -> list[str]:
        """Return the arguments of the replica with this number."""
        state = [] if self.state_dir is None else ["--state-dir", f"{self.state_dir}/replica-{number}"]
        return [*self.arguments, *state]


@dataclass(frozen=True, slots=True)
class ApplicationSpec:
    """An application. ``settings``: of its servers."""

    server: ServerSpec
    replicas: int
    settings: Settings


def read_arguments(given: Mapping[str, object]) -> ApplicationSpec:
    """Read the arguments of ``serve run darts_server.ray:app``, or of a configuration file of Ray Serve.

    Raises:
        InvalidSetting
    """
    if unknown := sorted(set(given) - set(ARGUMENTS)):
        raise InvalidSetting(f"darts_server.ray:app has no argument {unknown[0]}; it has {', '.join(ARGUMENTS)}")
    if not given.get("model"):
        raise InvalidSetting("darts_server.ray:app needs a model: serve run darts_server.ray:app model=Qwen/Qwen3-8B")
    host = given.get("host")
    return read_application(
        [str(given["model"]), *shlex.split(str(given.get("flags", "")))],
        replicas_of("replicas", str(given.get("replicas", 1))),
        None if host is None else str(host),
        Resources(
            number_of("gpus", str(given["gpus"])) if "gpus" in given else None,
            number_of("cpus", str(given.get("cpus", 1))),
        ),
    )


def read_application(
    arguments: Sequence[str], replicas: int, host: str | None, resources: Resources
) -> ApplicationSpec:
    """Check the arguments of each server before any is started.

    Raises:
        InvalidSetting
    """
    if not arguments or arguments[0].startswith("-"):
        raise InvalidSetting("with replicas the model comes before all flags: darts-server serve MODEL --replicas N")
    for flag, why in REFUSED.items():
        if value_of(arguments, flag) is not None:
            raise InvalidSetting(f"{flag} cannot be used with replicas: {why}")
    if resources.gpus is None and value_of(arguments, CONFIG) is not None:
        raise InvalidSetting(
            "a server with --config may be divided over several GPUs, and how many is not read from that file: give "
            "--gpus-per-replica too (gpus in a configuration file of Ray Serve)"
        )
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    settings.add_flags(parser)
    ours, vllm_argv = parser.parse_known_args(arguments)
    flags = vars(ours)
    settings.refuse_removed_flags(vllm_argv)
    loaded = settings.load(flags, flags.pop("darts_config"))
    server = ServerSpec(
        list(arguments),
        host,
        resources,
        state_dir=None if loaded.state_dir is None else str(loaded.state_dir),
        grace=_grace(loaded, value_of(arguments, "--shutdown-timeout")),
    )
    return ApplicationSpec(server, replicas, loaded)


def prepare_cluster() -> None:
    """Set what a cluster that this process starts has to be started with. Call this before Ray is imported.

    * It refuses others, unless the environment says how Ray is to authenticate: Ray listens on all of the machine's
      addresses, and whoever can reach it may run code.
    * Its processes have the priority of this one. Ray would lower it by 15, and that of the servers with it.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    os.environ.setdefault("RAY_worker_niceness", "0")


def replicas_of(name: str, text: str) -> int:
    """
    Raises:
        InvalidSetting
    """
    if not text.isdecimal() or int(text) < 1:
        raise InvalidSetting(f"{name} must be a whole number from 1 on, got {text}")
    return int(text)


def number_of(name: str, text: str) -> float:
    """
    Raises:
        InvalidSetting
    """
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise InvalidSetting(f"{name} must be a number from 0 on, got {text}")
    return number


def gpus_of(arguments: Sequence[str]) -> float:
    """Return how many GPUs Ray has to reserve for a server with these arguments.

    With vLLM's own Ray executor none: it reserves them itself, also on several nodes.
    """
    if value_of(arguments, EXECUTOR) == RAY_EXECUTOR:
        return 0.0
    product = 1
    for flag, short in PARALLEL.items():
        value = value_of(arguments, flag, short) or "1"
        product *= int(value) if value.isdecimal() else 1  # vLLM says what is wrong with it
    return float(product)


def value_of(arguments: Sequence[str], *names: str) -> str | None:
    """Return the value of a flag, the last one if it is given several times; ``None`` without it."""
    found = None
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else next(iter(arguments[at + 1 : at + 2]), "")
    return found


def _grace(loaded: Settings, shutdown_timeout: str | None) -> float:
    """Return how long a server may take to end what runs, in seconds; it chooses the same way."""
    if loaded.grace_seconds is not None:
        return loaded.grace_seconds
    is_number = shutdown_timeout is not None and shutdown_timeout.isdecimal()
    return float(shutdown_timeout or 0) or GRACE_SECONDS if is_number else GRACE_SECONDS
