import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain

from darts_server import logs, settings, startup_checks
from darts_server.exceptions import InvalidSetting, StateError
from darts_server.vllm.fleet.ray_cluster import prepare_cluster

# argparse ends the process with the same code.
USAGE_ERROR = 2

ABOUT = """\
Rollout server for LLM reinforcement learning: vLLM's own server with one addition. A trainer requests n trajectories of
a prompt. The server starts more candidates, stops candidates that can no longer be in the group, and returns exactly n.
"""

FIRST_STEPS = """\
first steps:
  darts-server demo                            see what shaping saves, on a tiny model, in about a minute
  darts-server simulate --preset dapo-32b      compare policies on a simulated workload, in half a minute
  darts-server doctor Qwen/Qwen3-8B            check whether a server could start with this model and these flags
  darts-server serve Qwen/Qwen3-8B --port 8000

darts-server COMMAND --help explains a command.
"""

DOCTOR = """\
Check whether a server could start with these settings and flags. doctor takes the same flags as serve, and starts
nothing. It prints a line for each thing that a server needs, with the remedy if something is wrong. The exit code is 1
if a check failed.
"""

SERVE = """\
Serve MODEL as vLLM does, with all its routes and flags, and shape the groups of requests with n > 1: the server starts
more candidates than requested, stops candidates that can no longer be in the group, and returns exactly n.
"""

SERVE_MORE = """\
All of vLLM's flags work too, e.g. --port 8000 --max-model-len 8192 --tensor-parallel-size 2.
  darts-server serve --help=all           every vLLM flag
  darts-server serve --help=FLAG          vLLM's help on one flag or section
  darts-server serve MODEL --replicas N   N engines behind one address, under Ray

The server listens on 127.0.0.1 unless --host says otherwise. Log-probs are computed from the distribution that tokens
are sampled from, unless --logprobs-mode says otherwise. (vLLM's own default is raw_logprobs, without temperature, top_k
and the like.) A request is not shaped if it has n = 1, if it names the model as MODEL:raw, or if it carries the header
"X-Darts-Policy: off".
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="darts-server",
        description=ABOUT,
        epilog=FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, help_text) in COMMANDS.items():
        commands.add_parser(name, help=help_text, add_help=False)
    parser.add_argument("--version", action="store_true", help="the same as the command version")
    # argparse would insist on a command.
    if arguments[:1] == ["--version"]:
        return _print_version([])

    # This parser reads only the command's name. Our parser, and then vLLM's, read the rest.
    run_command, _ = COMMANDS[parser.parse_args(arguments[:1]).command]
    try:
        return run_command(arguments[1:])
    except (InvalidSetting, StateError) as error:
        print(f"darts-server: {error}", file=sys.stderr)
        return USAGE_ERROR


def _serve(argv: list[str]) -> int:
    parsed = _parse_arguments("serve", SERVE, SERVE_MORE, argv)
    # The help was printed.
    if parsed is None:
        return 0
    our_settings, vllm_argv = parsed
    logs.set_up(our_settings.log_format, our_settings.log_level)

    if our_settings.replicas is not None:
        if find_spec("ray") is None:
            raise InvalidSetting("--replicas runs engines under Ray: pip install 'darts-server[ray]'")
        # This must happen before vLLM imports Ray.
        if our_settings.ray_address is None:
            prepare_cluster()

    # Importing vLLM takes seconds.
    from darts_server import app

    return app.serve(our_settings, vllm_argv)


def _doctor(argv: list[str]) -> int:
    try:
        parsed = _parse_arguments("doctor", DOCTOR, "", argv)
    except InvalidSetting as error:
        return _print_findings(
            [startup_checks.fail("settings", str(error)), startup_checks.warn("the rest", "not checked")]
        )
    if parsed is None:
        return 0
    # vLLM logs while it parses its flags. Only the log of a server needs these lines.
    logs.set_up("console", "ERROR")

    from darts_server import app

    return _print_findings(chain([startup_checks.ok("settings", "valid")], app.run_all_checks(*parsed)))


def _print_findings(findings: Iterable[startup_checks.Finding]) -> int:
    """Print each finding as soon as it is known, and return the exit code."""
    exit_code = 0
    for finding in findings:
        print(finding, flush=True)
        if finding.verdict is startup_checks.Verdict.FAIL:
            exit_code = 1
    return exit_code


def _print_version(_: list[str]) -> int:
    from darts_server.vllm.compat import vllm_version

    print(f"darts-server {version('darts-server')}, vLLM {vllm_version() or 'not installed'}")
    return 0


def _import_and_run(module: str) -> Callable[[list[str]], int]:
    # Only the chosen command's module is imported.
    return lambda argv: import_module(module).main(argv)


def _parse_arguments(
    command: str,
    description: str,
    epilog: str,
    argv: list[str],
) -> tuple[settings.Settings, list[str]] | None:
    """Return our settings and vLLM's arguments, or None if the help was printed."""
    # vLLM has its own --help=FLAG, so the parser must not handle --help.
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
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return None
    our_arguments, vllm_argv = parser.parse_known_args(argv)
    flags = vars(our_arguments)
    config = flags.pop("darts_config")
    return settings.load(flags, config), vllm_argv


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "serve": (_serve, "serve a model with shaped groups"),
    "demo": (_import_and_run("darts_server.offline.demo.command"), "see what shaping saves, on a tiny model"),
    "simulate": (
        _import_and_run("darts_server.offline.simulation.command"),
        "compare policies on your workload, without an engine",
    ),
    "trace": (
        _import_and_run("darts_server.offline.trace"),
        "write the lengths that a server has learned, for simulate",
    ),
    "doctor": (_doctor, "check whether a server could start"),
    "version": (_print_version, "print the versions of darts-server and vLLM"),
}
