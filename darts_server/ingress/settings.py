"""Settings of ``darts-server ingress``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from darts_server.exceptions import InvalidSetting

MAX_BODY_BYTES = 64 * 1024 * 1024
"""As ``serve`` has it."""


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """``server_list``: URLs of the servers. Intervals and timeouts in seconds.

    ``group_pattern``: of sessions that name their group. ``allowed_hosts``, ``allowed_origins``: see `Sites`.
    ``admin_key``: with which weights are copied to servers that join; empty if they need none.
    """

    server_list: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 8000
    group_pattern: re.Pattern[str] | None = None
    poll_interval: float = 2.0
    poll_timeout: float = 5.0
    grace_seconds: int = 30
    max_body_bytes: int = MAX_BODY_BYTES
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    allow_unauthenticated: bool = False
    admin_key: str = field(default="", repr=False)


def read_server_list(text: str) -> list[str]:
    """Read URLs that are separated by commas.

    Raises:
        InvalidSetting
    """
    urls = [url.strip().rstrip("/") for url in text.split(",") if url.strip()]
    if not urls:
        raise InvalidSetting("--server-list must name at least one server, such as http://a:8000,http://b:8000")
    for url in urls:
        _check(url)
    if len(set(urls)) < len(urls):
        raise InvalidSetting(f"--server-list names a server twice: {text}")
    return urls


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_plain = not (parts.path or parts.query or parts.fragment or parts.username)
    except ValueError:
        is_valid = is_plain = False
    if not (is_valid and is_plain):
        raise InvalidSetting(f"--server-list: {url} must be http://HOST:PORT, without a path; correct it")
