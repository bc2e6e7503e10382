"""The command line: flags become settings, settings run."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from darts_server import settings
from darts_server.exceptions import InvalidSetting, StateError

USAGE_ERROR = 2

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
    commands.add_parser("version", help="print the version of darts-server and of vLLM")
    parser.add_argument("--version", action="store_true", help="the same as the command")
    if arguments[:1] == ["--version"]:  # argparse would ask for a command
        return _version()
    # What follows "serve" is read by parsers of its own: ours first, then vLLM's.
    command = parser.parse_args(arguments[:1]).command
    try:
        return _serve(arguments[1:]) if command == "serve" else _version()
    except (InvalidSetting, StateError) as error:
        print(f"darts-server: {error}", file=sys.stderr)
        return USAGE_ERROR


def _serve(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="darts-server serve",
        usage="%(prog)s MODEL [options] [any vLLM flag]",
        description=SERVE,
        epilog=SERVE_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    settings.add_flags(parser)
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return 0
    ours, for_vllm = parser.parse_known_args(argv)
    flags = vars(ours)
    loaded = settings.load(flags, flags.pop("darts_config"))

    from darts_server import app  # imports vLLM, which takes seconds

    return app.serve(loaded, for_vllm)


def _version() -> int:
    from darts_server.vllm.compat import vllm_version

    print(f"darts-server {version('darts-server')}, vLLM {vllm_version() or 'not installed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
