"""``darts-server ingress``."""

import argparse
import asyncio
import os
import re
from collections.abc import Sequence

from darts_server import logs
from darts_server.exceptions import InvalidSetting
from darts_server.ingress.process import serve
from darts_server.ingress.settings import IngressSettings, read_server_list

KEY_VARIABLES = ("DARTS_ADMIN_API_KEY", "VLLM_API_KEY")
"""The servers' own. Without an admin key, servers on this machine accept updates with any key of theirs."""

DESCRIPTION = """\
Put one address in front of several running servers (darts-server serve). Trainers and clients use it as they would use
one server. Whole groups go to one server each, to the least loaded; single requests that form a group meet on one; a
batch is divided; rewards and ids find the server that has them; what changes a server changes all of them. When a
server is lost, what ran on it runs again on another.
"""

EPILOG = """\
API keys are the servers' own: the ingress passes the header Authorization on. Only to copy weights to a server that
joins or was restarted it uses a key of its own: DARTS_ADMIN_API_KEY, or VLLM_API_KEY if the servers have no admin key.
Start all servers with the same model, flags and keys. Several ingresses may stand in front of the same servers; single
requests of a group must come through the same one.

examples:
  darts-server serve MODEL --port 8001 &
  darts-server serve MODEL --port 8002 &
  darts-server ingress --server-list http://127.0.0.1:8001,http://127.0.0.1:8002 --port 8000
  curl http://127.0.0.1:8000/health        which server is how
  darts-server ingress --host 0.0.0.0 --server-list http://a:8000,http://b:8000     the servers must have API keys
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code.

    Raises:
        InvalidSetting
    """
    options = parse_arguments(argv)
    settings = read_settings(options)
    logs.set_up(options.log_format, options.log_level)
    asyncio.run(serve(settings))
    return 0


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(
        "darts-server ingress",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, usual = parser.add_argument, IngressSettings(())
    add("--server-list", required=True, metavar="URLS", help="the servers: http://HOST:PORT, separated by commas")
    add("--host", default=usual.host, help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=usual.port, help="port to listen on (default: %(default)s)")
    add(
        "--group-pattern",
        default="",
        metavar="REGEX",
        help="the servers' own --group-pattern: sessions that match it name their group",
    )
    _add_health_flags(parser, usual)
    _add_security_flags(parser, usual)
    add("--log-format", choices=("console", "json"), default="console", help="(default: %(default)s)")
    add("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), default=None, help="(default: INFO)")
    return parser.parse_args(argv)


def _add_health_flags(parser: argparse.ArgumentParser, usual: IngressSettings) -> None:
    add = parser.add_argument
    add(
        "--poll-interval",
        type=float,
        default=usual.poll_interval,
        metavar="SECONDS",
        help="between two polls of a server's health (default: %(default)s)",
    )
    add(
        "--poll-timeout",
        type=float,
        default=usual.poll_timeout,
        metavar="SECONDS",
        help="for the answer; a server that does not answer three polls in a row is lost (default: %(default)s)",
    )
    add(
        "--grace-seconds",
        type=int,
        default=usual.grace_seconds,
        metavar="SECONDS",
        help="that running requests may take after a stop signal; then they are cut off (default: %(default)s)",
    )


def _add_security_flags(parser: argparse.ArgumentParser, usual: IngressSettings) -> None:
    add = parser.add_argument
    add(
        "--max-body-bytes",
        type=int,
        default=usual.max_body_bytes,
        metavar="N",
        help="maximum size of a request body (default: %(default)s)",
    )
    add(
        "--allowed-hosts",
        default="",
        metavar="NAMES",
        help="names by which callers may address the ingress while a server behind it needs no key, in addition to "
        "localhost, the machine's own name, --host and IP addresses: NAME, *.DOMAIN or *, separated by commas",
    )
    add(
        "--allowed-origins",
        default="",
        metavar="ORIGINS",
        help="web pages that may call it then, such as https://example.com, separated by commas",
    )
    add(
        "--allow-unauthenticated",
        action="store_true",
        help="use servers that need no key although --host is reachable from other machines",
    )


def read_settings(options: argparse.Namespace) -> IngressSettings:
    """Check the flags.

    Raises:
        InvalidSetting
    """
    for name in ("poll_interval", "poll_timeout", "max_body_bytes"):
        if getattr(options, name) <= 0:
            raise InvalidSetting(f"--{name.replace('_', '-')} must be more than 0, got {getattr(options, name)}")
    if not 0 <= options.port < 1 << 16:
        raise InvalidSetting(f"--port must be 0 to 65535, got {options.port}")
    if options.grace_seconds < 0:
        raise InvalidSetting(f"--grace-seconds must be at least 0, got {options.grace_seconds}")
    return IngressSettings(
        server_list=read_server_list(options.server_list),
        host=options.host,
        port=options.port,
        group_pattern=compile_group_pattern(options.group_pattern),
        poll_interval=options.poll_interval,
        poll_timeout=options.poll_timeout,
        grace_seconds=options.grace_seconds,
        max_body_bytes=options.max_body_bytes,
        allowed_hosts=_parts(options.allowed_hosts),
        allowed_origins=_parts(options.allowed_origins),
        allow_unauthenticated=options.allow_unauthenticated,
        admin_key=next(filter(None, map(os.environ.get, KEY_VARIABLES)), ""),
    )


def compile_group_pattern(text: str) -> re.Pattern[str] | None:
    """Return the pattern of sessions that name their group; ``None`` without one.

    Raises:
        InvalidSetting
    """
    if not text:
        return None
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise InvalidSetting(f"--group-pattern must be a regular expression: {error}") from error
    if pattern.groups != 1:
        raise InvalidSetting(f"--group-pattern must have one pair of parentheses, for the group's name: {text}")
    return pattern


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
