"""Check the machine."""

import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from darts_server.doctor.findings import Finding, fail, ok, warn

MIN_PYTHON = (3, 11)
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 1 << 30
"""An engine takes some hundred megabytes, and more with tensor parallelism."""
MIN_FILES = 4096
"""Each connection takes a file descriptor, and trainers open one connection per prompt."""
GIB = 1 << 30


def check_machine(host: str | None, port: int) -> Iterator[Finding]:
    """Check Python, shared memory, file descriptors and the port. ``host``: ``None`` for a server without one."""
    yield check_python()
    yield check_shared_memory()
    yield check_file_descriptors()
    if host is not None:
        yield check_port(host, port)


def check_python(minimum: tuple[int, ...] = MIN_PYTHON) -> Finding:
    message = f"{platform.python_version()} on {platform.platform()}"
    if sys.version_info < minimum:
        return fail("Python", f"{message}: at least {'.'.join(map(str, minimum))} is needed")
    return ok("Python", message)


def check_shared_memory(folder: Path = SHARED_MEMORY, min_bytes: int = MIN_SHARED_BYTES) -> Finding:
    if not folder.is_dir():
        return warn("memory", f"{folder} does not exist: engines with several processes need it")
    size = shutil.disk_usage(folder).total
    message = f"{folder} has {size / GIB:.1f} GiB"
    if size < min_bytes:
        return warn("memory", f"{message}: give a container --ipc host, or --shm-size of some gigabytes")
    return ok("memory", message)


def check_file_descriptors(minimum: int = MIN_FILES) -> Finding:
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    message = "no limit" if limit == resource.RLIM_INFINITY else f"{limit} may be open"
    if limit != resource.RLIM_INFINITY and limit < minimum:
        return warn("files", f"{message}: raise the hard limit (ulimit -Hn) to at least {minimum}, or connections fail")
    return ok("files", message)


def check_port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or error
            return fail("port", f"{host}:{port}: {reason}; stop what listens there, or choose another --port")
    return ok("port", f"{host}:{port} is free")
