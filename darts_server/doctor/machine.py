"""Checks of the machine."""

import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from darts_server.doctor.findings import Finding, fail, ok, warn

OLDEST_PYTHON = (3, 11)
SHARED = Path("/dev/shm")
LEAST_SHARED = 1 << 30
"""Bytes. Some hundred megabytes for each engine, and more for tensor parallelism."""
LEAST_FILES = 4096
"""Each connection takes a descriptor, and trainers open one for each prompt."""
GIB = 1 << 30


def checks(host: str | None, port: int) -> Iterator[Finding]:
    """Of the machine itself. ``host``: ``None`` where no port is listened on."""
    yield python()
    yield shared_memory()
    yield file_descriptors()
    if host is not None:
        yield free_port(host, port)


def python(oldest: tuple[int, ...] = OLDEST_PYTHON) -> Finding:
    says = f"{platform.python_version()} on {platform.platform()}"
    if sys.version_info < oldest:
        return fail("Python", f"{says}: at least {'.'.join(map(str, oldest))} is needed")
    return ok("Python", says)


def shared_memory(folder: Path = SHARED, least: int = LEAST_SHARED) -> Finding:
    if not folder.is_dir():
        return warn("memory", f"there is no {folder}: engines of several processes need one")
    size = shutil.disk_usage(folder).total
    says = f"{folder} has {size / GIB:.1f} GiB"
    if size < least:
        return warn("memory", f"{says}: give a container --ipc host, or --shm-size of some gigabytes")
    return ok("memory", says)


def file_descriptors(least: int = LEAST_FILES) -> Finding:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = "no limit" if most == resource.RLIM_INFINITY else f"{most} may be open"
    if most != resource.RLIM_INFINITY and most < least:
        return warn("files", f"{says}: raise the hard limit (ulimit -Hn) to {least} at least, or connections are lost")
    return ok("files", says)


def free_port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return fail(
                "port", f"{host}:{port}: {error.strerror or error}; end what listens there, or choose another --port"
            )
    return ok("port", f"{host}:{port} is free")
