"""``darts-server trace export``: what a server has learned of lengths, as a trace for ``darts-server simulate``.

Uses the saved state and policies, and nothing that serves.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from darts_server.estimates.length_profile import LengthProfile
from darts_server.estimates.lengths import Observation, PromptStats
from darts_server.exceptions import InvalidSetting
from darts_server.offline.simulation.model.batch import Floats
from darts_server.store.archive import LIMIT_BYTES, unpack

DESCRIPTION = """\
Write what a server has learned of its prompts' lengths as a trace, which darts-server simulate reads: so you can see
what a policy would bring on your own workload before you use it. The server learns of /darts/v1/rollouts, and of
requests to /v1 with n > 1, but not of those that say themselves that they are not to be shaped.
"""

EPILOG = """\
A trace has one prompt a line: {"step": 0, "prompt_tokens": 37, "lengths": [450, 396, 274], "cap": 10112}. The lengths
are those of the candidates of the prompt's last group, and "cap" is the limit of their tokens: a length that equals it
counts as truncated. "step" is the weight version of the group.

The length that a stopped candidate would have had is not known. It is drawn from what is longer than the candidate was
when it was stopped, by the prompt's estimated mean and the distribution of all lengths around these means, and it is at
most the cap. A state that an earlier version of the server has saved has the estimates alone: all its lengths are
drawn, and --prompt-tokens says how long its prompts are.

examples:
  darts-server trace export --url http://127.0.0.1:8000 --output lengths.jsonl
  darts-server trace export --state checkpoint/darts-state --cap 2048 --output lengths.jsonl
  darts-server simulate --trace lengths.jsonl --preset h200-8b
"""
API_KEY = "DARTS_API_KEY"
RATIOS = 4096
"""Quantiles of the ratios of lengths to their prompt's mean. The longest length of a batch is one in thousands."""
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TracedLengths:
    """Lengths of one prompt in a trace.

    ``truncated``: how many of the ``lengths`` end at the ``cap`` and not by themselves. ``drawn``: how many are drawn,
    as they were not seen. ``cap``: limit in tokens, ``None`` if it is not known.
    """

    lengths: Sequence[int]
    truncated: int
    drawn: int
    cap: int | None


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code.

    Raises:
        InvalidSetting: a flag is invalid, or the state cannot be read.
        StateDamaged, StateTooNew
    """
    options = parse_arguments(argv)
    prompts, profile = _read_lengths(_read_state(options))
    _check_flags(options, prompts)
    ratios = None if profile is None else profile.quantiles(RATIOS)
    rng = np.random.default_rng(options.seed)
    traced: list[TracedLengths] = []
    lines: list[str] = []
    for prompt in prompts:
        found = _trace(prompt, ratios, rng, options.samples, options.cap)
        if not found.lengths:
            continue
        traced.append(found)
        line: dict[str, int | Sequence[int]] = {
            "step": prompt.weight_version or 0,
            "prompt_tokens": prompt.prompt_tokens or options.prompt_tokens,
            "lengths": found.lengths,
        }
        if found.cap is not None:
            line["cap"] = found.cap
        lines.append(json.dumps(line))
    if not lines:
        raise InvalidSetting("the state has no lengths: no group with more than one trajectory has ended there yet")
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidSetting(f"--output: {options.output} cannot be written: {error}") from error
    print(f"{len(lines)} prompts: {options.output}\n{_describe(traced)}")
    return 0


def _check_flags(options: argparse.Namespace, prompts: Sequence[PromptStats]) -> None:
    """Check that the flags fit what was seen.

    Raises:
        InvalidSetting: names the flag.
    """
    unknown = sum(prompt.prompt_tokens is None for prompt in prompts)
    if unknown and options.prompt_tokens is None:
        raise InvalidSetting(
            f"--prompt-tokens: the state does not say how long {unknown} of {len(prompts)} prompts are, as an earlier "
            "version has saved it or they are no token ids; add the flag with their length in tokens"
        )
    most = max((prompt.max_tokens for prompt in prompts if prompt.max_tokens is not None), default=None)
    if options.cap is not None and most is not None and options.cap > most:
        raise InvalidSetting(
            f"--cap: requests allowed at most {most} tokens, and what would have become of truncated answers is not "
            "known; lower it, or leave it out"
        )


def _trace(
    prompt: PromptStats,
    ratios: Floats | None,
    rng: np.random.Generator,
    samples: int,
    cap_flag: int | None,
) -> TracedLengths:
    """Return the lengths that were seen of a prompt. Lengths that were not seen are drawn, if ``ratios`` are known."""
    seen = prompt.observations or [Observation(0, censored=True)] * samples
    cap = prompt.max_tokens
    if cap_flag is not None:
        cap = cap_flag if cap is None else min(cap, cap_flag)
    lengths: list[int] = []
    truncated = 0
    drawn = 0
    for o in seen:
        tokens = o.tokens
        if o.censored and not prompt.is_truncated(o) and (cap is None or tokens < cap):
            if ratios is None:
                continue
            possible = np.ceil(prompt.mean_ema * ratios)
            longer = possible[possible > tokens]
            tokens = int(rng.choice(longer)) if longer.size else tokens + 1
            drawn += 1
        if cap is not None:
            # An answer may end by itself with the last token that it is allowed.
            truncated += tokens > cap or (o.censored and tokens == cap)
            tokens = min(tokens, cap)
        lengths.append(tokens)
    return TracedLengths(lengths, truncated, drawn, cap)


def _describe(traced: Sequence[TracedLengths]) -> str:
    """Say in words what the lengths are, and what is not known of them."""
    lengths = [length for each in traced for length in each.lengths]
    caps = {each.cap for each in traced if each.cap is not None}
    truncated = sum(each.truncated for each in traced)
    drawn = sum(each.drawn for each in traced)
    mean = sum(lengths) / len(lengths)
    said = [f"{len(lengths)} lengths: mean {mean:.1f} tokens, longest {max(lengths)}."]
    if caps:
        limits = f"{min(caps)}" if len(caps) == 1 else f"{min(caps)} to {max(caps)}"
        said.append(f"Limit: {limits} tokens; {truncated / len(lengths):.0%} of the lengths are truncated there.")
    if unknown := sum(each.cap is None for each in traced):
        said.append(f"The limit of {unknown} prompts is not known; --cap N says what it is.")
    if drawn:
        said.append(f"{drawn} lengths are drawn by estimates, since the ends of these candidates were not seen.")
    return "\n".join(said)


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
    samples = "lengths of each prompt of which none was seen (default: %(default)s)"
    add("--samples", type=int, default=16, metavar="N", help=samples)
    add("--prompt-tokens", type=int, metavar="N", help="tokens of each prompt whose length is not known")
    cap = "longest that a trajectory may become, at most what requests allowed (default: what they allowed)"
    add("--cap", type=int, metavar="N", help=cap)
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
