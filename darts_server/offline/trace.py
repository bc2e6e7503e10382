"""``darts-server trace export``: learned lengths of a server as a trace for ``darts-server simulate``."""

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
Write the lengths that a server has learned from its prompts as a trace for darts-server simulate, which shows what a
policy would bring on your own workload. The server learns from /darts/v1/rollouts, and from requests to /v1 with n > 1
unless the request turns shaping off.
"""

EPILOG = """\
A trace has one prompt a line: {"step": 0, "prompt_tokens": 37, "lengths": [450, 396, 274], "cap": 10112}. The lengths
are those of the candidates of the prompt's last group. "cap" is their limit in tokens: a length that equals it counts
as truncated. "step" is the weight version of the group.

The length that a stopped candidate would have had is not known. It is drawn from the lengths above the length at which
the candidate was stopped, by the prompt's estimated mean and the distribution of all lengths around these means. It is
at most the cap. A state that an earlier version of the server has saved has estimates only: all its lengths are drawn,
and --prompt-tokens sets the length of its prompts.

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
    lengths: Sequence[int]
    truncated: int
    """Number of lengths that were cut at the ``cap``."""
    drawn: int
    """Number of lengths that were not seen."""
    cap: int | None
    """Limit in tokens, if it is known."""


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code.

    Raises:
        InvalidSetting: a flag is invalid, or the state cannot be read.
        StateDamaged, StateTooNew
    """
    options = parse_arguments(argv)
    prompts, profile = _read_lengths(_read_state(options))
    _check_flags(options, prompts)
    # Without a profile, lengths that were not seen cannot be drawn.
    ratios = None if profile is None else profile.quantiles(RATIOS)
    rng = np.random.default_rng(options.seed)
    traces: list[TracedLengths] = []
    lines: list[str] = []
    for prompt in prompts:
        traced = _trace_prompt(prompt, ratios, rng, options.samples, options.cap)
        if not traced.lengths:
            continue
        traces.append(traced)
        line: dict[str, int | Sequence[int]] = {
            "step": prompt.weight_version or 0,
            "prompt_tokens": prompt.prompt_tokens or options.prompt_tokens,
            "lengths": traced.lengths,
        }
        if traced.cap is not None:
            line["cap"] = traced.cap
        lines.append(json.dumps(line))
    if not lines:
        raise InvalidSetting("the state has no lengths: no group with more than one trajectory has ended there yet")
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidSetting(f"--output: {options.output} cannot be written: {error}") from error
    print(f"{len(lines)} prompts: {options.output}\n{_describe_lengths(traces)}")
    return 0


def _check_flags(options: argparse.Namespace, prompts: Sequence[PromptStats]) -> None:
    num_unknown = sum(prompt.prompt_tokens is None for prompt in prompts)
    if num_unknown and options.prompt_tokens is None:
        raise InvalidSetting(
            f"--prompt-tokens: the state does not say how long {num_unknown} of {len(prompts)} prompts are, because an "
            "earlier version saved it or these prompts have no token ids; add the flag with their length in tokens"
        )
    limit = max((prompt.max_tokens for prompt in prompts if prompt.max_tokens is not None), default=None)
    if options.cap is not None and limit is not None and options.cap > limit:
        raise InvalidSetting(
            f"--cap: requests allowed at most {limit} tokens, and it is not known how long their truncated answers "
            "would have become; lower the cap, or leave it out"
        )


def _trace_prompt(
    prompt: PromptStats,
    ratios: Floats | None,
    rng: np.random.Generator,
    samples: int,
    cap_flag: int | None,
) -> TracedLengths:
    """Return the lengths of a prompt. Lengths that were not seen are drawn, or left out if ``ratios`` is None.

    ``samples``: number of lengths for a prompt without observations.
    """
    cap = prompt.max_tokens
    if cap_flag is not None:
        cap = cap_flag if cap is None else min(cap, cap_flag)
    lengths: list[int] = []
    num_truncated = 0
    num_drawn = 0
    for observation in prompt.observations or [Observation(0, censored=True)] * samples:
        tokens = observation.tokens
        is_stopped = observation.censored and not prompt.is_truncated(observation)
        if is_stopped and (cap is None or tokens < cap):
            if ratios is None:
                continue
            # The candidate would have become longer than when it was stopped.
            possible_lengths = np.ceil(prompt.mean_ema * ratios)
            longer = possible_lengths[possible_lengths > tokens]
            tokens = int(rng.choice(longer)) if longer.size else tokens + 1
            num_drawn += 1
        if cap is not None:
            # An answer may end by itself with its last allowed token.
            num_truncated += tokens > cap or (observation.censored and tokens == cap)
            tokens = min(tokens, cap)
        lengths.append(tokens)
    return TracedLengths(lengths, num_truncated, num_drawn, cap)


def _describe_lengths(traces: Sequence[TracedLengths]) -> str:
    lengths = [length for traced in traces for length in traced.lengths]
    mean = sum(lengths) / len(lengths)
    sentences = [f"{len(lengths)} lengths: mean {mean:.1f} tokens, longest {max(lengths)}."]
    caps = {traced.cap for traced in traces if traced.cap is not None}
    if caps:
        limits = f"{min(caps)}" if len(caps) == 1 else f"{min(caps)} to {max(caps)}"
        truncated_share = sum(traced.truncated for traced in traces) / len(lengths)
        sentences.append(f"Limit: {limits} tokens; {truncated_share:.0%} of the lengths are truncated there.")
    num_without_cap = sum(traced.cap is None for traced in traces)
    if num_without_cap:
        sentences.append(f"The limit of {num_without_cap} prompts is not known; set it with --cap N.")
    num_drawn = sum(traced.drawn for traced in traces)
    if num_drawn:
        sentences.append(
            f"{num_drawn} lengths are drawn from estimates, because the ends of their candidates were not seen."
        )
    return "\n".join(sentences)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
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
    source.add_argument("--url", help=f"URL of a running server; its API key, if it has one, in {API_KEY}")
    source.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="state that was saved by GET /darts/v1/state",
    )
    add = export.add_argument
    add(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="file for the trace, as JSON lines",
    )
    samples_help = "number of lengths for a prompt whose lengths were not seen (default: %(default)s)"
    add(
        "--samples",
        type=int,
        default=16,
        metavar="N",
        help=samples_help,
    )
    add(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="tokens of each prompt whose length is not known",
    )
    cap_help = "maximum length of a trajectory, at most the limit of the requests (default: the limit of the requests)"
    add(
        "--cap",
        type=int,
        metavar="N",
        help=cap_help,
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the drawn lengths (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    for flag, least in {"samples": 1, "prompt_tokens": 1, "cap": 1, "seed": 0}.items():
        value = getattr(options, flag)
        if value is not None and value < least:
            export.error(f"--{flag.replace('_', '-')} must be at least {least}")
    return options


def _read_state(options: argparse.Namespace) -> bytes:
    if options.state is not None:
        try:
            return Path(options.state).read_bytes()
        except OSError as error:
            raise InvalidSetting(f"--state: {options.state} cannot be read: {error}") from error
    url = options.url
    headers = {}
    if API_KEY in os.environ:
        headers["Authorization"] = f"Bearer {os.environ[API_KEY]}"
    try:
        answer = httpx.get(f"{url.rstrip('/')}/darts/v1/state", headers=headers, timeout=TIMEOUT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InvalidSetting(f"--url: {url} does not answer: {error}") from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise InvalidSetting(f"--url: {url} requires an API key; set {API_KEY}")
    if not answer.is_success:
        raise InvalidSetting(f"--url: {url} answered {answer.status_code}: {answer.text[:200]}")
    return answer.content


def _read_lengths(data: bytes) -> tuple[list[PromptStats], LengthProfile | None]:
    """Return the statistics of each prompt, and the distribution of lengths around their prompt's mean.

    Raises:
        InvalidSetting: the state has lengths that cannot be used.
        StateDamaged, StateTooNew
    """
    prompts: list[PromptStats] = []
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
