"""The command line: flags become settings, settings run."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from itertools import chain

from darts_server import logs, settings
from darts_server.doctor import findings
from darts_server.exceptions import InvalidSetting, StateError

USAGE_ERROR = 2

EXAMINE = """\
Look whether a server could be started with these settings and flags, the same as serve takes: a line for each thing
that it needs, with the remedy where something is wrong. Nothing is started. The exit code is 1 if anything failed.
"""

SERVE = """\
Serve MODEL as vLLM does, with all its routes and flags, and give requests with n > 1 shaped groups: more candidates
are started than asked for, those that can no longer be in the group are stopped, and exactly n are returned.
"""

SERVE_MORE = """\
All of vLLM's flags work too, e.g. --port 8000 --max-model-len 8192 --tensor-parallel-size 2.
  darts-server serve --help=all           every vLLM flag
  darts-server serve --help=FLAG          vLLM's help on one flag or section

The server listens on 127.0.0.1 unless --host says otherwise. A request is left alone if it has n = 1, names the model
as MODEL:raw, or carries the header "X-Darts-Policy: off".
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="darts-server", description="Rollout server for LLM reinforcement learning.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("serve", help="serve a model with shaped groups", add_help=False)
    commands.add_parser("doctor", help="say what would keep a server from starting", add_help=False)
    commands.add_parser("version", help="print the version of darts-server and of vLLM")
    parser.add_argument("--version", action="store_true", help="the same as the command")
    if arguments[:1] == ["--version"]:  # argparse would ask for a command
        return _version()
    # What follows is read by parsers of its own: ours first, then vLLM's.
    command = parser.parse_args(arguments[:1]).command
    try:
        return COMMANDS[command](arguments[1:])
    except (InvalidSetting, StateError) as error:
        print(f"darts-server: {error}", file=sys.stderr)
        return USAGE_ERROR


def _serve(argv: list[str]) -> int:
    parser = _parser("serve", SERVE, SERVE_MORE)
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return 0
    loaded, for_vllm = _loaded(parser, argv)
    logs.set_up(loaded.log_format, loaded.log_level)

    from darts_server import app  # imports vLLM, which takes seconds

    return app.serve(loaded, for_vllm)


def _doctor(argv: list[str]) -> int:
    parser = _parser("doctor", EXAMINE, "")
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return 0
    try:
        loaded, for_vllm = _loaded(parser, argv)
    except InvalidSetting as error:
        return _told([findings.fail("settings", str(error)), findings.warn("all else", "not looked at")])
    logs.set_up("console", "ERROR")  # what vLLM says beside its flags is for a server

    from darts_server import app  # imports vLLM, which takes seconds

    return _told(chain([findings.ok("settings", "valid")], app.examine(loaded, for_vllm)))


def _told(said: Iterable[findings.Finding]) -> int:
    failed = False
    for finding in said:
        print(finding, flush=True)
        failed |= finding.verdict is findings.Verdict.FAIL
    return int(failed)


def _parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"darts-server {command}",
        usage="%(prog)s MODEL [options] [any vLLM flag]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    settings.add_flags(parser)
    return parser


def _loaded(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[settings.Settings, list[str]]:
    """Our settings, and what is left for vLLM."""
    ours, for_vllm = parser.parse_known_args(argv)
    flags = vars(ours)
    return settings.load(flags, flags.pop("darts_config")), for_vllm


def _version(_: Sequence[str] = ()) -> int:
    from darts_server.vllm.compat import vllm_version

    print(f"darts-server {version('darts-server')}, vLLM {vllm_version() or 'not installed'}")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {"serve": _serve, "doctor": _doctor, "version": _version}


if __name__ == "__main__":
    sys.exit(main())
