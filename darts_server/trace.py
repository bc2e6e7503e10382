"""``darts-server trace export``: what a server has learned of lengths, as a trace for ``darts-server simulate``.

Uses the saved state and policies, and nothing that serves.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np

from darts_server.exceptions import InvalidSetting
from darts_server.policy.length_profile import LengthProfile
from darts_server.policy.lengths import PromptStats
from darts_server.store.archive import LIMIT_BYTES, unpack

DESCRIPTION = """\
Write what a server has learned of its prompts' lengths as a trace, which darts-server simulate reads: so you can see
what a policy would bring on your own workload before you use it. The server learns of /darts/v1/rollouts, and of
requests to /v1 with n > 1, but not of those that say themselves that they are not to be shaped.
"""

EPILOG = """\
A trace has one prompt a line: {"step": 0, "prompt_tokens": 512, "lengths": [450, 396, 274], "cap": 10112}. The server
keeps no list of lengths, and what the candidates that it stopped would have become is not known. What it has
learned is the mean length of each prompt and, over all prompts, the distribution of lengths around these means, in
which stopped candidates count as longer ones. The lengths of a trace are drawn from both; step is the weight version of
the prompt's last group. Lengths of the prompt itself are not learned: say them with --prompt-tokens.

examples:
  darts-server trace export --url http://127.0.0.1:8000 --output lengths.jsonl
  darts-server trace export --state checkpoint/darts-state --cap 16384 --output lengths.jsonl
  darts-server simulate --trace lengths.jsonl --preset h200-8b
"""
API_KEY = "DARTS_API_KEY"
RATIOS = 4096
"""Quantiles of the ratios of lengths to their prompt's mean. The longest length of a batch is one in thousands."""
TIMEOUT_SECONDS = 60.0


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code.

    Raises:
        InvalidSetting: a flag is invalid, or the state cannot be read.
        StateDamaged, StateTooNew
    """
    options = parse_arguments(argv)
    prompts, profile = _read_lengths(_read_state(options))
    ratios = None if profile is None else profile.quantiles(RATIOS)
    if ratios is None or not prompts:
        raise InvalidSetting("the state has no lengths: no group with more than one trajectory has ended there yet")
    cap = options.cap
    rng = np.random.default_rng(options.seed)
    lines = []
    for prompt in prompts:
        lengths = np.maximum(1, np.ceil(prompt.mean_ema * rng.choice(ratios, options.samples)))
        if cap is not None:
            lengths = np.minimum(lengths, cap)
        line: dict[str, int | list[int]] = {
            "step": prompt.weight_version or 0,
            "prompt_tokens": options.prompt_tokens,
            "lengths": [int(length) for length in lengths],
        }
        lines.append(json.dumps(line if cap is None else {**line, "cap": cap}))
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidSetting(f"--output: {options.output} cannot be written: {error}") from error
    print(f"{len(lines)} prompts with {options.samples} lengths each: {options.output}")
    if cap is None:
        print("No length limit is known: --cap N cuts the lengths at N tokens.")
    return 0


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser("darts-server trace", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    export = commands.add_parser(
        "export",
        help="write learned lengths as a trace for darts-server simulate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = export.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help=f"of a running server; its API key, if it has one, in {API_KEY}")
    source.add_argument("--state", type=Path, metavar="FILE", help="saved by GET /darts/v1/state")
    add = export.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="the trace, as JSON lines")
    add("--samples", type=int, default=16, metavar="N", help="lengths of each prompt (default: %(default)s)")
    add("--prompt-tokens", type=int, default=512, metavar="N", help="tokens of a prompt (default: %(default)s)")
    add("--cap", type=int, metavar="N", help="longest that a trajectory may become (default: unlimited)")
    add("--seed", type=int, default=0, metavar="N", help="of the drawn lengths (default: %(default)s)")
    options = parser.parse_args(argv)
    for flag, least in {"samples": 1, "prompt_tokens": 1, "cap": 1, "seed": 0}.items():
        if getattr(options, flag) is not None and getattr(options, flag) < least:
            export.error(f"--{flag.replace('_', '-')} must be at least {least}")
    return options


def _read_state(options: argparse.Namespace) -> bytes:
    """Return a saved state, from its file or from a server."""
    if options.state is not None:
        try:
            return Path(options.state).read_bytes()
        except OSError as error:
            raise InvalidSetting(f"--state: {options.state} cannot be read: {error}") from error
    url, key = options.url, os.environ.get(API_KEY)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/darts/v1/state", headers=headers, timeout=TIMEOUT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InvalidSetting(f"--url: {url} does not answer: {error}") from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise InvalidSetting(f"--url: {url} wants an API key; set {API_KEY}")
    if not answer.is_success:
        raise InvalidSetting(f"--url: {url} answered {answer.status_code}: {answer.text[:200]}")
    return answer.content


def _read_lengths(data: bytes) -> tuple[list[PromptStats], LengthProfile | None]:
    """Return what a saved state has learned: of each prompt, and of ratios to its mean length.

    Raises:
        InvalidSetting: it contains lengths that cannot be used.
        StateDamaged, StateTooNew
    """
    prompts = list[PromptStats]()
    profile = None
    for kind, key, text in unpack(data, LIMIT_BYTES):
        try:
            document = json.loads(text)
            if kind == "prompt":
                prompts.append(PromptStats(**document))
            elif kind == "profile":
                profile = LengthProfile(**json.loads(document["value"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidSetting(f"the state's {kind} {key[:64]!r} cannot be used: {error}") from error
    return prompts, profile
