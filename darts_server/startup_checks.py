"""Checks, without an engine, whether something would stop the server or fail later.

``serve`` runs `check_local`, and does not start if a check fails. ``doctor`` runs all checks.
"""

import os
import platform
import resource
import shutil
import socket
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from darts_server.exceptions import InvalidSetting, StateError
from darts_server.http.security.access import Access, check_listening
from darts_server.settings import Settings
from darts_server.store.store import FILE_NAME, Store
from darts_server.verify.specs import parse_specs
from darts_server.vllm.compat import version_warning, vllm_version

SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 1 << 30
"""An engine takes some hundred megabytes, and more with tensor parallelism."""
MIN_FILES = 4096
"""Each connection takes a file descriptor, and trainers open one connection per prompt."""
MIN_STATE_BYTES = 100 * 1024 * 1024
"""A kilobyte for each of a hundred thousand prompts."""
STAGED_MODELS = 2
"""The new weights, and the old weights that are restored if loading fails."""
GIB = 1 << 30


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """The server starts, but something may fail later."""
    FAIL = "FAIL"
    """The server would not start, or could not serve."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``message`` includes the remedy."""

    verdict: Verdict
    subject: str
    message: str

    def __str__(self) -> str:
        return f"{self.verdict:<5} {self.subject:<10} {self.message}"


ok = partial(Finding, Verdict.OK)
warn = partial(Finding, Verdict.WARN)
fail = partial(Finding, Verdict.FAIL)


def check_local(settings: Settings, args: Namespace) -> Iterator[Finding]:
    """Run the checks of every start, which need no time and no network."""
    yield ok("Python", f"{platform.python_version()} on {platform.platform()}")
    yield check_shared_memory()
    yield check_file_descriptors()
    if not args.uds:
        yield check_port(args.host, args.port)
    yield check_state(settings.state_dir)
    yield check_policy(settings)
    yield check_verifiers(settings)

    # Importing vLLM takes seconds.
    from darts_server.vllm import checks

    yield from check_weights(settings.weights_root, settings.weights_staging, checks.model_bytes(args))
    yield check_probe(settings, checks.probe_fault(args))


def check_vllm(args: Namespace, has_model: bool) -> Iterator[Finding]:
    from darts_server.vllm import checks

    version = vllm_version()
    warning = version_warning(version)
    if warning is None:
        yield ok("vLLM", version or "none")
    else:
        yield warn("vLLM", warning)
    yield _finding_of("devices", *checks.check_devices())
    if has_model:
        yield _finding_of("model", *checks.check_model(args))
    else:
        yield warn("model", "no model given; name a model to check it too")


def _finding_of(subject: str, description: str, fault: str | None) -> Finding:
    if fault is None:
        return ok(subject, description)
    return fail(subject, f"{description}: {fault}")


def check_verifiers(settings: Settings) -> Finding:
    try:
        specs = parse_specs(settings.verifier)
    except InvalidSetting as error:
        return fail("verifiers", str(error))
    names = ", ".join(spec.name for spec in specs) or "none"
    if any(spec.function for spec in specs):
        names += " (their code is loaded by serve only)"
    return ok("verifiers", names)


def check_shared_memory(folder: Path = SHARED_MEMORY, min_bytes: int = MIN_SHARED_BYTES) -> Finding:
    if not folder.is_dir():
        return warn("memory", f"{folder} does not exist: engines with several processes need it")
    total_bytes = shutil.disk_usage(folder).total
    message = f"{folder} has {total_bytes / GIB:.1f} GiB"
    if total_bytes < min_bytes:
        return warn("memory", f"{message}: give a container --ipc host, or --shm-size of some gigabytes")
    return ok("memory", message)


def check_file_descriptors(minimum: int = MIN_FILES) -> Finding:
    # vLLM raises the soft limit.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit == resource.RLIM_INFINITY:
        return ok("files", "no limit")
    message = f"{hard_limit} may be open"
    if hard_limit < minimum:
        return warn("files", f"{message}: raise the hard limit (ulimit -Hn) to at least {minimum}, or connections fail")
    return ok("files", message)


def check_port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # vLLM sets this option too: connections of an earlier server may still be in TIME_WAIT.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or error
            return fail("port", f"{host}:{port}: {reason}; stop the program that uses it, or choose another --port")
    return ok("port", f"{host}:{port} is free")


def check_state(folder: Path | None, min_bytes: int = MIN_STATE_BYTES) -> Finding:
    if folder is None:
        return ok("state", "kept in memory and lost when the server stops; --state-dir keeps it")
    try:
        # Opening an existing file checks it. A store without a file would create one.
        if (folder / FILE_NAME).exists():
            Store(folder).close()
    except StateError as error:
        return fail("state", str(error))
    # The server would create the missing folders.
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        return fail("state", f"{nearest} is not writable; choose another --state-dir, or change its owner")
    free_bytes = shutil.disk_usage(nearest).free
    if free_bytes < min_bytes:
        return warn("state", f"{folder} has {free_bytes / GIB:.2f} GiB left: make room, or new lengths are not stored")
    return ok("state", str(folder))


def check_weights(root: Path | None, staging: Path | None, model_bytes: int | None) -> Iterator[Finding]:
    """``model_bytes``: None if unknown."""
    if root is not None:
        if os.access(root, os.R_OK | os.X_OK):
            yield ok("weights", f"may be loaded from {root}")
        else:
            yield fail("weights", f"--weights-root {root} is not readable; change its owner or permissions")
    folder = staging or Path(tempfile.gettempdir())
    if not os.access(folder, os.W_OK | os.X_OK):
        yield fail("staging", f"{folder} is not writable; choose another --weights-staging")
        return
    free_bytes = shutil.disk_usage(folder).free
    message = f"{folder} has {free_bytes / GIB:.1f} GiB left for pushed weights"
    needed_bytes = STAGED_MODELS * (model_bytes or 0)
    if free_bytes < needed_bytes:
        gibibytes = f"{needed_bytes / GIB:.1f}"
        yield warn("staging", f"{message}, and two models need {gibibytes}: choose another --weights-staging")
    else:
        yield ok("staging", message)


def check_address(args: Namespace, access: Access, allow_unauthenticated: bool) -> Finding:
    if args.uds:
        return ok("address", f"the socket {args.uds}, which only this machine reaches")
    try:
        check_listening(args.host, access, allow_unauthenticated)
    except InvalidSetting as error:
        return fail("address", str(error))
    admin_keys = "with admin keys" if access.admin_keys else "without admin keys"
    if access.keys:
        return ok("address", f"{args.host}, with keys, {admin_keys}")
    if allow_unauthenticated:
        return warn(
            "address", f"{args.host}, without API keys (--allow-unauthenticated): everybody who reaches it may use it"
        )
    return ok("address", f"{args.host}, without API keys, {admin_keys}")


def check_policy(settings: Settings) -> Finding:
    if settings.policy == "auto" and settings.group_size is not None:
        return warn(
            "policy",
            "auto shapes no groups, so --group-size joins no requests: choose a policy that shapes groups, such as "
            "--policy uniform",
        )
    return ok("policy", settings.policy)


def check_probe(settings: Settings, fault: str | None) -> Finding:
    """Check whether the quality head can get hidden states. ``fault``: why vLLM's flags prevent it, or None."""
    # True of arrol and darts+arrol, which prune.
    prunes = "arrol" in settings.policy
    # True of head and head+logprob.
    uses_head = "head" in settings.quality
    is_needed = prunes and uses_head
    if fault is None and is_needed:
        return ok("probe", "available")
    if fault is None:
        return ok("probe", "not needed by the default policy")
    if not is_needed:
        return ok("probe", f"not available ({fault}), and not needed")
    return fail("probe", f"--policy {settings.policy} needs hidden states, and {fault}; score by --quality logprob")
